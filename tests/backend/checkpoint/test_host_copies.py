"""Checkpoints on hosts' own disks, with copies on the next ones. Hosts are pretended: ranks with a folder of their
own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.plans import training_plan
from shardproof.backend.checkpoint import exchange
from shardproof.backend.checkpoint.exchange import Stream, exchanged
from shardproof.backend.checkpoint.host_storage import HostStorage
from shardproof.backend.checkpoint.resume import path_of, resumption, saved_in
from shardproof.backend.dcp.index import INDEX_FILE, SavedFile
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.digest import digest_bytes, to_hex
from shardproof.core.base.errors import PlanError, RankFailure
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.train import Checkpoint

HOST_OF = (0, 0, 1, 2)
"""Four ranks on three hosts."""


def folders(root: Path) -> list[Path]:
    return [root / f"host-{host}" / "run" for host in range(3)]


def train(root: Path, layout: Layout, steps: int, *, resume: bool = False, hosts=HOST_OF, on_step=None, **checkpoint):
    """The results of all ranks, each of which has its host's folder."""

    def rank(transport, job):
        chosen = Checkpoint(str(root / f"host-{hosts[transport.global_rank]}" / "run"), **checkpoint)
        plan = replace(job.plan, checkpoint=chosen)
        found = resumption(plan, resume=resume)
        path = None if found is None else str(found.saved.path)
        return train_rank(transport, replace(job, plan=plan, resume=path))

    plan = training_plan(layout, steps=steps, samples=4, sequence=8)
    return run_threads(
        MemoryWorld(layout.world_size, timeout_s=60), rank, TrainJob(plan, validate=False, on_step=on_step)
    )


def losses(results) -> list[float]:
    return [step.loss for step in results[0].steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of six steps; they are the same in every layout."""
    return losses(train(tmp_path_factory.mktemp("whole"), Layout(), 6, hosts=(0,)))


@pytest.mark.parametrize(
    ("lost", "layout"), [(0, Layout(dp=4, zero=1)), (1, Layout(dp=4, zero=1)), (2, Layout(tp=2, pp=2))]
)
def test_a_run_goes_on_with_its_bits_after_any_one_host_is_lost(lost, layout, tmp_path, undisturbed, monkeypatch):
    monkeypatch.setattr(exchange, "PIECE_BYTES", 5_000)  # several pieces of every file
    first = train(tmp_path, Layout(dp=4, zero=1), 3, every=1, keep=1, copies=1)
    assert losses(first) == undisturbed[:3] and [event["step"] for event in first[0].events] == [1, 2, 3]
    assert [[saved.steps for saved in saved_in(folder)] for folder in folders(tmp_path)] == [[3]] * 3
    shutil.rmtree(folders(tmp_path)[lost])
    second = train(tmp_path, layout, 6, resume=True, every=2, keep=2, copies=1)
    assert losses(second) == undisturbed[3:] and second[0].events[0]["event"] == "resumed"
    assert [[saved.steps for saved in saved_in(folder)] for folder in folders(tmp_path)] == [[4, 6]] * 3


def test_each_host_has_its_ranks_files_and_those_of_the_host_before(tmp_path):
    train(tmp_path, Layout(dp=4, zero=1), 1, copies=1)
    names = [sorted(each.name for each in path_of(folder, 1).glob("*.distcp")) for folder in folders(tmp_path)]
    assert names == [
        ["__0_0.distcp", "__1_0.distcp", "__3_0.distcp"],
        ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"],
        ["__2_0.distcp", "__3_0.distcp"],
    ]
    assert len({(path_of(folder, 1) / INDEX_FILE).read_bytes() for folder in folders(tmp_path)}) == 1


def test_two_lost_hosts_are_too_many_and_what_is_missing_is_named(tmp_path):
    train(tmp_path, Layout(dp=4, zero=1), 2, every=1, copies=1)
    for folder in folders(tmp_path)[:2]:
        shutil.rmtree(folder)
    with pytest.raises(RankFailure) as failure:
        train(tmp_path, Layout(dp=4, zero=1), 3, resume=True, copies=1)
    assert isinstance(failure.value.__cause__, PlanError)
    text = str(failure.value.__cause__)
    assert "step-00000002 has lost __0_0.distcp, __1_0.distcp: no host has it as it was saved." in text
    assert "checkpoint.copies=1 the folders of 1 of them may be lost. Bring a folder of a host" in text


def test_an_unfinished_save_is_not_gone_on_from_and_a_damaged_file_comes_from_the_copy(tmp_path, undisturbed):
    train(tmp_path, Layout(dp=4, zero=1), 3, every=1, copies=1)
    for folder in folders(tmp_path)[1:]:  # as if two hosts had been ended before they gave it its name
        path_of(folder, 3).rename(path_of(folder, 3).with_suffix(".partial"))
    assert losses(train(tmp_path, Layout(dp=4, zero=1), 4, resume=True, copies=1)) == undisturbed[2:4]
    file = path_of(folders(tmp_path)[1], 4) / "__2_0.distcp"
    wanted = file.read_bytes()
    file.write_bytes(wanted[:300] + bytes([wanted[300] ^ 1]) + wanted[301:])
    assert losses(train(tmp_path, Layout(dp=4, zero=1), 4, resume=True, copies=1)) == []
    assert file.read_bytes() == wanted


def test_a_run_that_is_killed_while_it_copies_has_the_checkpoint_before(tmp_path, undisturbed, monkeypatch):
    rest = HostStorage.rest

    def ended(self, steps, written, finish):
        for number, work in enumerate(rest(self, steps, written, finish)):
            if steps == 2 and number == 5:  # the first host has given it its name
                raise KeyboardInterrupt
            yield work if steps != 2 or number != 4 or self._world.rank == 0 else lambda: None

    monkeypatch.setattr(HostStorage, "rest", ended)
    with pytest.raises((RankFailure, KeyboardInterrupt)):
        train(tmp_path, Layout(dp=4, zero=1), 3, every=1, keep=1, copies=1, asynchronous=False)
    monkeypatch.undo()
    found = [[saved.steps for saved in saved_in(folder)] for folder in folders(tmp_path)]
    assert found == [[1, 2], [1], [1]]
    assert losses(train(tmp_path, Layout(dp=4, zero=1), 3, resume=True, copies=1)) == undisturbed[1:3]


@pytest.mark.parametrize(
    ("hosts", "copies", "words"),
    [
        ((0, 0, 0, 0), 1, "copies=1 needs 2 hosts with folders of their own, and this run has 1"),
        ((0, 0, 1, 1), 2, "copies=2 needs 3 hosts with folders of their own, and this run has 2"),
    ],
)
def test_too_few_hosts_are_refused(hosts, copies, words, tmp_path):
    with pytest.raises(RankFailure) as failure:
        train(tmp_path, Layout(dp=4, zero=1), 1, hosts=hosts, copies=copies)
    assert words in str(failure.value.__cause__)


def test_a_folder_that_several_hosts_see_is_refused(tmp_path, monkeypatch):
    def two_hosts(world, device, folder):
        return [[0, 1], [2, 3]], ["a", "b"]

    monkeypatch.setattr("shardproof.backend.checkpoint.host_storage._hosts_of", two_hosts)
    with pytest.raises(RankFailure) as failure:
        train(tmp_path, Layout(dp=4, zero=1), 1, hosts=(0, 0, 0, 0), copies=1)
    assert "is one folder that several hosts see" in str(failure.value.__cause__)


def test_files_are_exchanged_in_pieces_and_what_arrives_otherwise_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "PIECE_BYTES", 7)
    contents = {"a": b"first file", "b": b"", "c": b"and the third one"}
    files = {name: SavedFile(len(each), to_hex(digest_bytes(each))) for name, each in contents.items()}
    (tmp_path / "to").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    def rank(transport, wanted):
        stream = Stream(1, 0, {name: SavedFile(*found) for name, found in json.loads(wanted).items()})
        for work in exchanged([stream], transport.everyone, torch.device("cpu"), tmp_path, tmp_path / "to"):
            work()

    given = {name: [file.num_bytes, file.digest] for name, file in files.items()}
    run_threads(MemoryWorld(2, timeout_s=60), rank, json.dumps(given))
    assert {name: (tmp_path / "to" / name).read_bytes() for name in contents} == contents
    with pytest.raises(RankFailure) as failure:
        run_threads(MemoryWorld(2, timeout_s=60), rank, json.dumps({**given, "a": [10, "0" * 32]}))
    assert "what rank 1 sent has not arrived as it was sent" in str(failure.value.__cause__)
