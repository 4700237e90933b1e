"""Damaged checkpoints: whatever is done to the files, no damaged tensor is used, what is damaged is named,
and nothing is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers.gates import sampled
from helpers.plans import product_plan
from shardproof.backend.base.libraries import CHECKPOINTS
from shardproof.backend.checkpoint import saver
from shardproof.backend.checkpoint.lock import LOCK_FILE, locked
from shardproof.backend.checkpoint.resume import path_of, saved_in
from shardproof.backend.checkpoint.saver import Checkpoints
from shardproof.backend.checkpoint.tensors import Piece, read_tensors, write_tensors
from shardproof.backend.checkpoint.whole import contents_of
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.dcp.files import digest_of
from shardproof.backend.dcp.index import INDEX_FILE, Contents, DamagedError
from shardproof.backend.dcp.older import contents_without_index
from shardproof.backend.dcp.records import read_records
from shardproof.backend.launching.launch import Workers, preload
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import PlanError, RankFailure
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.train import Train

RANKS = 2
SHAPES = {"a": (4, 3), "b": (6,), "c": (2, 2), "count": ()}
"""Tensors of two ranks: `a` and `b` in rows, `c` in columns, `count` whole."""


def plan_of(folder: Path, **options) -> Plan:
    sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "head_dim": 4}
    return product_plan(
        samples=2, sequence=8, **{"dtype": "fp32", "steps": 99, "folder": str(folder), **sizes, **options}
    )


def values_of(run: int, steps: int) -> dict[str, torch.Tensor]:
    """What a run has after so many steps: different in every element from all others."""
    generator = torch.Generator().manual_seed(100 * run + steps)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def pieces_of(rank: int, values: dict[str, torch.Tensor]) -> list[Piece]:
    half = {"a": (slice(2 * rank, 2 * rank + 2), slice(0, 3)), "b": (slice(3 * rank, 3 * rank + 3),)}
    half |= {"c": (slice(0, 2), slice(rank, rank + 1)), "count": ()}
    return [Piece(name, SHAPES[name], part, values[name][part]) for name, part in half.items()]


def save(folder: Path, run: int, steps: tuple[int, ...]) -> None:
    plan = plan_of(folder)
    corpus = Corpus.load(plan.train.data)

    def on_rank(transport, _):
        world = transport.group("world", "world", range(RANKS))
        checkpoints = Checkpoints(plan, corpus, world, transport.device)
        for number in steps:
            checkpoints.save_pieces(number, pieces_of(world.rank, values_of(run, number)))

    run_threads(MemoryWorld(RANKS, timeout_s=60), on_rank, None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folders of two runs, `0` and `1`, each with checkpoints after 20 and 40 steps."""
    folder = tmp_path_factory.mktemp("runs")
    for run in range(2):
        save(folder / str(run), run, (20, 40))
    return folder


@pytest.fixture
def folder(runs, tmp_path) -> Path:
    """A copy of the first run's folder, to be damaged, and one of the second's."""
    shutil.copytree(runs / "1", tmp_path / "1")
    return shutil.copytree(runs / "0", tmp_path / "0")


NOTHING = -7.0
"""In tensors before they are filled."""


def restored(folder: Path, monkeypatch, steps: int = 40) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """What the ranks go on from: steps, and what is in their tensors then."""
    plan = plan_of(folder)
    corpus = Corpus.load(plan.train.data)
    held = [{name: torch.full(shape, NOTHING) for name, shape in SHAPES.items()} for _ in range(RANKS)]
    monkeypatch.setattr(saver, "pieces_of", lambda rank: pieces_of(rank, held[rank]))
    monkeypatch.setattr(saver, "take_up", lambda rank, pieces: None)

    def on_rank(transport, _):
        world = transport.group("world", "world", range(RANKS))
        own = corpus if world.rank == 0 else None
        return Checkpoints(plan, own, world, transport.device).restore(path_of(folder, steps), world.rank), held[
            world.rank
        ]

    try:
        return run_threads(MemoryWorld(RANKS, timeout_s=60), on_rank, None)
    except RankFailure as failure:
        assert all(bool((tensor == NOTHING).all()) for own in held for tensor in own.values()), "something was filled"
        raise failure.__cause__ from None


def assert_goes_on_from(found, run: int, steps: int) -> None:
    """All ranks go on from that checkpoint, and each value is its own."""
    for rank, (number, held) in enumerate(found):
        assert number == steps
        for ours, saved in zip(pieces_of(rank, held), pieces_of(rank, values_of(run, steps)), strict=True):
            assert torch.equal(ours.tensor, saved.tensor), ours.name


def flip(chosen: random.Random, path: Path, other: Path) -> str:
    file = chosen.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    place = chosen.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    return file.name


def cut(chosen: random.Random, path: Path, other: Path) -> str:
    file = chosen.choice(sorted(path.iterdir()))
    file.write_bytes(file.read_bytes()[: chosen.choice([0, chosen.randrange(file.stat().st_size)])])
    return file.name


def append(chosen: random.Random, path: Path, other: Path) -> str:
    file = chosen.choice(sorted(path.iterdir()))
    file.write_bytes(file.read_bytes() + chosen.choice([b"\0", b"\n", b" " * 100, file.read_bytes()]))
    return file.name


def remove(chosen: random.Random, path: Path, other: Path) -> str:
    file = chosen.choice(sorted(path.iterdir()))
    file.unlink()
    return file.name


def link(chosen: random.Random, path: Path, other: Path) -> str:
    """The same bytes, behind a link."""
    file = chosen.choice([file for file in sorted(path.iterdir()) if file.name != "state.json"])
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")
    return file.name


def replace_by(chosen: random.Random, path: Path, other: Path) -> str:
    """A whole file of another checkpoint: of the other run, or an earlier one of this."""
    source = chosen.choice([other, path_of(path.parent, 20)])
    file = chosen.choice(sorted(each for each in path.iterdir() if each.name != "state.json" or source != other))
    shutil.copy(source / file.name, file)
    return file.name


def swap(chosen: random.Random, path: Path, other: Path) -> str:
    """The files of two ranks change places."""
    first, second = path / "__0_0.distcp", path / "__1_0.distcp"
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)
    return "__0_0.distcp"


def stale_block(chosen: random.Random, path: Path, other: Path) -> str:
    """The values of one tensor's block in place, by those of another run, an older step, or another tensor."""
    source = chosen.choice([other, path_of(path.parent, 20)])
    blocks = [(name, block) for name, saved in contents_of(path).tensors.items() for block in saved.blocks]
    name, block = chosen.choice(blocks)
    (theirs,) = [each for each in contents_of(source).tensors[name].blocks if each.offsets == block.offsets]
    content = bytearray((path / block.file).read_bytes())
    content[block.first : block.first + block.num_bytes] = (source / theirs.file).read_bytes()[theirs.first :][
        : theirs.num_bytes
    ]
    (path / block.file).write_bytes(content)
    return f"tensor {name}"


def edit_metadata(chosen: random.Random, path: Path, other: Path) -> str:
    """DCP's own metadata say something else: a chunk is missing, doubled, elsewhere or of another format."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    saved = metadata.state_dict_metadata[chosen.choice("abc")]
    kind = chosen.randrange(4)
    if kind == 0:
        saved.chunks.pop()
    elif kind == 1:
        saved.chunks.append(saved.chunks[0])
    elif kind == 2:
        saved.chunks[0], saved.chunks[1] = (
            saved.chunks[1],
            replace(saved.chunks[0], offsets=torch.Size([9] * len(saved.size))),
        )
    else:
        saved.properties.dtype = torch.int32
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


def edit_index(chosen: random.Random, path: Path, other: Path) -> str:
    """A number or a digest in the index."""
    text = (path / INDEX_FILE).read_text()
    place = chosen.choice([i for i, letter in enumerate(text) if letter.isdigit()])
    (path / INDEX_FILE).write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    return INDEX_FILE


def rename(chosen: random.Random, path: Path, other: Path) -> str:
    """An older checkpoint under the newer one's name."""
    shutil.rmtree(path)
    shutil.copytree(path_of(path.parent, 20), path)
    return "is a checkpoint after 20 steps"


DAMAGES: tuple[Callable[[random.Random, Path, Path], str], ...] = (
    *(flip, flip, flip, flip, cut, append, remove, link),
    *(replace_by, replace_by, swap, stale_block, stale_block, edit_metadata, edit_index, rename),
)


@sampled("part", range(4), on_push=2)
def test_of_200_random_damages_each_is_named_and_no_damaged_tensor_is_used(part, runs, tmp_path, monkeypatch, capfd):
    for number in range(50 * part, 50 * part + 50):
        chosen = random.Random(number)
        damage = DAMAGES[number % len(DAMAGES)]
        folder = shutil.copytree(runs / "0", tmp_path / f"{number}")
        path = path_of(folder, 40)
        named = damage(chosen, path, path_of(runs / "1", 40))
        assert_goes_on_from(restored(folder, monkeypatch), 0, 20)
        said = capfd.readouterr().err
        assert said.startswith(f"resume: {path} is damaged: ") and said.endswith(
            f" Going on from {path_of(folder, 20)}.\n"
        ), (damage, said)
        # whole in itself: all files are others than it says
        is_other_index = damage is replace_by and named == INDEX_FILE
        assert ("has other bytes" if is_other_index else named) in said, (damage, named, said)
        shutil.rmtree(folder)


def test_a_flipped_bit_in_a_tensor_is_reported_with_file_and_tensor(folder, monkeypatch, capfd):
    block = contents_of(path_of(folder, 40)).tensors["c"].blocks[1]
    file = path_of(folder, 40) / block.file
    content = bytearray(file.read_bytes())
    content[block.first] ^= 4
    file.write_bytes(content)
    assert_goes_on_from(restored(folder, monkeypatch), 0, 20)
    wanted = (
        f"resume: {file.parent} is damaged: {file} has other bytes than were saved; tensor c. Going on from "
        f"{path_of(folder, 20)}.\n"
    )
    assert capfd.readouterr().err == wanted


def test_what_is_whole_is_used_and_nothing_is_said(folder, monkeypatch, capfd):
    assert_goes_on_from(restored(folder, monkeypatch), 0, 40)
    assert capfd.readouterr().err == ""


def test_with_no_whole_checkpoint_every_one_is_named_and_no_tensor_is_touched(folder, monkeypatch):
    for steps, file in ((20, "__1_0.distcp"), (40, "__0_0.distcp")):
        (path_of(folder, steps) / file).write_bytes(b"")
    with pytest.raises(PlanError) as refused:
        restored(folder, monkeypatch)
    newest, oldest, last = refused.value.problems
    assert newest.startswith(f"{path_of(folder, 40)} is damaged: ") and "__0_0.distcp has 0 bytes instead of" in newest
    assert "__1_0.distcp has 0 bytes instead of" in oldest and "has no whole checkpoint to go on from" in last


def test_a_block_that_changes_between_check_and_use_is_not_used(folder, monkeypatch, capfd):
    """The file is whole when all of it is read, and another when tensors are filled."""
    path, checked = path_of(folder, 40), []
    whole = saver.read_tensors

    def damages(at, contents, share, num_shares):
        checked.append(at)
        if at == path and share == 0:
            stale_block(random.Random(1), path, path_of(folder.parent / "1", 40))
        return []

    monkeypatch.setattr("shardproof.backend.checkpoint.tensors.damages", damages)
    assert_goes_on_from(restored(folder, monkeypatch), 0, 20)
    assert "has changed while it was read" in capfd.readouterr().err and path in checked and whole is saver.read_tensors


def test_ranks_that_see_other_folders_go_on_from_what_the_first_finds_whole(folder, monkeypatch, capfd):
    """The second rank's host does not see the newest checkpoint yet, or sees another file there: none
    goes on from it alone."""
    seen = saved_in

    def by_rank(of):
        return seen(of) if threading.current_thread().name == "rank 0" else seen(of)[:1]

    monkeypatch.setattr(saver, "saved_in", by_rank)
    assert_goes_on_from(restored(folder, monkeypatch), 0, 40)
    from shardproof.backend.checkpoint import tensors

    def fails_on_the_second(path, contents, share, num_shares):
        fails = share == 1 and path.name.endswith("40")
        return [f"{path}/__1_0.distcp cannot be read: Input/output error; it had tensor a."] if fails else []

    monkeypatch.setattr(tensors, "damages", fails_on_the_second)
    assert_goes_on_from(restored(folder, monkeypatch), 0, 20)
    assert "Input/output error" in capfd.readouterr().err


def older(path: Path) -> None:
    """Makes a checkpoint one of an earlier version."""
    (path / INDEX_FILE).unlink()
    state = json.loads((path / "state.json").read_text())
    del state["format"]
    (path / "state.json").write_text(json.dumps(state))


def test_a_checkpoint_of_an_earlier_version_is_read_with_a_notice(folder, monkeypatch, capfd):
    older(path_of(folder, 40))
    assert_goes_on_from(restored(folder, monkeypatch), 0, 40)
    assert capfd.readouterr().err.startswith(
        f"resume: {path_of(folder, 40)} is of an earlier version, which wrote no digests"
    )


def test_an_index_that_is_gone_does_not_make_a_checkpoint_an_earlier_one(folder, monkeypatch, capfd):
    (path_of(folder, 40) / INDEX_FILE).unlink()
    assert_goes_on_from(restored(folder, monkeypatch), 0, 20)
    assert f"{INDEX_FILE} cannot be read: No such file" in capfd.readouterr().err


@pytest.mark.parametrize("kind", range(4))
def test_metadata_of_an_earlier_checkpoint_that_make_no_sense_are_refused(kind, folder, monkeypatch, capfd):
    older(path_of(folder, 40))

    class Kind(random.Random):
        def randrange(self, *_):
            return kind

    edit_metadata(Kind(0), path_of(folder, 40), folder)
    assert_goes_on_from(restored(folder, monkeypatch), 0, 20)
    assert str(path_of(folder, 40)) in capfd.readouterr().err


class Opens:
    """Pickled, it is a call that makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_crafted_pickles_are_not_executed_wherever_they_lie(folder, monkeypatch, capfd, tmp_path):
    made = tmp_path / "made"
    pickle.loads(pickle.dumps(Opens(made))).close()
    assert made.exists(), "the crafted pickle works"
    made.unlink()
    path = path_of(folder, 40)
    real = pickle.loads((path / ".metadata").read_bytes())
    crafted = (Opens(made), replace(real, planner_data=Opens(made)), replace(real, storage_data={"x": Opens(made)}))
    for has_index in (True, False):
        for number, content in enumerate(crafted):
            (path / ".metadata").write_bytes(pickle.dumps(content))
            is_unneeded = number == 1 and not has_index
            assert_goes_on_from(restored(folder, monkeypatch), 0, 40 if is_unneeded else 20)
            assert (".metadata" in capfd.readouterr().err) is (has_index or number != 1)
        if has_index:
            older(path)
    assert not made.exists()


def test_a_crafted_tensor_in_the_zip_of_an_earlier_checkpoint_is_not_executed(tmp_path):
    made, values = tmp_path / "made", torch.zeros(3)
    path = tmp_path / "step-00000001"
    run_threads(
        MemoryWorld(1),
        lambda transport, _: write_tensors(
            path, [Piece("x", (3,), (slice(0, 3),), values)], transport.group("w", "w", range(1)), transport.device
        ),
        None,
    )
    (path / INDEX_FILE).unlink()
    assert contents_without_index(path, 1).tensors["x"].text == "[3] float32"
    crafted = io.BytesIO()
    torch.save(Opens(made), crafted)
    assert len(crafted.getvalue()) < (path / "__0_0.distcp").stat().st_size
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = len(crafted.getvalue())
    (path / "__0_0.distcp").write_bytes(crafted.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match=r"__0_0\.distcp: tensor x cannot be read"):
        contents_without_index(path, 1)
    assert not made.exists()


def test_bombs_in_pickles_and_indexes_are_refused_before_they_take_memory(tmp_path):
    huge = struct.pack("<Q", 1 << 40)
    nested = b"\x80\x04)" + b"\x85" * 100_000 + b"."
    for bomb in (
        b"\x80\x04\x8e" + huge,
        b"\x80\x04\x8d" + huge,
        b"\x80\x04" + b"(" * 100_000,
        nested,
        b"\x80\x04]r\xff\xff\xff\xff.",
        b"",
    ):
        path = tmp_path / "step-00000001"
        path.mkdir(exist_ok=True)
        (path / ".metadata").write_bytes(bomb)
        with pytest.raises(DamagedError, match=r"\.metadata cannot be read"):
            contents_without_index(path, 1)
    with pytest.raises(ValueError, match="instruction"):
        read_records(b"cos\nsystem\n(S'true'\ntR.")
    deep, long = b'"format": 1, "save": ' + b"[" * 100_000, b'"format": ' + b"9" * 5000 + b"}"
    for rest in (deep, long, b'"format": 1}', b"[]", b'"format": [], "x": NaN}'):
        with pytest.raises(DamagedError, match="is no index"):
            Contents.from_bytes(b'{"digest": "%s",\n' % digest_of(rest).encode() + rest)


def test_edited_sizes_in_an_index_with_a_digest_of_its_own_are_refused_in_words(folder):
    """Such an index cannot be distinguished from a real one by digests; what it asks for must still make sense."""
    good = contents_of(path_of(folder, 40))
    text = good.to_bytes().split(b"\n", 1)[1]
    block = good.tensors["a"].blocks[0]
    edits = {
        '"shape": [4, 3]': ('"shape": [4000000000, 3]', "tensor a has 12000000000 elements, and its blocks have 12"),
        f'"first": {block.first}': (f'"first": {10**12}', r"tensor a has a block outside __"),
        '"offsets": [2, 0]': ('"offsets": [1, 0]', "tensor a has two blocks that overlap"),
        '"file": "__0_0.distcp"': ('"file": "../../x"', "has a block outside ../../x"),
        '"dtype": "float32"': ('"dtype": "object"', "tensor a is of object, which is not read"),
    }
    for old, (new, words) in edits.items():
        assert old.encode() in text
        rest = text.replace(old.encode(), new.encode(), 1)
        with pytest.raises(DamagedError, match=words):
            Contents.from_bytes(b'{"digest": "%s",\n' % digest_of(rest).encode() + rest)


def test_a_saved_folder_is_an_ordinary_checkpoint_of_dcp(folder, tmp_path):
    path = path_of(folder, 40)
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=path, no_dist=True)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    for name, values in values_of(0, 40).items():
        assert torch.equal(state[name], values) and torch.equal(whole[name], values)


# the folder's lock


def test_a_second_run_in_a_folder_reports_who_has_it_and_the_first_leaves_nothing(tmp_path):
    world = MemoryWorld(1).transport(0)
    group, folder = world.group("world", "world", range(1)), tmp_path / "run"
    with locked(folder, group, world.device):
        words = rf"is in use by the run of process {os.getpid()} on host '.*', since \d{{4}}-.* UTC\. Wait for it"
        with pytest.raises(RankFailure, match=words) as refused:
            run_threads(MemoryWorld(1, timeout_s=60), train_rank, TrainJob(plan_of(folder), validate=False))
        assert isinstance(refused.value.__cause__, PlanError)
        (folder / LOCK_FILE).write_text("no words")
        with pytest.raises(PlanError, match="is in use by another run"), locked(folder, group, world.device):
            pass
    assert not list(folder.iterdir())
    with locked(folder, group, world.device):
        pass


def end_with_lock(transport, folder):
    """Is killed while it has the folder."""
    with locked(folder, transport.group("world", "world", range(1)), transport.device):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_killed_locks_nobody_out(tmp_path):
    with pytest.raises(RankFailure, match="SIGKILL"), Workers(1, timeout_s=60) as pool:
        pool.run(end_with_lock, tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] != os.getpid()
    world = MemoryWorld(1).transport(0)
    with locked(tmp_path, world.group("world", "world", range(1)), world.device):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


# a save that takes long


def save_slowly(transport, plan):
    """Writing takes rank 1 some times as long as nothing may move."""
    write_data = FileSystemWriter.write_data

    def slow(writer, own, planner):
        if transport.global_rank == 1:
            time.sleep(4 * plan.train.timeout_s)
        return write_data(writer, own, planner)

    FileSystemWriter.write_data = slow
    return len(train_rank(transport, TrainJob(plan, validate=False)).steps)


def test_a_save_that_takes_longer_than_the_time_limit_is_no_hang(tmp_path):
    preload(*CHECKPOINTS)
    layout = Layout(dp=2)
    plan = replace(
        plan_of(tmp_path / "run"),
        layout=layout,
        cluster=cluster_preset("this-host", 2),
        train=Train(steps=1, timeout_s=2.0),
    )
    with Workers(2, timeout_s=600) as pool:
        assert pool.run(save_slowly, plan, stall_s=plan.train.timeout_s) == [1, 1]
    assert [saved.steps for saved in saved_in(tmp_path / "run")] == [1]


def test_a_checkpoint_saved_again_after_a_damaged_one_keeps_that_under_another_name(folder):
    (path_of(folder, 40) / "__0_0.distcp").write_bytes(b"")
    save(folder, 0, (40,))
    assert [path.name for path in sorted(folder.iterdir())] == [
        "step-00000020",
        "step-00000040",
        "step-00000040.damaged",
    ]


def test_reading_needs_every_tensor_and_says_which_is_another(folder):
    def on_rank(transport, _):
        world = transport.group("world", "world", range(1))
        read_tensors(
            path_of(folder, 40),
            [Piece("a", (4, 3), (slice(0, 4), slice(0, 3)), torch.zeros(4, 3))],
            world,
            transport.device,
        )

    with pytest.raises(RankFailure, match="has tensors that the plan's model does not use: b, c, count"):
        run_threads(MemoryWorld(1), on_rank, None)
