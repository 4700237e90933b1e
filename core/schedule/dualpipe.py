"""DualPipe and DualPipeV: forwards of one direction overlapped with backwards of the other.

DualPipe (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, figure 5) feeds half of the microbatches in
at the first rank and half at the last, so every stage has two replicas, on rank s and on rank p-1-s. DualPipeV (Sea AI
Lab 2025, "cut in half"; deepseek-ai/DualPipe, `dualpipev.py`) folds that pipeline: half as many ranks, both directions
on one replica, stages in a vee. The two have the same rows: rank r of DualPipe does what rank min(r, p-1-r) of
DualPipeV on p/2 ranks does, its own direction first.

With F, B (full backward), W and F&B (a pair) as seconds of one stage, the table of the repository gives
for p stages over m microbatches: bubble (p/2-1)(F&B+B-3W), activations of p+1 stages per rank,
parameters twice (two stages per rank).
"""

from __future__ import annotations

import numpy as np

from ..base.errors import ScheduleError
from .action import ActionArray, Kind
from .placement import Placement
from .schedule import Schedule

# Moves of a row. 0 and 1 are its directions: 0 enters the pipeline at this rank's end first. W takes the
# oldest I that waits for it.
F0, F1, B0, B1, I0, I1, W, F0_B1, F1_B0 = range(9)

_KIND = np.array(
    [Kind.F, Kind.F, Kind.B, Kind.B, Kind.I, Kind.I, Kind.W, Kind.OVERLAP_F_B, Kind.OVERLAP_F_B], dtype=np.int8
)
_FORWARD = np.array([0, 1, -1, -1, -1, -1, -1, 0, 1])
_BACKWARD = np.array([-1, -1, 0, 1, 0, 1, -1, 1, 0])


def dualpipe(pp: int, num_microbatches: int) -> Schedule:
    """Two directions over `pp` ranks and stages; microbatches below m/2 run from rank 0 up, the
    others from rank p-1 down.

    Raises `ScheduleError` unless pp is even and the number of microbatches even and at least 2*pp.
    """
    _refuse(unpaired(pp, num_microbatches))
    half = num_microbatches // 2
    rows = []
    for rank in range(pp):
        # (stage, first microbatch) of the direction from rank 0, and of the other
        up, down = (rank, 0), (pp - 1 - rank, half)
        own, other = (up, down) if rank < pp // 2 else (down, up)
        rows.append(_row(_moves(min(rank, pp - 1 - rank), pp // 2, half), own, other))
    return _assemble("DualPipe", Placement.replicated(pp, num_microbatches), rows)


def dualpipev(pp: int, num_microbatches: int, vpp: int = 2) -> Schedule:
    """One replica, two stages per rank in a vee: 2*pp stages on `pp` ranks. Its table reads p = 2*pp.

    Raises `ScheduleError` unless vpp is 2 and there are at least 2*pp microbatches.
    """
    if vpp != 2:
        raise ScheduleError(f"DualPipeV lays two stages on every rank, got vpp={vpp}. Use vpp=2.")
    _refuse(fewer_than_stages(pp, num_microbatches))
    rows = [_row(_moves(rank, pp, num_microbatches), (rank, 0), (2 * pp - 1 - rank, 0)) for rank in range(pp)]
    return _assemble("DualPipeV", Placement.vee(pp, num_microbatches), rows)


def unpaired(pp: int, num_microbatches: int) -> str | None:
    """Why DualPipe cannot be built for these numbers, and the nearest for which it can; None when it can."""
    if pp % 2:
        return (
            f"schedule DualPipe pairs rank r with rank p-1-r and needs an even number of ranks, got pp={pp}. "
            f"Use pp={pp + 1} with at least {2 * pp + 2} microbatches, or schedule DualPipeV."
        )
    if num_microbatches % 2 or num_microbatches < 2 * pp:
        nearest = max(2 * pp, num_microbatches + num_microbatches % 2)
        return (
            f"schedule DualPipe gives each direction half of the microbatches and at least pp={pp} of them, got "
            f"{num_microbatches}. "
            f"Use {nearest} microbatches, or any even number of at least {2 * pp}."
        )
    return None


def fewer_than_stages(pp: int, num_microbatches: int) -> str | None:
    """Why DualPipeV cannot be built for these numbers, and the nearest for which it can; None when it can."""
    if num_microbatches >= 2 * pp:
        return None
    fitting = num_microbatches // 2
    fewer = f", or pp={fitting}" if fitting > 1 else ""
    return (
        f"schedule DualPipeV needs as many microbatches as stages, 2*pp={2 * pp}, got {num_microbatches}. Use "
        f"{2 * pp} microbatches{fewer}."
    )


def _moves(rank: int, num_ranks: int, num_microbatches: int) -> np.ndarray:
    """The row of `rank` of the folded pipeline; `num_microbatches` are those of one direction. The eight steps
    of the published code."""
    to_middle, from_end = num_ranks - 1 - rank, rank + 1
    main = np.tile([F0_B1, F1_B0], num_microbatches - 2 * num_ranks + from_end)
    if not to_middle:
        main = np.concatenate([[F0, B1], main[1:]])  # where directions meet the first pair would wait for itself
    # Full backwards at first; from the middle of this step on weight gradients are left for the end,
    # where there are bubbles.
    cooling = np.tile([B1, B0], from_end)
    split = np.arange(len(cooling)) >= 2 * (from_end // 2) + (rank % 2 == 0)
    cooling = np.where(split, cooling + (I0 - B0), cooling)
    return np.concatenate(
        [
            np.full(2 * to_middle, F0),
            np.tile([F0, F1], from_end),
            np.tile([I1, W, F1], to_middle),
            main,
            np.tile([B1, F1_B0], to_middle),
            cooling,
            np.tile([W, I0], to_middle),
            np.full(from_end, W),
        ]
    )


def _row(moves: np.ndarray, own: tuple[int, int], other: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """The five columns of an `ActionArray` for moves. `own` and `other` are (stage, first microbatch)
    of directions 0 and 1."""
    stages, firsts = np.array([own, other]).T
    kind, forward, backward = _KIND[moves], _FORWARD[moves], _BACKWARD[moves]
    forward_stage, forward_microbatch = stages[forward], _count(forward) + firsts[forward]
    backward_stage, backward_microbatch = stages[backward], _count(backward) + firsts[backward]
    pair = kind == Kind.OVERLAP_F_B
    stage = np.where(forward >= 0, forward_stage, backward_stage)
    microbatch = np.where(forward >= 0, forward_microbatch, backward_microbatch)
    weight, split = kind == Kind.W, kind == Kind.I
    stage[weight], microbatch[weight] = stage[split], microbatch[split]
    return stage, kind, microbatch, np.where(pair, backward_stage, -1), np.where(pair, backward_microbatch, -1)


def _count(direction: np.ndarray) -> np.ndarray:
    """How many moves of the same direction (0 or 1) came before each move."""
    first, second = direction == 0, direction == 1
    return np.where(first, np.cumsum(first), np.cumsum(second)) - 1


def _assemble(name: str, placement: Placement, rows: list[tuple[np.ndarray, ...]]) -> Schedule:
    offsets = np.cumsum([0, *(len(row[0]) for row in rows)])
    return Schedule(
        name, placement, ActionArray(*(np.concatenate(columns) for columns in zip(*rows, strict=True))), offsets
    )


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ScheduleError(problem)
