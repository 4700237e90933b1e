"""Training data at URLs: the same samples as from a disk, read by ranges, kept in a bounded cache that processes of a
host share, through a real S3 server whose connections break."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("moto.server", reason="pip install 'shardproof[test]' brings the server")
import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from helpers.plans import training_plan
from helpers.stores import http_server
from shardproof.backend.base.url_cache import UrlCache
from shardproof.backend.base.urls import UrlPath
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.data.megatron_index import write_index
from shardproof.backend.data.remote_tokens import RemoteTokens
from shardproof.backend.data.token_files import open_tokens, token_file_of
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import FileError, PlanError
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.train import Train


def write_pair(folder: Path, name: str, lengths: list[int], seed: int) -> None:
    """A token file of bytes' ids whose documents have so many tokens."""
    ids = np.random.default_rng(seed).integers(0, 256, sum(lengths)).astype("<u2")
    (folder / f"{name}.bin").write_bytes(ids.tobytes())
    with (folder / f"{name}.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), np.array(lengths), np.arange(len(lengths) + 1))


def upload(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (UrlPath(url) / path.relative_to(folder).as_posix()).upload(path)


def assert_same_samples(ours: Corpus, theirs: Corpus, *, documents: bool) -> None:
    assert ours.record == theirs.record
    assert all(map(torch.equal, ours.batch(0, 40, 16, 7), theirs.batch(0, 40, 16, 7)))
    assert all(map(torch.equal, ours.validation_batch(0, 5, 16), theirs.validation_batch(0, 5, 16)))
    if documents:
        assert torch.equal(ours.documents(3, 9, 16, 7), theirs.documents(3, 9, 16, 7))
        assert all(map(torch.equal, ours.padded(0, 40, 16, 7, 0), theirs.padded(0, 40, 16, 7, 0)))


@pytest.fixture
def cache(tmp_path):
    return UrlCache(str(tmp_path / "cache"), 2**20)


@pytest.fixture
def files(tmp_path):
    """A folder with two token files of 300 and 30 KB, a plain one, and a folder of texts."""
    folder = tmp_path / "files"
    (folder / "texts" / "more").mkdir(parents=True)
    write_pair(folder, "news", [500] * 300, 1)
    write_pair(folder, "books", [100, 0, 50] * 100, 2)
    (folder / "plain.bin").write_bytes(np.arange(4000, dtype="<u2").tobytes())
    (folder / "texts" / "more" / "a.txt").write_text("one " * 500)
    (folder / "texts" / "b.txt").write_text("two " * 500)
    (folder / "texts" / ".hidden").write_text("three")
    return folder


def test_samples_from_s3_are_those_from_a_disk_though_transfers_break(files, cache, way):
    upload(files, "s3://bucket/data")
    way.num_cuts = 4
    for name in ("news", "books.idx", "plain.bin", "texts", "texts/b.txt"):
        remote, local = (Corpus.load(f"{base}/{name}", cache=cache) for base in ("s3://bucket/data", files))
        assert_same_samples(remote, local, documents=name != "plain.bin")
        assert remote.is_remote == (not name.startswith("texts")) and not local.is_remote
    blends = [Corpus.load(f"3 {base}/news 1 {base}/books", cache=cache) for base in ("s3://bucket/data", files)]
    assert_same_samples(*blends, documents=True)
    assert way.cuts == 4


def test_a_run_on_s3_has_the_losses_of_one_on_a_disk_and_reads_ahead(files, tmp_path, monkeypatch, way):
    def losses(data: str) -> list[float]:
        plan = training_plan(Layout(dp=2), steps=4, samples=4, sequence=16)
        plan = replace(plan, train=replace(plan.train, data=data, data_cache=str(tmp_path / "cache")))
        found = run_threads(MemoryWorld(2, timeout_s=60), train_rank, TrainJob(plan, validate=False))
        return [step.loss for step in found[0].steps]

    readers = set()
    read = RemoteTokens.rows

    def noted(self, spans):
        readers.add(threading.current_thread().name)
        return read(self, spans)

    upload(files, "s3://bucket/data")
    wanted = losses(f"{files}/news")
    monkeypatch.setattr(RemoteTokens, "rows", noted)
    way.num_cuts = 2
    assert losses("s3://bucket/data/news") == wanted and way.cuts == 2
    assert any(name.startswith("read-ahead") for name in readers)


def test_the_cache_stays_in_its_bound_and_what_is_damaged_in_it_is_read_again(tmp_path, cache):
    ids = np.random.default_rng(3).integers(0, 65535, 2**20, dtype=np.uint16)  # 2 MiB, twice the bound
    (tmp_path / "large.bin").write_bytes(ids.tobytes())
    with http_server({"large.bin": ids.tobytes()}) as (port, asked):
        tokens = open_tokens(UrlPath(f"http://127.0.0.1:{port}/large.bin"), cache).ids
        assert len(tokens) == len(ids)
        for lo in range(0, len(ids) - 1000, 50_000):
            assert np.array_equal(np.asarray(tokens[lo : lo + 1000]), ids[lo : lo + 1000])
        assert np.array_equal(np.asarray(tokens), ids)
        slots = tmp_path / "cache" / "blocks" / "slots"
        assert slots.stat().st_size <= 2**20
        np.asarray(tokens[-1000:])  # blocks of one slot are fetched at the same time: any of them may be the last in it
        before = len(asked)
        assert np.array_equal(np.asarray(tokens[-1000:]), ids[-1000:]) and len(asked) == before
        slots.write_bytes(b"\1" * slots.stat().st_size)
        assert np.array_equal(np.asarray(tokens[-1000:]), ids[-1000:]) and len(asked) == before + 1


def test_processes_of_a_host_ask_for_a_block_once(tmp_path):
    program = (
        "import sys; from shardproof.backend.base.url_cache import UrlCache; from shardproof.backend.base.urls import "
        "UrlPath; b = UrlCache(sys.argv[2], 2**20).blocks(UrlPath(sys.argv[1])); print(b.read([(70000, 70004)])[0])"
    )
    content = bytes(range(256)) * 400
    with http_server({"x.bin": content}, delay_s=0.5) as (port, asked):
        arguments = [sys.executable, "-c", program, f"http://127.0.0.1:{port}/x.bin", str(tmp_path / "cache")]
        started = [subprocess.Popen(arguments, stdout=subprocess.PIPE) for _ in range(2)]
        assert [each.communicate(timeout=60)[0].decode().strip() for each in started] == [str(content[70000:70004])] * 2
    assert [wanted for _, wanted in asked if wanted] == [(65536, len(content) - 1)]


def test_an_object_that_was_replaced_is_read_anew(tmp_path, cache):
    url = UrlPath("memory://replaced/words.txt")
    for text in ("first " * 50, "other " * 50):
        (tmp_path / "words").write_text(text)
        url.upload(tmp_path / "words")
        assert cache.local(url).read_text() == text


def test_any_protocol_of_fsspecs_registry_will_do(files, cache, tmp_path):
    class Store(MemoryFileSystem):
        protocol = "msc"
        store: ClassVar[dict] = {}
        pseudo_dirs: ClassVar[list] = [""]

    fsspec.register_implementation("msc", Store, clobber=True)
    upload(files, "msc://profile/data")
    remote, local = (Corpus.load(f"{base}/news", cache=cache) for base in ("msc://profile/data", files))
    assert_same_samples(remote, local, documents=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory://nothing/here.bin", "there is no object memory://nothing/here.bin"),
        ("memory://nothing/here", "'memory://nothing/here' is no object and there is none below"),
        ("nowhere://data.bin", "Protocol not known: nowhere"),
        ("https://host/data.bin?signature=1", "has a query"),
    ],
)
def test_data_that_are_not_there_are_refused_before_ranks_start(name, words, capsys):
    assert main(["train", "--model", "tiny-llama", "--sequence", "16", "--set", f"train.data={name}"]) == 2
    assert words in capsys.readouterr().err


def test_a_server_without_ranges_is_refused_and_so_is_a_cache_that_others_write_to(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with http_server({"x.bin": bytes(200_000)}, ranges=False) as (port, _):
        url = f"http://127.0.0.1:{port}/x.bin"
        with pytest.raises(FileError, match=r"gives 200000 bytes where .* so it has no ranges"):
            Corpus.load(url, cache=UrlCache(str(tmp_path / "cache"))).batch(0, 1, 16, 1)
        with pytest.raises(FileError, match=r"open is no folder that only this user can write to.*train\.data_cache"):
            Corpus.load(url, cache=UrlCache(str(open_folder)))


def test_the_place_of_the_cache_is_no_part_of_the_problem():
    from shardproof.backend.checkpoint.resume import problem_of

    plan = training_plan(Layout(), steps=2, samples=4, sequence=8)
    other = replace(plan, train=replace(plan.train, data_cache="/elsewhere", data_cache_bytes=2**30))
    assert problem_of(plan) == problem_of(other) and Train().data_cache_bytes == 16 * 2**30
    assert token_file_of("memory://a/b.idx") == UrlPath("memory://a/b.bin")
    with pytest.raises(PlanError):
        open_tokens(UrlPath("memory://a/b.bin"))
