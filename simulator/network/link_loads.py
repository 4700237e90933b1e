"""What one step sends over every link of the machine: all messages and collectives of all ranks on their routes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ...core.plan.plan import Plan
from ...core.program import Collective, Message, operations
from ...core.schedule.action import SENDS, Kind
from ...core.schedule.schedule import Schedule
from .spreads import Spreads
from .topology import Link, capacity_bytes_per_s, collective_loads, route, topology

if TYPE_CHECKING:
    import networkx

PIPELINE = "pp"
"""The axis of messages between stages."""

LEAST_SHOWN = 0.005
"""Share of a link's bytes below which an axis is not named."""


@dataclass(frozen=True)
class LinkLoad:
    """Bytes that cross one direction of one link in a step, by the axis that sends them (`core.program.Collective`).

    `busy_s` is how long the link needs for them. Several links of a route are busy at the same time, and a link that
    is busy for most of the step is what the step waits for, or what other jobs on the machine feel.
    """

    link: Link
    bytes_of_axis: Mapping[str, float]
    busy_s: float

    @property
    def num_bytes(self) -> float:
        """All of them."""
        return sum(self.bytes_of_axis.values())

    @property
    def name(self) -> str:
        """The link in words: `node 3, card 2, out`."""
        kind, owner, place = self.link
        what, _, direction = kind.partition("-")
        above = f"group {owner}, leaf switch" if what == "leaf" else f"node {owner}, {what}"
        return f"{above} {place}, {direction}"

    def report(self, step_s: float) -> dict[str, object]:
        """The JSON keys."""
        return {
            "link": self.name,
            "bytes": round(self.num_bytes),
            "busy_s": self.busy_s,
            "share_of_step": self.busy_s / step_s,
            "bytes_of_axis": {axis: round(num_bytes) for axis, num_bytes in self.bytes_of_axis.items()},
        }


def link_loads(plan: Plan, schedule: Schedule) -> tuple[LinkLoad, ...]:
    """The links that a step of a lowered schedule uses, the busiest first.

    Messages take their routes; a collective passes data from neighbour to neighbour, and an all-to-all sends every
    member its part (`topology.collective_loads`). Trees and sums in switches spread the same bytes otherwise.
    """
    counts = [_counts(schedule, pp_rank) for pp_rank in range(schedule.num_ranks)]
    loads: dict[Link, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (axis, op, members), sent in _sent(plan, counts).items():
        if op == "message":
            shares = dict.fromkeys(route(plan.cluster, *members), 1.0)
        else:
            shares = collective_loads(plan.cluster, members, op)
            sent /= len(members)
        for link, share in shares.items():
            loads[link][axis] += share * sent
    found = [
        LinkLoad(link, dict(of_axis), sum(of_axis.values()) / capacity_bytes_per_s(plan.cluster, link))
        for link, of_axis in loads.items()
    ]
    return tuple(sorted(found, key=lambda load: (-load.busy_s, load.link)))


def loaded_topology(plan: Plan, loads: Iterable[LinkLoad], step_s: float) -> networkx.DiGraph:
    """The machine as `topology` has it, with what a step sends over every edge that is a link."""
    graph = topology(plan.cluster)
    of_link = {load.link: load for load in loads}
    for _, _, edge in graph.edges(data=True):
        if (link := edge.pop("link")) is None:
            del edge["bytes_per_s"]  # nothing limits it
        else:
            load = of_link.get(link, LinkLoad(link, {}, 0.0))
            edge |= {name: value for name, value in load.report(step_s).items() if name != "bytes_of_axis"}
            edge["axes"] = axes_of(load.bytes_of_axis)
    return graph


def axes_of(bytes_of_axis: Mapping[str, float]) -> str:
    """Who sends how much of a link's bytes.

    >>> axes_of({"dp": 24.0, "ep": 75.9, "model": 0.1})
    'ep 76%, dp 24%'
    """
    whole = sum(bytes_of_axis.values())
    of_axis = sorted(bytes_of_axis.items(), key=lambda item: -item[1])
    return ", ".join(f"{axis} {sent / whole:.0%}" for axis, sent in of_axis if sent >= LEAST_SHOWN * whole)


def busiest(loads: Iterable[LinkLoad]) -> list[LinkLoad]:
    """Of each kind of link the busiest, the busiest first."""
    return list({load.link[0]: load for load in reversed([*loads])}.values())[::-1]


def _counts(schedule: Schedule, pp_rank: int) -> Counter[tuple[int, Kind]]:
    """How often a pipeline rank runs each kind of action of each of its stages."""
    return Counter((part.stage, part.kind) for action in schedule.row(pp_rank) for part in action.parts)


def _sent(plan: Plan, counts: list[Counter[tuple[int, Kind]]]) -> dict[tuple[str, str, tuple[int, ...]], float]:
    """Bytes that all members together send, by axis, operation and group; those of a message by its two ends."""
    layout, found = plan.layout, defaultdict[tuple[str, str, tuple[int, ...]], float](float)
    for tp_rank, cp_rank, dp_rank in product(range(layout.tp), range(layout.cp), range(layout.dp)):
        ranks = _OfReplica(plan, tp_rank, cp_rank, dp_rank)
        for pp_rank, of_rank in enumerate(counts):
            here = ranks.global_rank(pp_rank)
            for (stage, kind), count in of_rank.items():
                replica = plan.placement.replica_of(stage, pp_rank)
                for work in operations(plan, kind, stage, tp_rank, dp_rank, cp_rank=cp_rank, replica=replica):
                    if isinstance(work, Message):
                        peer = ranks.global_rank(_peer(plan, kind, stage, replica))
                        if peer != here:
                            found[PIPELINE, "message", (here, peer)] += count * work.num_bytes
                    elif isinstance(work, Collective) and work.group_size > 1:
                        members = tuple(ranks.members(work.axis, stage, pp_rank).tolist())
                        found[work.axis, work.op, members] += count * work.sent_bytes
    return found


def _peer(plan: Plan, kind: Kind, stage: int, replica: int) -> int:
    """The pipeline rank that a send goes to."""
    assert kind in SENDS
    owners = plan.placement.ranks[stage + (1 if kind is Kind.SEND_F else -1)]
    return owners[min(replica, len(owners) - 1)]


class _OfReplica(Spreads):
    """The groups of any one place in the dense grid."""

    def __init__(self, plan: Plan, tp_rank: int, cp_rank: int, dp_rank: int):
        super().__init__(plan, dp_rank)
        self._first = plan.layout.global_rank(tp=tp_rank, cp=cp_rank, dp=dp_rank)

    def global_rank(self, pp_rank: int) -> int:
        """The rank of that place on a pipeline rank."""
        return self._first + pp_rank * self._dense["pp"]
