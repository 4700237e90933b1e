"""`Timers`: seconds by kind of action, over all ranks, from the spans that every step has.

Ranks add up their own spans and send the sums once a report; nobody waits for a device in between. A rank that does
not do something has no seconds of it, and does not count in what is least, middle and most (names need not be the same
on all ranks).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from ...core.layout.stages import StageLayers
from ...core.plan.plan import AnyPlan
from ...core.schedule.action import Kind
from ...core.schedule.timeline import Span, holds_parts
from ..base.recorder import Waits
from ..transport.base import Transport
from ..transport.gather_values import gather_values
from .stragglers import Stragglers, Work

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.OVERLAP_F_B: "forward and backward",
    Kind.SEND_F: "send",
    Kind.SEND_B: "send",
    Kind.RECV_F: "receive",
    Kind.RECV_B: "receive",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "free parameters",
    Kind.REDUCE_GRAD: "reduce gradients",
    Kind.STEP: "optimizer",
}
"""What each kind of action goes by. A send or receive takes from when this rank was ready for it."""

OWN_WORK = frozenset(NAMES[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B, Kind.STEP))
"""What a rank can be slow at; messages and reductions are slow where another is."""

Sums = dict[Work, float]


class Timers:
    """The timers of one rank; all ranks of the plan make one, and ask for reports together."""

    def __init__(self, transport: Transport, plan: AnyPlan):
        self._world, self._device = transport.everyone, transport.device
        self._level = plan.log.timers
        self._recorder = transport.recorder
        self._waits = Waits()
        self._spans: Sums = {}
        self._num_steps = 0
        self._first_stage = plan.part_of(transport.global_rank).first_stage
        hosts = gather_values(self._world, socket.gethostname(), self._device)
        stages = (
            (each.stage + part.first_stage, _content(part.name, each)) for part in plan.parts for each in part.stages
        )
        self._stragglers = Stragglers(dict(stages), hosts)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step: inside, the seconds that this rank waits for others are taken, where the host knows them."""
        self._recorder.waits = self._waits if self._device.type == "cpu" else None
        try:
            yield
        finally:
            self._recorder.waits = None

    def add(self, spans: Iterable[Span]) -> None:
        """The spans of this rank in one step."""
        self._num_steps += 1
        for work, seconds in _sums(spans, self._first_stage).items():
            self._spans[work] = self._spans.get(work, 0.0) + seconds

    def report(self) -> dict[str, Any]:
        """Mean seconds a step since the last report, for the metrics: `timers` has for each kind the least, middle and
        most of all ranks that do it; on level 2 `timers_by_stage` has the same by stage; `straggler`, where there is
        one, the slow rank."""
        own = dict(self._spans)
        for action, seconds in self._waits.take().items():
            if action is not None:
                work = NAMES[action.kind], action.stage + self._first_stage
                own[work] = own.get(work, 0.0) - seconds
        mine = [[*work, self._spans[work] / self._num_steps, own[work] / self._num_steps] for work in self._spans]
        self._spans, self._num_steps = {}, 0
        everyone = gather_values(self._world, mine, self._device)
        spans = [{(name, stage): taken for name, stage, taken, _ in rows} for rows in everyone]
        works = [
            {(name, stage): max(own, 0.0) for name, stage, _, own in rows if name in OWN_WORK} for rows in everyone
        ]
        step_s = max(sum(taken for (name, _), taken in rank.items() if name in OWN_WORK) for rank in spans)
        found = self._stragglers.find(works, step_s)
        by_stage = _over_ranks([{f"{name} of stage {stage}": s for (name, stage), s in rank.items()} for rank in spans])
        return {
            "timers": _over_ranks([_by_name(rank) for rank in spans]),
            **({"timers_by_stage": by_stage} if self._level > 1 else {}),
            **({"straggler": found.to_json()} if found is not None else {}),
        }


def _sums(spans: Iterable[Span], first_stage: int) -> Sums:
    """Seconds of one rank by work; what a lane of collectives has is part of a forward or backward already."""
    found: Sums = {}
    for span in spans:
        if not holds_parts(span.lane):
            work = NAMES[span.action.kind], span.action.stage + first_stage
            found[work] = found.get(work, 0.0) + span.end_s - span.start_s
    return found


def _by_name(sums: Sums) -> dict[str, float]:
    found: dict[str, float] = {}
    for (name, _), seconds in sums.items():
        found[name] = found.get(name, 0.0) + seconds
    return found


def _over_ranks(ranks: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Name -> least, middle and most seconds of the ranks that have it."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    taken = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    return {name: [min(each), median(each), max(each)] for name, each in taken.items()}


def _content(module: str, stage: StageLayers) -> str:
    """A name that stages with the same layers share."""
    return f"{module} {len(stage.layers)} {stage.embedding} {stage.head}"
