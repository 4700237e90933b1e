"""What may fit of the families of a search: lower bounds on the memory of all their plans, of which each part is worked
out once for all plans that it is the same of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from ...core.plan.plan import Plan
from ...core.schedule import CATALOG
from .memory_floor import End, MemoryFloors, Resting, least_bytes
from .space import Family, Pinned, Skeleton, Tally, first_plan, microbatches, with_schedule, with_zero


def siblings(found: Iterable[Family]) -> Iterator[list[Family]]:
    """Families in a row that have the same degrees."""
    for _, each in groupby(found, lambda family: _degrees(family.plan)):
        yield list(each)


def _degrees(plan: Plan) -> tuple[object, ...]:
    layout = plan.layout
    return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.etp


class _Rests(NamedTuple):
    """What rests on the ends of a cut of the layers, by ZeRO stage, and the least of it that a rank holds of any."""

    ends: tuple[End, End]
    of_zeros: list[tuple[Resting, Resting]]
    least: int


class Fitting:
    """Looks for what fits of families with the same degrees. They differ in microbatch, recomputation and sequence
    parallelism: those that differ in nothing else have the same states, and those of one microbatch as many of them."""

    def __init__(self, floors: MemoryFloors, usable_bytes: int, tally: Tally):
        self._floors, self._usable_bytes, self._tally = floors, usable_bytes, tally
        self._rests: dict[tuple[object, ...], _Rests] = {}

    def of(self, family: Family) -> Family | None:
        """What is left of a family without the plans that do not fit, which are counted; None where nothing is."""
        left, least = list[Skeleton](), self._usable_bytes
        for skeleton in family.skeletons:
            possible: dict[str, tuple[int, ...]] = {}
            for multiple, names in _by_multiple(skeleton.schedules).items():
                counts, zeros = microbatches(family.plan.batch, skeleton.layout, multiple), skeleton.zeros[names[0]]
                rests = self._rests_of(family, skeleton, names[0], zeros, len(counts))
                if rests.least > self._usable_bytes:
                    continue
                saved = self._floors.saved_of(family.plan, rests.ends)
                for name in names:
                    needed = least_bytes(name, family.plan, counts[0], rests.of_zeros, saved)
                    least_needed = min(needed)
                    if least_needed > self._usable_bytes:
                        continue
                    pairs = zip(zeros, needed, strict=True)
                    possible[name] = tuple(zero for zero, num_bytes in pairs if num_bytes <= self._usable_bytes)
                    least = min(least, least_needed)
            if possible:
                ordered = {name: possible[name] for name in skeleton.schedules if name in possible}
                left.append(Skeleton(skeleton.layout, ordered))
        found = family._replace(skeletons=tuple(left), least_bytes=least)
        if found.size < family.size:
            self._tally.reject("out-of-memory", family.size - found.size)
        if not left:
            return None
        schedule, zeros = next(iter(left[0].zeros.items()))
        return found._replace(plan=with_schedule(family, left[0].layout, schedule, zeros[0]))

    def _rests_of(
        self, family: Family, skeleton: Skeleton, schedule: str, zeros: tuple[int, ...], num_counts: int
    ) -> _Rests:
        layout = skeleton.layout
        key = (layout.vpp, layout.stages, CATALOG[schedule].placement, zeros, num_counts, family.plan.recompute)
        if (rests := self._rests.get(key)) is None:
            plan, space = first_plan(family, skeleton), family.space
            ends, pinned = self._floors.ends_of(plan), Pinned(family.space)
            made = {zero: partial(with_zero, plan, space, pinned, schedule, zero) for zero in zeros}
            resting = self._floors.resting_of(plan, num_counts, ends, made)
            least = min(max(each.held + each.summed for each in ranks) for ranks in resting)
            rests = self._rests[key] = _Rests(ends, resting, least)
        return rests


def _by_multiple(schedules: Sequence[str]) -> dict[int, list[str]]:
    """Schedules by that of which their numbers of microbatches are multiples."""
    found: dict[int, list[str]] = {}
    for name in schedules:
        found.setdefault(CATALOG[name].multiple, []).append(name)
    return found
