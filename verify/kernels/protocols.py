"""Programs of ranks, from the table of barriers (`transport/symmetric/barrier.py`), and whether they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...backend.transport.symmetric.barrier import CHUNK_RECEIVER, CHUNK_SENDER, COLLECTIVE, Step
from .memory_model import Explored, Op, Program, explore

SIZES = ((2, 2), (3, 1))
"""Ranks and rounds of a collective: a pad that is used again needs two rounds, a peer that overtakes another three
ranks."""

NUM_SLOTS, NUM_CHUNKS = 2, 3
"""Of the C code, and as many chunks as use a slot twice."""

Pad = Callable[[int, int], str]
"""The pad through which the second rank hears of the first."""


def pad(source: int, destination: int) -> str:
    """That of the kernels."""
    return f"pad of rank {destination} for rank {source}"


def collective(steps: Sequence[Step], num_ranks: int, num_rounds: int, signalled: Pad = pad) -> list[Program]:
    """Every rank writes its own data and reads all peers', phase by phase and round after round; `signalled` is where
    it puts signals."""
    programs = []
    for rank in range(num_ranks):
        peers = [peer for peer in range(num_ranks) if peer != rank]
        ops: list[Op] = []
        for number in range(1, num_rounds + 1):
            phase = 0
            for step in steps:
                if step.act == "write":
                    phase += 1
                    ops.append(Op("store", f"data {phase} of rank {rank}", number))
                elif step.act == "read":
                    ops += [Op("load", f"data {phase} of rank {peer}", number) for peer in peers]
                elif step.act == "signal":
                    ops += [Op("swap", signalled(rank, peer), 1, 0, step.order) for peer in peers]
                else:
                    ops += [Op("swap", pad(peer, rank), 0, 1, step.order) for peer in peers]
        programs.append(tuple(ops))
    return programs


def cleared_late(steps: Sequence[Step], num_ranks: int, num_rounds: int) -> list[Program]:
    """The same with pads that are stored to and cleared by their owner after it has waited, in place of swaps."""
    programs = []
    for program in collective(steps, num_ranks, num_rounds):
        ops: list[Op] = []
        for op in program:
            if op.kind != "swap":
                ops.append(op)
            elif op.value == 1:
                ops.append(Op("store", op.place, 1, order=op.order))
            else:
                ops += [Op("until", op.place, 1, order=op.order), Op("store", op.place, 0)]
        programs.append(tuple(ops))
    return programs


def chunks(sender: Sequence[Step], receiver: Sequence[Step]) -> list[Program]:
    """One rank sends `NUM_CHUNKS` chunks through `NUM_SLOTS` slots to another."""
    found = []
    for steps, awaited, published, ahead in ((sender, "taken", "filled", NUM_SLOTS), (receiver, "filled", "taken", 0)):
        ops: list[Op] = []
        for chunk in range(1, NUM_CHUNKS + 1):
            slot = f"slot {chunk % NUM_SLOTS}"
            for step in steps:
                if step.act == "wait":
                    ops.append(Op("until", awaited, chunk - ahead, order=step.order))
                elif step.act == "signal":
                    ops.append(Op("store", published, chunk, order=step.order))
                else:
                    ops.append(Op("store" if step.act == "write" else "load", slot, chunk))
        found.append(tuple(ops))
    return found


def check_collective(steps: Sequence[Step] = COLLECTIVE, signalled: Pad = pad) -> Explored:
    """The protocol of pads, for all `SIZES`: the first that is wrong, or the last."""
    return _first_wrong(lambda size: collective(steps, *size, signalled))


def check_cleared_late(steps: Sequence[Step] = COLLECTIVE) -> Explored:
    """`cleared_late`, for all `SIZES`."""
    return _first_wrong(lambda size: cleared_late(steps, *size))


def check_chunks(sender: Sequence[Step] = CHUNK_SENDER, receiver: Sequence[Step] = CHUNK_RECEIVER) -> Explored:
    """The protocol of chunks."""
    return explore(chunks(sender, receiver))


def _first_wrong(programs_of: Callable[[tuple[int, int]], list[Program]]) -> Explored:
    found = Explored("ok", 0)
    for size in SIZES:
        found = explore(programs_of(size))
        if not found.ok:
            return found
    return found
