"""`Calls`: the collectives that every rank calls, in order; read from a CSV or derived from a plan's program.

A communicator matches its members' calls by number alone: the first of each, the second of each. So all members have to call the same
collectives in the same order, and this is the data to check it on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.action import Action, Kind
from ..core.errors import ScheduleError
from ..core.layout import Layout
from ..core.schedule import Placement

REDUCING = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})
"""Collectives that bring the parts of a sum together; the all_gather that may follow only hands the result out."""

CALL_FORM = "Write <action>:<op>:<axis>:<layer>, such as 2F0:all_reduce:tp:layers.3.mlp.down or 1REDUCE_GRAD:all_reduce:dp:"

_MAX_REPORTED = 20
_RANKS = re.compile(r"\d+(\+\d+)*")


Communicators = tuple[str, int | None]
"""What tells communicators of one rank apart: the axis, and for `replica` the stage whose copies they join."""


@dataclass(frozen=True)
class Call:
    """One collective of one rank: what it is part of, the operation, the communicator's axis, and the layer (empty for flat gradients).

    `axis` is an axis of the layout (`tp`, `dp`, ...), `model` (tensor and pipeline parallelism together), `embedding` (the ranks of the
    first and the last stage), `replica` (all copies of the action's stage), or the global ranks themselves: `0+4`.
    """

    action: Action
    op: str
    axis: str
    layer: str

    @cached_property
    def identity(self) -> tuple[Kind, int | None, int | None, str, str]:
        """What must agree between members. STEP is written with another stage on every rank and belongs to all of them."""
        stage = None if self.action.kind is Kind.STEP else self.action.stage
        return self.action.kind, stage, self.action.microbatch, self.op, self.layer

    def __str__(self) -> str:
        return f"{self.action}:{self.op}:{self.axis}:{self.layer}"


def communicators(call: Call) -> Communicators:
    """The communicator of a call among those of its rank."""
    return call.axis, call.action.stage if call.axis == "replica" else None


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of every global rank. Ranks that run the same list share it: rank r runs `lists[list_of[r]]`.

    `gradient_axes[stage]` are the axes along which ranks hold different parts of that stage's gradients; None where that is not known.
    """

    layout: Layout
    placement: Placement
    lists: tuple[tuple[Call, ...], ...]
    list_of: tuple[int, ...]
    gradient_axes: tuple[frozenset[str], ...] | None = None

    def of_rank(self, global_rank: int) -> tuple[Call, ...]:
        """What a rank calls, in order."""
        return self.lists[self.list_of[global_rank]]

    def groups(self, axis: str, stage: int | None = None) -> list[tuple[int, ...]]:
        """The communicators of an axis as tuples of global ranks; for `replica` those of one stage.

        Raises `ScheduleError` for an axis that is not known.
        """
        if _RANKS.fullmatch(axis):
            return [tuple(int(rank) for rank in axis.split("+"))]
        if axis in self.layout.sizes:
            return [tuple(group) for group in self.layout.groups(axis)]
        match axis:
            case "model":
                return [tuple(group) for group in self.layout.groups("tp-pp")]
            case "embedding":
                ends = {ends: None for pp_rank in range(self.layout.pp) if (ends := self.placement.ends_of(pp_rank))}
                return [group for pair in ends for group in self._across(pair, over_dp=False)]
            case "replica":
                return [] if stage is None else self._across(self.placement.ranks[stage], over_dp=True)
        known = ", ".join([*self.layout.sizes, "model", "embedding", "replica"])
        raise ScheduleError(f"unknown axis {axis!r} of a collective. Known: {known}; or global ranks such as 0+4.")

    @cached_property
    def members(self) -> dict[Communicators, dict[int, tuple[int, ...]]]:
        """Communicators -> global rank -> the members of its own one, for all that are called."""
        used = sorted({communicators(call) for calls in self.lists for call in calls}, key=str)
        return {each: {rank: group for group in self.groups(*each) for rank in group} for each in used}

    def _across(self, pp_ranks: tuple[int, ...], *, over_dp: bool) -> list[tuple[int, ...]]:
        """Groups of the global ranks at these pipeline ranks, one for each data-parallel rank, or with `over_dp` one for all of them."""
        layout = self.layout
        dp_ranks = [tuple(range(layout.dp))] if over_dp else [(dp,) for dp in range(layout.dp)]
        return [
            tuple(layout.global_rank(tp=tp, cp=cp, dp=dp, pp=pp) for dp in group for pp in pp_ranks)
            for group in dp_ranks
            for cp in range(layout.cp)
            for tp in range(layout.tp)
        ]

    def to_csv(self) -> str:
        """One line per global rank, one cell per call."""
        return "".join(",".join(map(str, self.of_rank(rank))) + "\n" for rank in range(len(self.list_of)))


def calls_from_csv(
    text: str, layout: Layout, placement: Placement, *, name: str = "csv", gradient_axes: Sequence[frozenset[str]] | None = None
) -> Calls:
    """The calls that a text describes, one line per global rank (an empty line calls nothing); `name` stands in error messages.

    Raises one `ScheduleError` with every malformed cell, every unknown axis, and a wrong number of lines.
    """
    lines = text.splitlines()
    while len(lines) > layout.world_size and not lines[-1].strip():
        lines.pop()
    rows = [tuple(_parse(cell) for cell in line.split(",") if cell.strip()) for line in lines]
    problems = [
        f"{name}: line {number} (global rank {number - 1}): {cell!r} is not a call. {CALL_FORM}."
        for number, row in enumerate(rows, start=1)
        for cell in row
        if isinstance(cell, str)
    ]
    if len(lines) != layout.world_size:
        problems.append(f"{name} has {len(lines)} lines, but the layout has {layout.world_size} ranks. Write one line per global rank.")
    lists = tuple(tuple(call for call in row if isinstance(call, Call)) for row in rows)
    distinct = {calls: number for number, calls in enumerate(dict.fromkeys(lists))}
    axes = None if gradient_axes is None else tuple(gradient_axes)
    calls = Calls(layout, placement, tuple(distinct), tuple(distinct[each] for each in lists), axes)
    beyond = [call for each in distinct for call in each if call.action.stage >= placement.num_stages]
    problems += [f"{name}: {call} names a stage, but there are {placement.num_stages}." for call in beyond]
    problems += [] if problems else _outside(calls, name)
    if problems:
        raise ScheduleError("\n".join(problems[:_MAX_REPORTED]))
    return calls


def _parse(cell: str) -> Call | str:
    """The call in a cell, or the cell itself where there is none."""
    parts = cell.strip().split(":")
    if len(parts) != 4 or not all(parts[:3]):
        return cell
    try:
        return Call(Action.from_str(parts[0]), *parts[1:])
    except ScheduleError:
        return cell


def _outside(calls: Calls, name: str) -> list[str]:
    """Calls on a communicator that is not known, or that does not contain the caller."""
    problems: list[str] = []
    for axis, stage in sorted({communicators(call) for each in calls.lists for call in each}, key=str):
        try:
            inside = {rank for group in calls.groups(axis, stage) for rank in group}
        except ScheduleError as error:
            problems.append(f"{name}: {error}")
            continue
        problems += [
            f"{name}: rank {rank} calls on axis {axis!r}, but is no member of it."
            for rank in range(len(calls.list_of))
            if rank not in inside and any(communicators(call) == (axis, stage) for call in calls.of_rank(rank))
        ]
        if max(inside, default=0) >= len(calls.list_of):
            problems.append(f"{name}: axis {axis!r} names a rank outside the world of {len(calls.list_of)}.")
    return problems
