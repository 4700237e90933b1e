"""A schedule as a grid of steps and ranks, with the cells that break a rule marked."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.schedule.schedule import Schedule

MAX_STEPS, MAX_RANKS = 32, 6
"""A schedule larger than this is shown as a window of this size around the first marked cell: it fits a
terminal of 80 columns."""


def grid(schedule: Schedule, marked: Sequence[int]) -> str:
    """One line per step, one column per pipeline rank; the cell of every index in `marked` stands between `>` and `<`.

    A step is the position in a rank's list, not a moment in time.

    >>> print(grid(Schedule.from_csv("0F0,0B0\\n1F0,1B0"), [3]))
            rank 0  rank 1
    step 0   0F0     1F0
    step 1   0B0    >1B0<
    """
    longest = int((schedule.offsets[1:] - schedule.offsets[:-1]).max(initial=0))
    centre_rank, centre_step = _place(schedule, marked[0]) if marked else (0, 0)
    ranks = _window(centre_rank, schedule.num_ranks, MAX_RANKS)
    steps = _window(centre_step, longest, MAX_STEPS)
    columns = [["", *(f"step {step}" for step in steps)]]
    columns += [[f"rank {rank}", *(_cell(schedule, rank, step, frozenset(marked)) for step in steps)] for rank in ranks]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
    if len(ranks) < schedule.num_ranks or len(steps) < longest:
        lines.append(
            f"(ranks {ranks[0]}-{ranks[-1]} of {schedule.num_ranks}, steps {steps[0]}-{steps[-1]} of {longest})"
        )
    return "\n".join(lines)


def _cell(schedule: Schedule, rank: int, step: int, marked: frozenset[int]) -> str:
    index = int(schedule.offsets[rank]) + step
    if index >= schedule.offsets[rank + 1]:
        return ""
    left, right = (">", "<") if index in marked else (" ", " ")
    return f"{left}{schedule.actions[index]}{right}"


def _place(schedule: Schedule, index: int) -> tuple[int, int]:
    rank = int(schedule.pp_rank[index])
    return rank, index - int(schedule.offsets[rank])


def _window(centre: int, length: int, size: int) -> range:
    first = max(0, min(centre - size // 2, length - size))
    return range(first, min(length, first + size))
