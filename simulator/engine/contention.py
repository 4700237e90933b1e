"""Transfers that share a link share its bandwidth: the engine's fluid model, and how to see that nothing is shared.

A transfer moves at the rate it has alone until links on its route carry as much as they can. Then all that
cross a full link go down together to one rate in bytes per second, except those that are slower anyhow: max-min
fairness by progressive filling (Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2). Rates
change only when a transfer starts or ends, so time runs from one such event to the next, and only over the
transfers that are tied together by full links.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...core.base.errors import ScheduleError
from ...core.schedule.action import Kind
from . import kernel
from .engine import Run, execute, plain_run
from .graph import NUM_WAITS, Graph
from .seconds import GRID

Link = Any
"""The name of one direction of one link, whatever hashable thing the topology calls it."""

SLACK = 1e-9
"""Relative load by which a link may seem too full before it counts as full: sums of rates that fill
it exactly are rounded."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """What the actions of a graph load.

    `route[i]` is the place in `routes` of action i, -1 for what loads no link. A route lists links and how many bytes
    each carries per byte of the transfer (1 for a message; k for a link that also carries k - 1 equal transfers which
    are not simulated). `rate_bytes_per_s[route]` is a transfer's rate when it is alone, `capacity_bytes_per_s` what
    each link carries. An action's bytes are its duration times its rate.
    """

    route: np.ndarray
    routes: tuple[Mapping[Link, float], ...]
    rate_bytes_per_s: Sequence[float]
    capacity_bytes_per_s: Mapping[Link, float]

    def __post_init__(self) -> None:
        unknown = {link for route in self.routes for link in route} - set(self.capacity_bytes_per_s)
        if unknown:
            raise ScheduleError(
                f"no capacity is given for link {min(map(str, unknown))}. Give one for every link of a route."
            )
        shares = (share for route in self.routes for share in route.values())
        if not all(
            0 < number < float("inf")
            for number in (*self.rate_bytes_per_s, *self.capacity_bytes_per_s.values(), *shares)
        ):
            raise ScheduleError("a rate, share or capacity of a transfer is not a finite number above 0.")
        num_routes, lowest, highest = len(self.routes), self.route.min(initial=-1), self.route.max(initial=-1)
        if len(self.rate_bytes_per_s) != num_routes or lowest < -1 or highest >= num_routes:
            raise ScheduleError(
                f"{num_routes} routes with {len(self.rate_bytes_per_s)} rates; actions name routes "
                f"{lowest} to {highest}."
            )

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The links in the order of the columns below."""
        return tuple(self.capacity_bytes_per_s)

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Route of each action, rate of each route, bounds of its links, those links and their shares,
        capacity of each link."""
        number = {link: i for i, link in enumerate(self.links)}
        bounds = np.cumsum([0, *(len(route) for route in self.routes)], dtype=np.int32)
        links = np.array([number[link] for route in self.routes for link in route], dtype=np.int32)
        shares = np.array([share for route in self.routes for share in route.values()], dtype=np.float64)
        rates = np.asarray(self.rate_bytes_per_s, dtype=np.float64)
        capacity = np.array(list(self.capacity_bytes_per_s.values()), dtype=np.float64)
        return np.ascontiguousarray(self.route, dtype=np.int32), rates, bounds, links, shares, capacity


def execute_shared(
    graph: Graph,
    duration_s: Sequence[float] | np.ndarray,
    traffic: Traffic,
    *,
    lead_s: np.ndarray | None = None,
    tail_s: np.ndarray | None = None,
) -> Run:
    """`execute` where transfers contend: durations of actions with a route are those they have alone.

    While no link is too full the times are those of `execute`, to the last bit, at little more cost. The end of a
    transfer that was slowed is rounded to the grid of prices, so that sums of times stay exact. Raises `ScheduleError`
    for a lead before the end of a transfer, which is not known while it runs, and for columns of the wrong length.
    """
    if not len(traffic.route) == len(duration_s) == len(graph.rank):
        given = f"{len(traffic.route)} routes and {len(duration_s)} durations"
        raise ScheduleError(f"{given} for {len(graph.rank)} actions. Give one per action.")
    _refuse_leads_on_transfers(graph, traffic, lead_s)
    duration_s = np.asarray(duration_s, dtype=np.float64)
    alone = execute(graph, duration_s, lead_s=lead_s, tail_s=tail_s)
    since_s = uncontended_until(alone, traffic)
    if since_s == np.inf:
        return alone
    columns = traffic.columns
    times = kernel.settle_shared(alone, duration_s, lead_s, tail_s, columns, slack=SLACK, grid=GRID, since_s=since_s)
    return Run(graph, *times) if times else plain_shared(graph, duration_s, traffic, lead_s=lead_s, tail_s=tail_s)


def _refuse_leads_on_transfers(graph: Graph, traffic: Traffic, lead_s: np.ndarray | None) -> None:
    if lead_s is None:
        return
    led = np.flatnonzero(graph.can_lead)
    led = led[lead_s[led] != 0]
    awaited = graph.waits[1, led]
    wrong = led[(awaited >= 0) & (traffic.route[awaited] >= 0)]
    if len(wrong):
        action, transfer = (graph.schedule.actions[int(i)] for i in (wrong[0], graph.waits[1, wrong[0]]))
        raise ScheduleError(
            f"{action} has a lead on {transfer}, whose end is not known while it shares links. Give "
            "leads on compute only."
        )


def uncontended_until(run: Run, traffic: Traffic) -> float:
    """Seconds before which no link of a run carries more than it can, at the latest; infinite when none ever does."""
    until_s = kernel.uncontended_until(run, traffic.columns, SLACK)
    if until_s is None:
        return 0.0 if overloaded_links(run, traffic) else np.inf
    return until_s


def overloaded_links(run: Run, traffic: Traffic) -> list[Link]:
    """The links that would at some time of a run carry more than they can."""
    events: dict[Link, list[tuple[float, int, float]]] = {link: [] for link in traffic.links}
    for i in np.flatnonzero((traffic.route >= 0) & ~run.graph.is_receive & (run.end_s > run.start_s)).tolist():
        route = int(traffic.route[i])
        for link, share in traffic.routes[route].items():
            load = share * traffic.rate_bytes_per_s[route]
            events[link] += [(float(run.start_s[i]), 1, load), (float(run.end_s[i]), 0, -load)]
    found = []
    for link, changes in events.items():
        load, most = 0.0, 0.0
        for _, _, change in sorted(changes):  # what ends goes first
            load += change
            most = max(most, load)
        if most > traffic.capacity_bytes_per_s[link] * (1 + SLACK):
            found.append(link)
    return found


def plain_shared(
    graph: Graph,
    duration_s: np.ndarray,
    traffic: Traffic,
    *,
    lead_s: np.ndarray | None = None,
    tail_s: np.ndarray | None = None,
) -> Run:
    """The fluid model without compiled loops and without the short cut for runs in which nothing is shared."""
    fluid = _Fluid(graph, duration_s, traffic, lead_s, tail_s)
    fluid.run()
    if fluid.num_settled < len(graph.evaluated):
        return plain_run(graph, duration_s, lead_s=lead_s, tail_s=tail_s)  # which says who waits for whom
    start_s, end_s = np.array(fluid.start), np.array(fluid.end)
    receives = np.flatnonzero(graph.is_receive)
    sends, posted = graph.partner[receives], graph.posted_after[receives]
    posted_s = np.where(posted >= 0, end_s[posted], 0.0)
    start_s[receives] = np.maximum(start_s[sends], posted_s)
    end_s[receives] = np.maximum(end_s[sends], posted_s)
    return Run(graph, start_s, end_s)


_ENDS, _STARTS = 0, 1
"""Order of events at one time: what ends makes room for what starts."""


class _Fluid:
    """One fluid run. Actions without a route settle as soon as their waits have; only transfers go
    through the queue of events."""

    def __init__(
        self,
        graph: Graph,
        duration_s: np.ndarray,
        traffic: Traffic,
        lead_s: np.ndarray | None,
        tail_s: np.ndarray | None,
    ):
        size = len(graph.rank)
        self.duration = duration_s.tolist()
        self.lead, self.tail = (
            [0.0] * size if column is None else np.where(graph.can_lead, column, 0.0).tolist()
            for column in (lead_s, tail_s)
        )
        self.is_reduction = (graph.schedule.actions.kind == Kind.REDUCE_GRAD).tolist()
        self.waits = graph.waits.T.tolist()
        self.is_receive = graph.is_receive.tolist()
        self.route, self.rate = traffic.columns[0].tolist(), traffic.columns[1].tolist()
        number = {link: i for i, link in enumerate(traffic.links)}
        self.links = [[(number[link], share) for link, share in route.items()] for route in traffic.routes]
        self.capacity = [capacity * (1 + SLACK) for capacity in traffic.columns[5].tolist()]
        self.crossing: list[list[int]] = [[] for _ in self.capacity]  # the transfers that run over each link
        self.missing, self.followers = [0] * size, [[] for _ in range(size)]  # type: ignore[var-annotated]
        for i in graph.evaluated.tolist():
            for slot in range(NUM_WAITS):
                if (awaited := self.waits[i][slot]) >= 0:
                    self.missing[i] += 1
                    self.followers[awaited].append((i, slot))
        self.start, self.end = [0.0] * size, [0.0] * size
        self.ready, self.fed = [0.0] * size, [0.0] * size
        self.remaining, self.since, self.speed, self.version = [0.0] * size, [0.0] * size, [0.0] * size, [0] * size
        self.events: list[tuple[float, int, int, int]] = []
        self.settled: list[int] = []
        self.num_settled = 0

    def run(self) -> None:
        """Settles everything that can be settled."""
        for i, missing in enumerate(self.missing):
            if not missing and not self.is_receive[i]:
                self.begin(i)
        self.spread()
        while self.events:
            time, what, i, version = heapq.heappop(self.events)
            if version != self.version[i]:
                continue
            if what == _STARTS:
                self.enter(i, time)
            else:
                self.leave(i, time)
            self.spread()

    def begin(self, i: int) -> None:
        """All waits of an action have ended (or will, at a known time): it starts then."""
        self.start[i] = self.ready[i]
        if self.route[i] < 0 or self.duration[i] == 0:
            self.settle(i, self.ready[i] + self.duration[i])
        else:
            heapq.heappush(self.events, (self.ready[i], _STARTS, i, self.version[i]))

    def settle(self, i: int, done_s: float) -> None:
        """The end of an action is known."""
        self.end[i] = max(done_s, self.fed[i] + self.tail[i])
        self.num_settled += 1
        self.settled.append(i)

    def spread(self) -> None:
        """Notifies what waits for the actions that have settled."""
        while self.settled:
            done = self.settled.pop()
            for i, slot in self.followers[done]:
                ready = self.end[done]
                if slot == 1 or (slot == 3 and self.is_reduction[i]):
                    self.fed[i] = max(self.fed[i], ready)
                    if self.lead[i] and (self.route[done] < 0 or self.duration[done] == 0):
                        ready = max(ready - self.lead[i], self.start[done])
                self.ready[i] = max(self.ready[i], ready)
                self.missing[i] -= 1
                if not self.missing[i]:
                    self.begin(i)

    def enter(self, i: int, time: float) -> None:
        """A transfer starts."""
        self.remaining[i], self.since[i], self.speed[i] = self.duration[i], time, 0.0
        for link, _ in self.links[self.route[i]]:
            self.crossing[link].append(i)
        self.share(*self.tied(i), time)

    def leave(self, i: int, time: float) -> None:
        """A transfer ends."""
        transfers, links = self.tied(i)
        self.version[i] += 1
        for link, _ in self.links[self.route[i]]:
            self.crossing[link].remove(i)
        self.share(transfers[1:], links, time)
        self.settle(i, time)

    def tied(self, i: int) -> tuple[list[int], list[int]]:
        """The transfers whose rates depend on each other through full links, `i` first, and those links."""
        transfers, links, seen, tied = [i], [], set(), {i}
        for transfer in transfers:
            for link, _ in self.links[self.route[transfer]]:
                if link not in seen and self.is_full(link):
                    seen.add(link)
                    links.append(link)
                    new = [other for other in self.crossing[link] if other not in tied]
                    tied.update(new)
                    transfers += new
        return transfers, links

    def is_full(self, link: int) -> bool:
        """Whether a link cannot carry its transfers at the rates they have alone."""
        load = 0.0
        for transfer in self.crossing[link]:
            load += self.share_of(transfer, link) * self.rate[self.route[transfer]]
        return load > self.capacity[link]

    def share_of(self, transfer: int, link: int) -> float:
        """Bytes on a link per byte of a transfer that crosses it."""
        return next(share for other, share in self.links[self.route[transfer]] if other == link)

    def share(self, transfers: list[int], links: list[int], time: float) -> None:
        """New speeds of tied transfers, as shares of the rates they have alone."""
        for i, speed in zip(transfers, self.filled(transfers, links), strict=True):
            if speed == self.speed[i]:
                continue
            self.remaining[i] = max(0.0, self.remaining[i] - (time - self.since[i]) * self.speed[i])
            self.since[i], self.speed[i] = time, speed
            self.version[i] += 1
            end_s = time + self.remaining[i] / speed
            if speed != 1 or self.remaining[i] != self.duration[i]:
                end_s = max(time, math.floor(end_s * GRID + 0.5) / GRID)
            heapq.heappush(self.events, (end_s, _ENDS, i, self.version[i]))

    def filled(self, transfers: list[int], links: list[int]) -> list[float]:
        """Progressive filling: all rates rise together, until a link is full or a transfer is
        as fast as it is alone."""
        level, rates = 0.0, dict.fromkeys(transfers, -1.0)
        free = list(transfers)
        while free:
            slowest = min(self.rate[self.route[i]] for i in free)
            full_at, full = min(
                ((self.level_of(link, rates, level), place) for place, link in enumerate(links)),
                default=(float("inf"), 0),
            )
            if slowest <= full_at:
                level = slowest
                frozen = {i for i in free if self.rate[self.route[i]] <= level}
            else:
                level = full_at
                frozen = set(free).intersection(self.crossing[links[full]])
            rates.update(dict.fromkeys(frozen, level))
            free = [i for i in free if i not in frozen]
        return [rates[i] / self.rate[self.route[i]] for i in transfers]

    def level_of(self, link: int, rates: dict[int, float], level: float) -> float:
        """The common rate at which the transfers that still rise fill a link."""
        used, weight = 0.0, 0.0
        for i in self.crossing[link]:
            share = self.share_of(i, link)
            if rates[i] < 0:
                weight += share
            else:
                used += share * rates[i]
        return max((self.capacity[link] - used) / weight, level) if weight else float("inf")
