"""`Calls`: the collectives that every rank calls, in order; read from a CSV or derived from a plan's program.

A communicator matches its members' calls by number alone: the first of each, the second of each. So all members have to
call the same collectives in the same order, and this is the data to check it on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.base.errors import Problem, ScheduleError
from ...core.base.findings import Location
from ...core.layout.layout import Layout
from ...core.schedule.action import Action, Kind
from ...core.schedule.placement import Placement

REDUCING = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})
"""Collectives that bring the parts of a sum together; the all_gather that may follow only hands the result out."""

CALL_FORM = (
    "Write <action>:<op>:<axis>:<layer>, such as 2F0:all_reduce:tp:layers.3.mlp.down or 1REDUCE_GRAD:all_reduce:dp:"
)

_MAX_REPORTED = 20
_RANKS = re.compile(r"\d+(\+\d+)*")


Communicators = tuple[str, int | None]
"""What distinguishes communicators of one rank: the axis, and for `replica` the stage whose copies they join."""


@dataclass(frozen=True)
class Call:
    """One collective of one rank: what it is part of, the operation, the communicator's axis, and the layer
    (empty for flat gradients).

    `axis` is one of `core.program.Collective` (`tp`, `dp`, `edp`, `model`, `embedding`, `replica`, ...), `pp`, or the
    global ranks themselves: `0+4`.
    """

    action: Action
    op: str
    axis: str
    layer: str

    @cached_property
    def identity(self) -> tuple[Kind, int | None, int | None, str, str]:
        """What must agree between members. STEP is written with another stage on every rank and
        belongs to all of them."""
        stage = None if self.action.kind is Kind.STEP else self.action.stage
        return self.action.kind, stage, self.action.microbatch, self.op, self.layer

    def __str__(self) -> str:
        return f"{self.action}:{self.op}:{self.axis}:{self.layer}"


def communicators(call: Call) -> Communicators:
    """The communicator of a call among those of its rank."""
    return call.axis, call.action.stage if "replica" in call.axis.split("_") else None


DENSE_AXES = {"tp": "tp", "cp": "cp", "tp_cp": "tp-cp", "dp": "dp-cp", "pp": "pp", "model": "tp-pp"}
EXPERT_AXES = {"ep": "ep", "etp": "tp", "edp": "dp"}
"""Axis of a collective -> the axes of the dense or the expert grid that it spans; gradients of dense layers
are added over cp too."""

CONTEXT_PARTS = {"cp_inner": "shard", "cp_outer": "replicate"}
"""Axis of a collective -> which members of a cp group it joins: `layout.cp_inner` neighbours, or those so far apart."""

REPLICA_AXES = {"replica": "dp", "expert_replica": "edp"}
"""Axis of a collective over all copies of a stage -> the axis of the copies that one pipeline rank's ranks hold."""


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of every global rank. Ranks that run the same list share it: rank r runs `lists[list_of[r]]`.

    `gradient_axes[stage]` are the axes along which ranks hold different parts of that stage's
    gradients; None where that is not known. `shards` are the sizes of the groups over which hybrid
    sharding cuts dense parameters and experts.
    """

    layout: Layout
    placement: Placement
    lists: tuple[tuple[Call, ...], ...]
    list_of: tuple[int, ...]
    gradient_axes: tuple[frozenset[str], ...] | None = None
    shards: tuple[int, int] = (1, 1)

    def of_rank(self, global_rank: int) -> tuple[Call, ...]:
        """What a rank calls, in order."""
        return self.lists[self.list_of[global_rank]]

    def groups(self, axis: str, stage: int | None = None) -> list[tuple[int, ...]]:
        """The communicators of an axis as tuples of global ranks; for all copies of a stage those of one stage.

        Raises `ScheduleError` for an axis that is not known.
        """
        if _RANKS.fullmatch(axis):
            return [tuple(int(rank) for rank in axis.split("+"))]
        whole, _, part = axis.rpartition("_")
        if part in ("shard", "replicate") and whole in ("dp", "edp", *REPLICA_AXES):
            size = self.shards[whole in ("edp", "expert_replica")]
            return [each for group in self.groups(whole, stage) for each in _parts(group, min(size, len(group)), part)]
        if axis in DENSE_AXES:
            return [tuple(group) for group in self.layout.groups(DENSE_AXES[axis])]
        if axis in CONTEXT_PARTS:
            part, size = CONTEXT_PARTS[axis], self.layout.cp_inner
            return [each for group in self.layout.groups("cp") for each in _parts(tuple(group), size, part)]
        if axis in EXPERT_AXES:
            return [tuple(group) for group in self.layout.expert_groups(EXPERT_AXES[axis])]
        if axis == "embedding":
            ends_of, crossed_of = self.placement.ends_of, self.placement.crossed_ends_of
            ends = {
                ends: None for pp_rank in range(self.layout.pp) if (ends := ends_of(pp_rank) or crossed_of(pp_rank))
            }
            return [group for pair in ends for group in self._across(pair, self.layout.groups("pp"))]
        if axis in REPLICA_AXES:
            base = REPLICA_AXES[axis]
            spanned = (
                self.layout.groups(f"{DENSE_AXES[base]}-pp") if base == "dp" else self.layout.expert_groups("dp-pp")
            )
            return [] if stage is None else self._across(self.placement.ranks[stage], spanned)
        known = ", ".join([*DENSE_AXES, *CONTEXT_PARTS, *EXPERT_AXES, "embedding", *REPLICA_AXES])
        raise ScheduleError(f"unknown axis {axis!r} of a collective. Known: {known}; or global ranks such as 0+4.")

    @cached_property
    def members(self) -> dict[Communicators, dict[int, tuple[int, ...]]]:
        """Communicators -> global rank -> the members of its own one, for all that are called."""
        used = sorted({communicators(call) for calls in self.lists for call in calls}, key=str)
        return {each: {rank: group for group in self.groups(*each) for rank in group} for each in used}

    def _across(self, pp_ranks: tuple[int, ...], groups: list[list[int]]) -> list[tuple[int, ...]]:
        """The groups, which span pipeline parallelism, at these pipeline ranks only; members in the order of
        the samples they see."""
        rows = (
            [[rank for rank in group if self._pp_rank[rank] == pp_rank] for pp_rank in pp_ranks] for group in groups
        )
        return [tuple(rank for column in zip(*row, strict=True) for rank in column) for row in rows]

    @cached_property
    def _pp_rank(self) -> dict[int, int]:
        return {rank: pp_rank for group in self.layout.groups("pp") for pp_rank, rank in enumerate(group)}

    def to_csv(self) -> str:
        """One line per global rank, one cell per call."""
        return "".join(",".join(map(str, self.of_rank(rank))) + "\n" for rank in range(len(self.list_of)))


def calls_from_csv(
    text: str,
    layout: Layout,
    placement: Placement,
    *,
    name: str = "csv",
    gradient_axes: Sequence[frozenset[str]] | None = None,
) -> Calls:
    """The calls that a text describes, one line per global rank (an empty line calls nothing); `name`
    stands in error messages.

    Raises one `ScheduleError` with every malformed cell, every unknown axis, and a wrong number of lines.
    """
    lines = text.splitlines()
    while len(lines) > layout.world_size and not lines[-1].strip():
        lines.pop()
    rows = [tuple(_parse(cell) for cell in line.split(",") if cell.strip()) for line in lines]
    problems: list[str] = [
        Problem(
            f"{cell!r} is not a call. {CALL_FORM}.",
            place=Location(name, number),
            origin=f"{name}: line {number} (global rank {number - 1})",
        )
        for number, row in enumerate(rows, start=1)
        for cell in row
        if isinstance(cell, str)
    ]
    if len(lines) != layout.world_size:
        problems.append(
            f"{name} has {len(lines)} lines, but the layout has {layout.world_size} ranks. Write one "
            "line per global rank."
        )
    lists = tuple(tuple(call for call in row if isinstance(call, Call)) for row in rows)
    distinct = {calls: number for number, calls in enumerate(dict.fromkeys(lists))}
    axes = None if gradient_axes is None else tuple(gradient_axes)
    calls = Calls(layout, placement, tuple(distinct), tuple(distinct[each] for each in lists), axes)
    beyond = [call for each in distinct for call in each if call.action.stage >= placement.num_stages]
    problems += [f"{name}: {call} names a stage, but there are {placement.num_stages}." for call in beyond]
    problems += [] if problems else _outside(calls, name)
    if problems:
        raise ScheduleError(problems[:_MAX_REPORTED])
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


def _parts(group: tuple[int, ...], size: int, part: str) -> list[tuple[int, ...]]:
    """The shards of a group, consecutive members each, or the members with equal places in them."""
    shards = [group[first : first + size] for first in range(0, len(group), size)]
    return shards if part == "shard" else list(zip(*shards, strict=True))


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
