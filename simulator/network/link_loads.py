"""What one step sends over every link of the machine: all messages and collectives of all ranks on their routes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.plan.plan import Plan
from ...core.schedule.schedule import Schedule
from .sent_bytes import MESSAGE, sent_bytes
from .topology import Link, capacity_bytes_per_s, collective_loads, route, topology

if TYPE_CHECKING:
    import networkx

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
    loads: dict[Link, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (axis, op, members), sent in sent_bytes(plan, schedule).items():
        if op == MESSAGE:
            shares, each = dict.fromkeys(route(plan.cluster, *members), 1.0), sent[0]
        else:
            shares, each = collective_loads(plan.cluster, members, op), sum(sent) / len(sent)
        for link, share in shares.items():
            loads[link][axis] += share * each
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
