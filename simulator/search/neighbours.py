"""What would be better: a plan's neighbours, one change away, and where the best of them lead.

Every change is made as `--set` makes it and simulated. It answers in a second or two, where a search over all layouts
(`search`) may take longer; what it finds is better than the plan, and not the best there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.base.errors import ShardproofError
from ...core.plan.plan import Plan
from ..simulation.simulate import simulate
from ..stack.profiles import profile_of
from ..step.step import lowered_schedule
from .changes import Changes, changed, settings
from .margins import margins_of
from .remedies import MOST_ACTIONS
from .search import candidate

LEAST_GAIN = 0.01
"""Share of the step that a change must save to be named; predictions are not finer than that."""

MOST_NAMED = 5
"""Single changes that are named."""

MOST_ROUNDS = 6
"""Changes that are made together at most."""


@dataclass(frozen=True)
class Better:
    """A plan that fits and is faster: what is changed, and its simulation's report."""

    changes: Changes
    plan: Plan
    found: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        """Its step."""
        return float(self.found["step_time_s"])

    def report(self) -> dict[str, Any]:
        """The JSON form: as a candidate of `plan`, with `set`, the texts for --set."""
        return {"set": settings(self.changes), **candidate(self.plan, self.found)}


def better_plans(plan: Plan, step_s: float) -> list[Better]:
    """The fastest single changes that save `LEAST_GAIN` of `step_s`, the plan's step, fastest first; before them what
    several changes give, one after the other, where that is faster than any one. Empty for a plan whose schedule is too
    long to simulate many times."""
    if len(lowered_schedule(plan)) > MOST_ACTIONS:
        return []
    singles = _faster_neighbours(plan, {}, step_s)
    best = singles[0] if singles else None
    while best is not None and len(best.changes) < MOST_ROUNDS:
        further = _faster_neighbours(plan, best.changes, best.step_s)
        if not further:
            break
        best = further[0]
    several = [best] if best is not None and best.changes.keys() > singles[0].changes.keys() else []
    return [*several, *singles[:MOST_NAMED]]


def _faster_neighbours(plan: Plan, base: Changes, step_s: float) -> list[Better]:
    """What is one change beyond `base` and saves `LEAST_GAIN` of `step_s`, fastest first."""
    found = []
    for change in _changes(changed(plan, base)):
        if any(base.get(key, value) != value for key, value in change.items() if key != "layout.dp"):
            continue  # it would take back what was changed before
        if (better := _tried(plan, {**base, **change})) is not None and better.step_s < step_s * (1 - LEAST_GAIN):
            found.append(better)
    return sorted(found, key=lambda each: each.step_s)


def _tried(plan: Plan, changes: Changes) -> Better | None:
    """The changed plan, where it is legal and fits."""
    try:
        other = changed(plan, changes)
        if len(lowered_schedule(other)) > MOST_ACTIONS or not margins_of(other).fits:
            return None
        return Better(changes, other, simulate(other).report)
    except ShardproofError:
        return None


def _changes(plan: Plan) -> Iterator[Changes]:
    """The changes that a person would try: degrees doubled and halved, the replicas making up for it."""
    layout, batch = plan.layout, plan.batch
    for axis in ("tp", "pp", "cp"):
        degree = getattr(layout, axis)
        if layout.dp % 2 == 0:
            yield {f"layout.{axis}": degree * 2, "layout.dp": layout.dp // 2}
        if degree % 2 == 0:
            yield {f"layout.{axis}": degree // 2, "layout.dp": layout.dp * 2, **_without_cut(axis, degree // 2)}
    if plan.model.is_moe:
        yield {"layout.ep": layout.ep * 2}
        if layout.ep % 2 == 0:
            yield {"layout.ep": layout.ep // 2}
    yield from _chunk_changes(plan)
    yield {"batch.micro": batch.micro_size * 2}
    if batch.micro_size % 2 == 0:
        yield {"batch.micro": batch.micro_size // 2}
    yield from ({"recompute.mode": mode} for mode in ("none", "selective") if mode != plan.recompute.mode)
    yield from ({"layout.zero": stage} for stage in range(layout.zero) if layout.dp * layout.cp > 1)
    if layout.zero == 0 and layout.dp * layout.cp > 1:
        yield {"layout.zero": 1}
    if layout.tp > 1 and not layout.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    yield from _overlaps(plan)


def _without_cut(axis: str, degree: int) -> Changes:
    """What goes with an axis and has no meaning without it."""
    return {"layout.sequence_parallel": False} if axis == "tp" and degree == 1 else {}


def _chunk_changes(plan: Plan) -> Iterator[Changes]:
    """More and fewer chunks per pipeline rank, for schedules that only differ in them."""
    vpp = plan.layout.vpp
    if plan.layout.pp == 1 or plan.schedule.name not in ("1F1B", "Interleaved1F1B"):
        return
    yield {"layout.vpp": vpp * 2, "schedule.name": "Interleaved1F1B"}
    if vpp % 2 == 0:
        yield {"layout.vpp": vpp // 2, "schedule.name": "Interleaved1F1B" if vpp > 2 else "1F1B"}


def _overlaps(plan: Plan) -> Iterator[Changes]:
    """Communication under computation, where the stack has it and the plan does not use it."""
    profile = profile_of(plan)
    if plan.layout.dp * plan.layout.cp > 1:
        if not profile.overlap_grad_reduce:
            yield {"data_parallel.overlap_grad_reduce": True}
        if not profile.overlap_param_gather and plan.layout.zero:
            yield {"data_parallel.overlap_param_gather": True}
    if plan.layout.tp > 1 and profile.tensor_overlap == "none" != profile.tensor_overlap_asked:
        yield {"runtime.tp_comm_overlap": True}
