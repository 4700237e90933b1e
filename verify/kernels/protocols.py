"""Programs of ranks, from the table of barriers (`transport/symmetric/barrier.py`), and whether they are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...backend.transport.symmetric.barrier import (
    BOARD_RECEIVER,
    BOARD_SENDER,
    CHUNK_RECEIVER,
    CHUNK_SENDER,
    COLLECTIVE,
    NUM_SLOTS,
    TWO_PHASES,
    Step,
)
from .doorbell import check_doorbell
from .memory_model import Explored, Op, Program, explore

SIZES = ((2, 2), (3, 1))
"""Ranks and rounds of a collective: a pad that is used again needs two rounds, a peer that overtakes another three
ranks."""

NUM_CHUNKS = NUM_SLOTS + 1
"""As many as use a slot twice."""


class UnreadProtocol(ValueError):
    """Code says something that the reader of its protocol has no step for."""


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


def chunks(sender: Sequence[Step], receiver: Sequence[Step], num_receivers: int = 1) -> list[Program]:
    """One rank sends `NUM_CHUNKS` chunks through `NUM_SLOTS` slots, each to all of the others. A slot has a part for
    each write of the sender, and whoever reads it reads all."""
    num_parts = sum(step.act == "write" for step in sender)
    receivers = range(1, num_receivers + 1)
    found = [_of_chunks(sender, "", [f" of rank {rank}" for rank in receivers], num_parts)]
    return [*found, *(_of_chunks(receiver, f" of rank {rank}", [""], num_parts) for rank in receivers)]


def _of_chunks(steps: Sequence[Step], own: str, others: Sequence[str], num_parts: int) -> Program:
    """One rank's program: it signals at the place `own`, and waits at those of the `others`."""
    ops: list[Op] = []
    for chunk in range(1, NUM_CHUNKS + 1):
        parts = [f"slot {chunk % NUM_SLOTS}, part {part}" for part in range(num_parts)]
        unwritten = iter(parts)
        for step in steps:
            if step.act == "wait":
                ops += [Op("until", step.of + other, chunk - step.ahead, order=step.order) for other in others]
            elif step.act == "signal":
                ops.append(Op("store", step.of + own, chunk, order=step.order))
            elif step.act == "write":
                ops.append(Op("store", next(unwritten), chunk))
            elif step.act == "read":
                ops += [Op("load", part, chunk) for part in parts]
    return tuple(ops)


def check_collective(steps: Sequence[Step] = COLLECTIVE, signalled: Pad = pad) -> Explored:
    """The protocol of pads, for all `SIZES`: what is wrong first, or all states."""
    return _first_wrong(lambda size: collective(steps, *size, signalled))


def check_cleared_late(steps: Sequence[Step] = COLLECTIVE) -> Explored:
    """`cleared_late`, for all `SIZES`."""
    return _first_wrong(lambda size: cleared_late(steps, *size))


def check_chunks(sender: Sequence[Step] = CHUNK_SENDER, receiver: Sequence[Step] = CHUNK_RECEIVER) -> Explored:
    """The protocol of chunks for one peer."""
    return explore(chunks(sender, receiver))


def check_board(sender: Sequence[Step] = BOARD_SENDER, receiver: Sequence[Step] = BOARD_RECEIVER) -> Explored:
    """The protocol of chunks for all peers, of which there are two."""
    return explore(chunks(sender, receiver, num_receivers=2))


def pads_of(programs: Sequence[Program]) -> set[str]:
    """The places of signals, which must be 0 when all are done."""
    return {op.place for program in programs for op in program if op.kind == "swap"}


def _first_wrong(programs_of: Callable[[tuple[int, int]], list[Program]]) -> Explored:
    num_states = 0
    for size in SIZES:
        programs = programs_of(size)
        found = explore(programs, reset=pads_of(programs))
        num_states += found.num_states
        if not found.ok:
            return found
    return Explored("ok", num_states)


PROTOCOLS: Mapping[str, Callable[[], Explored]] = {
    "collective": check_collective,
    "collective of two phases": lambda: check_collective(TWO_PHASES),
    "chunks for one peer": check_chunks,
    "chunks for all peers": check_board,
    "doorbell": check_doorbell,
}
"""Every protocol of the table."""


def check(protocol: str) -> Explored:
    """What the exploration of one of `PROTOCOLS` found: `ok`, `num_states`, `trace`. Needs neither Triton nor torch.
    Raises `KeyError` with the names that there are."""
    if protocol not in PROTOCOLS:
        raise KeyError(f"{protocol!r} is none of the protocols: {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[protocol]()
