"""Tensors in pieces: whatever cuts wrote them, any other cut reads them, and what does not fit
together is refused by name."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from shardproof.backend.checkpoint.tensors import Piece, read_tensors, write_tensors
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import PlanError, RankFailure


def rows(name: str, shape: tuple[int, ...], lo: int, hi: int, values: Tensor) -> Piece:
    return Piece(name, shape, (slice(lo, hi), *(slice(0, size) for size in shape[1:])), values[lo:hi])


def test_tensors_of_another_model_are_named_on_every_rank(tmp_path):
    values = torch.arange(12.0).view(4, 3)

    def save_and_load(transport, _):
        world, rank = transport.group("world", "world", range(2)), transport.global_rank
        write_tensors(
            tmp_path / "one",
            [rows(name, (4, 3), 2 * rank, 2 * rank + 2, values) for name in "abc"],
            world,
            transport.device,
        )
        world.barrier()
        wider = torch.zeros(4, 5)
        wanted = [
            rows("a", (4, 5), 0, 4, wider),
            rows("b", (4, 3), 0, 4, values.double()),
            rows(f"d{rank}", (4, 3), 0, 4, values),
        ]
        with pytest.raises(PlanError) as refused:
            read_tensors(tmp_path / "one", wanted, world, transport.device)
        return refused.value.problems

    for problems in run_threads(MemoryWorld(2, timeout_s=60), save_and_load, None):
        said = [
            problem.removeprefix(f"{tmp_path / 'one'} ").removesuffix(" Use the model that it was saved with.")
            for problem in problems
        ]
        assert said == [
            "has no d0 [4, 3] float32, d1 [4, 3] float32.",
            "has a [4, 3] float32 instead of [4, 5] float32, b [4, 3] float32 instead of [4, 3] float64.",
            "has tensors that the plan's model does not use: c.",
        ]


cuts = st.lists(st.integers(0, 7), max_size=4).map(lambda places: sorted({0, 7, *places}))


@settings(max_examples=25)
@given(cuts, cuts, cuts)
def test_any_cut_of_a_tensor_reads_what_any_other_cut_has_written(tmp_path_factory, row_cuts, column_cuts, read_cuts):
    """Blocks of rows and columns, dealt to three ranks in turn and the first to two of them; read as
    columns by two ranks."""
    folder, values = tmp_path_factory.mktemp("cuts"), torch.arange(49.0).view(7, 7)
    blocks = [
        (slice(*row_cuts[i : i + 2]), slice(*column_cuts[j : j + 2]))
        for i in range(len(row_cuts) - 1)
        for j in range(len(column_cuts) - 1)
    ]

    def save(transport, _):
        world, rank = transport.group("world", "world", range(3)), transport.global_rank
        own = [block for i, block in enumerate(blocks) if i % 3 == rank or (i == 0 and rank == 1)]
        pieces = [Piece("x", (7, 7), block, values[block]) for block in own] + [
            Piece("count", (), (), torch.tensor(5.0))
        ]
        write_tensors(folder, pieces, world, transport.device)

    def load(transport, _):
        world, rank = transport.group("world", "world", range(2)), transport.global_rank
        found = torch.full((7, 7), torch.nan)
        own = [slice(*read_cuts[i : i + 2]) for i in range(len(read_cuts) - 1) if i % 2 == rank]
        count = torch.tensor(0.0)
        pieces = [Piece("x", (7, 7), (slice(0, 7), part), found[:, part]) for part in own] + [
            Piece("count", (), (), count)
        ]
        read_tensors(folder, pieces, world, transport.device)
        return found, own, float(count)

    run_threads(MemoryWorld(3, timeout_s=60), save, None)
    for found, own, count in run_threads(MemoryWorld(2, timeout_s=60), load, None):
        assert count == 5.0 and all(torch.equal(found[:, part], values[:, part]) for part in own)
        assert int(found.isfinite().sum()) == 7 * sum(part.stop - part.start for part in own)


@pytest.mark.parametrize("places", [((0, 2), (3, 4)), ((0, 3), (2, 4))], ids=["a-gap", "an-overlap"])
def test_pieces_that_do_not_make_up_a_tensor_are_not_saved(places, tmp_path):
    values = torch.zeros(4, 3)

    def save(transport, _):
        world, own = transport.group("world", "world", range(2)), places[transport.global_rank]
        write_tensors(tmp_path, [rows("a", (4, 3), *own, values)], world, transport.device)

    with pytest.raises(RankFailure, match=r"a has 12 elements, and ranks 0, 1 are to write (9|15) of it") as failure:
        run_threads(MemoryWorld(2, timeout_s=60), save, None)
    assert isinstance(failure.value.__cause__, ValueError)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_has_not_written_its_pieces_is_named_on_every_rank(tmp_path, monkeypatch):
    """Rank 2 of three comes back from writing without having done it."""
    values, write_data = torch.zeros(6, 3), FileSystemWriter.write_data

    def write(writer, plan, planner):
        if not threading.current_thread().name.startswith("rank 2"):
            return write_data(writer, plan, planner)
        nothing = torch.futures.Future()
        nothing.set_result([])
        return nothing

    def save(transport, _):
        world, rank = transport.group("world", "world", range(3)), transport.global_rank
        with pytest.raises(OSError, match="rank 2 has written 0 of its 2 pieces"):
            write_tensors(
                tmp_path, [rows(name, (6, 3), 2 * rank, 2 * rank + 2, values) for name in "ab"], world, transport.device
            )

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    run_threads(MemoryWorld(3, timeout_s=60), save, None)
    assert not (tmp_path / ".metadata").exists()
