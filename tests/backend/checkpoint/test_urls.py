"""Checkpoints at URLs: a real S3 server, connections to it that break, and stores of this process."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

pytest.importorskip("moto.server", reason="pip install 'shardproof[test]' brings the server")
from helpers.plans import training_plan
from shardproof import Trainer
from shardproof.backend.base import urls
from shardproof.backend.base.urls import UrlPath, place_of
from shardproof.backend.checkpoint.resume import path_of, resumption, saved_in
from shardproof.backend.dcp.index import INDEX_FILE
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.options import add_plan, read_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.train import Checkpoint


def tiny(folder: str, layout: Layout, *, steps: int = 4, **checkpoint) -> Plan:
    return training_plan(layout, steps=steps, samples=4, sequence=8, checkpoint=Checkpoint(folder, **checkpoint))


def losses(plan: Plan, resume: str | None = None) -> list[float]:
    job = TrainJob(plan, validate=False, resume=resume)
    found = run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), train_rank, job)
    return [step.loss for step in found[0].steps]


def test_a_run_saves_to_s3_and_goes_on_from_there_under_another_layout_though_transfers_break(way, tmp_path):
    wanted = losses(tiny(str(tmp_path), Layout()))
    first = tiny("s3://bucket/run", Layout(dp=2, zero=1), every=1, keep=2, steps=2)
    way.num_cuts = 3
    assert losses(first) == wanted[:2] and way.cuts == 3
    second = tiny("s3://bucket/run", Layout(tp=2), keep=2)
    found = resumption(second, resume=True)
    assert found.saved.path == UrlPath("s3://bucket/run/step-00000002") and found.changes == ()
    way.num_cuts, way.cuts = 2, 0
    assert losses(second, str(found.saved.path)) == wanted[2:] and way.cuts == 2
    assert [saved.steps for saved in saved_in(UrlPath("s3://bucket/run"))] == [2, 4]


def test_what_is_not_whole_is_no_checkpoint_and_what_is_damaged_is_not_gone_on_from(capfd):
    """Objects in this process's memory: what a run that was ended while it uploaded leaves has no index."""
    folder = place_of("memory://half/run")
    plan = tiny(str(folder), Layout(dp=2), every=1)
    wanted = losses(plan)
    (path_of(folder, 4) / INDEX_FILE).remove()
    assert [saved.steps for saved in saved_in(folder)] == [1, 2, 3]
    file = path_of(folder, 3) / "__1_0.distcp"
    system, name = urls._system_of(file.url)
    content = system.cat_file(name)
    system.pipe_file(name, content[:200] + bytes([content[200] ^ 1]) + content[201:])
    assert losses(plan, str(path_of(folder, 3))) == wanted[2:]
    assert "step-00000003 is damaged" in capfd.readouterr().err
    assert [saved.steps for saved in saved_in(folder)] == [1, 2, 3, 4]


def test_a_file_url_is_a_folder_too(tmp_path):
    wanted = losses(tiny(f"file://{tmp_path}/run", Layout(dp=2), steps=2))
    assert [saved.steps for saved in saved_in(tmp_path / "run")] == [2]
    assert losses(tiny(str(tmp_path / "run"), Layout(), steps=3), str(path_of(tmp_path / "run", 2)))
    assert len(wanted) == 2


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("http://127.0.0.1:9/run", "cannot be written to: http is read-only here. Use s3://"),
        ("nowhere://run", "Protocol not known: nowhere. Use a protocol that fsspec knows"),
    ],
)
def test_a_url_that_is_of_no_use_is_refused_before_a_run_starts(folder, words):
    with pytest.raises(PlanError, match=words):
        Trainer(tiny(folder, Layout()), resume=True)


def test_a_bucket_that_is_not_there_is_named_and_not_made(way):
    import s3fs

    with pytest.raises(PlanError, match="there is no bucket 'buket'"):
        Trainer(tiny("s3://buket/run", Layout()))
    with pytest.raises(FileNotFoundError):
        UrlPath("s3://buket/file").upload(Path(__file__))
    assert s3fs.S3FileSystem().ls("") == ["bucket"]


def test_a_place_that_stays_away_is_given_up_after_some_tries_and_named(monkeypatch):
    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/file"
    with pytest.raises(OSError, match=f"cannot read {url}, 5 times: ClientConnectorError"):
        UrlPath(url).read(0, 4)


def test_a_url_in_a_plan_is_not_a_path_next_to_it(tmp_path):
    plan = (
        '[model]\npreset = "tiny-llama"\n[batch]\nglobal = 2\nsequence = 8\n[checkpoint]\nfolder = "s3://bucket/run"\n'
    )
    (tmp_path / "plan.toml").write_text(plan)
    parser = argparse.ArgumentParser()
    add_plan(parser)
    assert read_plan(parser.parse_args([str(tmp_path / "plan.toml")])).checkpoint.folder == "s3://bucket/run"
