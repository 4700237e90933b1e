"""Schedules as CSV: one line per pipeline rank, one cell per action, empty cells are bubbles.

The `torch` dialect is the file format of torch.distributed.pipelining. Ours is the same with STEP cells and replicated
placements. The placement is not written: it follows from which rank runs the forwards of which stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np

from ..base.errors import Problem, ScheduleError
from ..base.findings import Location
from .action import CELL_FORM, ActionArray, Kind, parse_cell
from .placement import Placement

_MAX_REPORTED = 100
"""Malformed cells listed in one message; a file with more is not a schedule at all."""


def rows_to_csv(placement: Placement, rows: Iterable[ActionArray], dialect: Literal["shardproof", "torch"]) -> str:
    """The rows of a schedule as text. With `dialect="torch"` STEP is dropped and replicated stages
    raise `ScheduleError`."""
    if dialect not in ("shardproof", "torch"):
        raise ScheduleError(f"unknown CSV dialect {dialect!r}. Known: shardproof, torch.")
    skipped = -1
    if dialect == "torch":
        replicated = [stage for stage, owners in enumerate(placement.ranks) if len(owners) > 1]
        if replicated:
            raise ScheduleError(
                f"torch's CSV has one rank per stage, but stages {replicated} have replicas. Write "
                "the shardproof dialect."
            )
        skipped = Kind.STEP
    return "".join(",".join(_cells(row, skipped)) + "\n" for row in rows)


def rows_from_csv(text: str, name: str) -> tuple[Placement, ActionArray, np.ndarray]:
    """Placement, actions of all ranks and their offsets, as a `Schedule` holds them, that a text in
    either dialect describes.

    `name` stands in error messages, e.g. a file name.

    Only what a cell is and what the numbers could mean is decided here; whether the schedule is right is for
    `verify.schedule.check`. Raises one `ScheduleError` with every malformed cell.
    """
    lines = text.rstrip().splitlines()
    fields: list[tuple[int, int, int, int, int]] = []
    offsets = [0]
    malformed: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        for column, cell in enumerate(line.split(","), start=1):
            parsed = parse_cell(cell)
            if parsed is not None:
                fields.append(parsed)
            elif cell.strip():
                origin = f"{name}: line {number} (rank {number - 1}), cell {column}"
                sentence = f"{_shorten(cell)!r} is not an action."
                malformed.append(Problem(sentence, place=Location(name, number), origin=origin))
        offsets.append(len(fields))
    if malformed:
        more = [f"... and {len(malformed) - _MAX_REPORTED} more."] if len(malformed) > _MAX_REPORTED else []
        *first, last = malformed[:_MAX_REPORTED]
        sentence = "\n".join([last.sentence, *more, CELL_FORM])
        raise ScheduleError([*first, Problem(sentence, place=last.place, origin=last.origin)])
    if not fields:
        raise ScheduleError(
            f"{name}: there is no action in it. Write one line per rank, cells such as 0F0 separated by commas."
        )
    actions = ActionArray(*np.array(fields, dtype=np.int32).T)
    boundaries = np.array(offsets)
    return _placement(name, actions, boundaries), actions, boundaries


def _cells(row: ActionArray, skipped: int) -> list[str]:
    tokens = {kind.value: kind.name for kind in Kind}
    return [
        f"({stage}F{microbatch};{pair_stage}B{pair_microbatch})OVERLAP_F_B"
        if pair_stage >= 0
        else f"{stage}{tokens[kind]}{microbatch if microbatch >= 0 else ''}"
        for stage, kind, microbatch, pair_stage, pair_microbatch in zip(
            *(column.tolist() for column in row.columns), strict=True
        )
        if kind != skipped
    ]


def _shorten(cell: str, limit: int = 40) -> str:
    cell = cell.strip()
    return cell if len(cell) <= limit else cell[:limit] + "..."


def _placement(name: str, actions: ActionArray, offsets: np.ndarray) -> Placement:
    num_ranks = len(offsets) - 1
    num_stages = 1 + int(max(actions.stage.max(), actions.pair_stage.max()))
    num_microbatches = 1 + int(max(actions.microbatch.max(), actions.pair_microbatch.max()))
    # Every stage runs the forward of every microbatch, so a file cannot name many more of them than it has cells.
    # Without this limit one mistyped number would ask for tables of any size.
    if num_stages * num_microbatches > 64 * len(actions) + 4096:
        raise ScheduleError(
            f"{name}: the highest stage is {num_stages - 1} and the highest microbatch {num_microbatches - 1}, "
            f"but {len(actions)} actions cannot fill {num_stages} stages x {num_microbatches} microbatches. Look for "
            "a mistyped number."
        )
    owners = _owners(actions, np.repeat(np.arange(num_ranks), np.diff(offsets)), num_microbatches)
    unplaced = [stage for stage in range(num_stages) if stage not in owners]
    if unplaced:
        raise ScheduleError(
            f"{name}: stage {unplaced[0]} has no action on any rank, yet the highest stage is {num_stages - 1}. "
            "Stages count from 0 without gaps."
        )
    ranks = tuple(owners[stage] for stage in range(num_stages))
    return Placement(_pattern(ranks, num_ranks), num_ranks, ranks, num_microbatches)


def _owners(actions: ActionArray, pp_rank: np.ndarray, num_microbatches: int) -> dict[int, tuple[int, ...]]:
    """Stage -> its ranks: where its forwards run, or for want of forwards anything else of it."""
    paired = actions.pair_stage >= 0
    forward = (actions.kind == Kind.F) | paired
    owners: dict[int, tuple[int, ...]] = {}
    for stage, rank in zip(actions.pair_stage[paired].tolist(), pp_rank[paired].tolist(), strict=True):
        owners.setdefault(stage, (rank,))
    for stage, rank in zip(actions.stage[~forward].tolist(), pp_rank[~forward].tolist(), strict=True):
        owners.setdefault(stage, (rank,))
    runs = np.unique(np.stack([actions.stage[forward], pp_rank[forward], actions.microbatch[forward]]), axis=1)
    half = (num_microbatches + 1) // 2
    for stage in np.unique(runs[0]).tolist():
        ranks, microbatches = runs[1:, runs[0] == stage]
        first, second = set(ranks[microbatches < half].tolist()), set(ranks[microbatches >= half].tolist())
        replicated = len(first) == len(second) == 1 and first != second
        owners[stage] = (*first, *second) if replicated else (Counter(ranks.tolist()).most_common(1)[0][0],)
    return owners


def _pattern(ranks: tuple[tuple[int, ...], ...], num_ranks: int) -> Literal["loop", "vee", "replicated", "explicit"]:
    if any(len(owners) > 1 for owners in ranks):
        return "replicated"
    if ranks == tuple((stage % num_ranks,) for stage in range(len(ranks))):
        return "loop"
    if ranks == tuple((min(stage, 2 * num_ranks - 1 - stage),) for stage in range(2 * num_ranks)):
        return "vee"
    return "explicit"
