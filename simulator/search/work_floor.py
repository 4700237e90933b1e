"""A lower bound on the step of a family that costs no look at its own layers: what devices work at least, which many
families have in common. Most are never looked at again."""

from __future__ import annotations

from collections.abc import Callable

from ...core.plan.plan import Plan
from ...core.program import recomputes_all
from ..cost.pricing import Pricing
from .bounds import at_work_s, work_floor_s
from .space import Family, without_recomputation


class WorkFloors:
    """Bounds for the families of one search. `pricing_of` prices its plans, of which those with equal `sharing` share
    their prices."""

    def __init__(self, pricing_of: Callable[[Plan], Pricing], sharing: Callable[[Plan], object]):
        self._pricing_of, self._sharing = pricing_of, sharing
        # By degrees and placement how groups lie; by that and what a microbatch of the layers is their seconds.
        self._lying: dict[object, object] = {}
        self._works: dict[object, float] = {}

    def bound_s(self, family: Family) -> float:
        """Seconds that no plan of the family can beat: as `family_bound_s`, of the layers without anything recomputed.
        0 where that is 0, and for layers on a calibrated host, which cost what the number of microbatches makes
        them."""
        plan = family.plan
        layout, sharing = plan.layout, self._sharing(plan)
        cut = (layout.tp, layout.cp, layout.cp_inner, layout.ep, layout.etp)
        place = (*cut, layout.pp, layout.dp, sharing)
        if place not in self._lying:
            self._lying[place] = self._pricing_of(plan).even_spreads()
        lying = self._lying[place]
        if lying is None or (plan.recompute.mode == "full" and not recomputes_all(plan)):
            return 0.0
        key = (*cut, layout.sequence_parallel, plan.batch, lying, sharing)
        if key not in self._works:
            plain = without_recomputation(family)
            self._works[key] = work_floor_s(plain, self._pricing_of(plain))
        return at_work_s(plan, self._works[key])
