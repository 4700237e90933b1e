"""Lower bounds on the time of a step that decide most layouts of a search without simulating them; those on memory
are in `memory_floor`.

The bound of a family has computation and the collectives inside layers only, that of a cut the ramps of the pipeline
too, and the sharp one of a plan what REDUCE_GRAD, ZeRO and STEP add. For 1F1B with equal stages and free messages
either is the makespan itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...core.plan.plan import Plan
from ...core.program import recomputes_all
from ...core.schedule.action import Kind
from ...core.schedule.placement import Placement
from ..compute.compute import slowed_s
from ..cost.pricing import Pricing
from ..engine.seconds import COMPONENTS, GRID, Seconds
from .space import Family

WHOLE_BACKWARDS = frozenset({"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "Combined1F1B"})
"""Schedules that never split a backward: after a rank's last action the backwards of the stages before
it are still to come."""

WITHOUT_PAIRS = frozenset(
    {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBH1", "ZBH2", "ZBAuto"}
) | frozenset({"ZBVZeroBubble", "VHalf", "VMin"})
"""Schedules that never run a forward and a backward as one, hiding the exchange of tokens between experts."""


ROUNDING = 1e-9
"""More than sums of seconds in another order differ by."""


@dataclass(frozen=True, eq=False)
class _Slots:
    """Who runs what of a placement: a slot is a stage on one of its ranks, with the microbatches it
    runs there; sorted by stage.

    `first` is where each stage starts, `by_rank` sorts the slots by rank, and `rank_first` is
    where each rank starts then.
    """

    stage: np.ndarray
    replica: np.ndarray
    rank: np.ndarray
    count: np.ndarray
    first: np.ndarray
    by_rank: np.ndarray
    rank_first: np.ndarray


class _Passes(NamedTuple):
    """Prices of a slot's passes: forward, and backward in one or in two."""

    forward: Seconds
    backward: Seconds
    split: Seconds

    def columns(self, *, whole: bool) -> tuple[float, float, float, float]:
        """Seconds of the forward and of the shorter backward, and the most that both exchange
        between experts and compute."""
        one, two = self.backward, self.backward if whole else self.split
        exchange_s = self.forward.ep_comm + max(one.ep_comm, two.ep_comm)
        compute_s = (
            self.forward.compute
            + self.forward.recompute
            + max(one.compute + one.recompute, two.compute + two.recompute)
        )
        return self.forward.total_s, min(one.total_s, two.total_s), exchange_s, compute_s


def family_bound_s(family: Family, pricing: Pricing) -> float:
    """Seconds that no plan of a family can beat: the work of all its layers, shared evenly by the pipeline ranks.

    However layers are cut into stages their kernels take as long, but for what the host needs longer to launch those of
    a stage, which is left out. 0 where that is not so: where groups of ranks lie differently on different pipeline
    ranks, or where some layers only are recomputed.
    """
    plan = family.plan
    if (plan.recompute.mode == "full" and not recomputes_all(plan)) or not pricing.is_placed_evenly():
        return 0.0
    firsts, number = _distinct([pricing.inner_class(stage) for stage in range(plan.placement.num_stages)])
    work_s, exchange_s, compute_s = 0.0, 0.0, 0.0
    for first, count in zip(firsts, np.bincount(number).tolist(), strict=True):
        passes = _Passes(*pricing.unsharded(first))
        _, _, exchanged_s, computed_s = passes.columns(whole=False)
        launched_s = passes.forward.other + max(passes.backward.other, passes.split.other)
        work_s += count * (passes.forward.total_s + min(passes.backward.total_s, passes.split.total_s) - launched_s)
        exchange_s, compute_s = exchange_s + count * exchanged_s, compute_s + count * computed_s
    # where a stack overlaps all passes, what is exposed depends on the stages
    if exchange_s and not pricing.profile.expert_overlap:
        exchange_s = float(_hidden_s(plan, np.array([exchange_s]), np.array([compute_s]))[0])
    return at_work_s(plan, work_s - exchange_s)


def work_floor_s(plan: Plan, pricing: Pricing) -> float:
    """Seconds that devices work at least on all layers of a microbatch, of a plan and of those that differ from it in
    pipeline ranks, chunks, cut of the layers, schedule, copies or ZeRO stage, where groups over which layers
    communicate lie in the same way on all pipeline ranks of both. With something recomputed it is no less.

    It is what `family_bound_s` counts, block by block: no stage has to be put together.
    """
    firsts, number = _distinct([pricing.inner_class(stage) for stage in range(plan.placement.num_stages)])
    work_s, exchange_s, compute_s = 0.0, 0.0, 0.0
    for first, stages in zip(firsts, np.bincount(number).tolist(), strict=True):
        for group, passes in pricing.blocks_of(first):
            count = stages * group.count
            forward_s, backward_s, exchanged_s, computed_s = _Passes(*passes).columns(whole=False)
            work_s += count * (forward_s + backward_s)
            exchange_s, compute_s = exchange_s + count * exchanged_s, compute_s + count * computed_s
    if exchange_s and not pricing.profile.expert_overlap:
        exchange_s = float(_hidden_s(plan, np.array([exchange_s]), np.array([compute_s]))[0])
    return (work_s - exchange_s) * (1 - ROUNDING)


def at_work_s(plan: Plan, work_s: float) -> float:
    """Seconds that a step takes at least where all layers of a microbatch take so many, shared evenly by the pipeline
    ranks."""
    rounding_s = len(COMPONENTS) * (plan.model.num_layers + 2) / GRID
    return plan.num_microbatches * max(0.0, work_s - rounding_s) / plan.layout.pp


def chain_bounds_s(plan: Plan, schedules: Sequence[str], pricing: Pricing) -> Iterator[float]:
    """For schedules of one placement seconds that no run of the plan in their order can beat, from what its stages
    compute and send inside layers.

    Before a rank's first forward those of the lower stages have to run once, after its last backward those of its lower
    stages; in between it computes all its microbatches. Where backwards are split, a rank may fill the time after its
    last input gradient with weight gradients, so nothing is counted then.
    """
    slots = _slots_of(plan.placement)
    places = _places(slots)
    firsts, number = _distinct([pricing.inner_class(*place) for place in places])
    passes = [_Passes(*pricing.unsharded(*places[first])) for first in firsts]
    found: dict[tuple[bool, bool], float] = {}
    for schedule in schedules:
        whole, pairs = key = schedule in WHOLE_BACKWARDS, schedule not in WITHOUT_PAIRS
        if key not in found:
            ends_s, drains_s = _chains(plan, slots, _columns(passes, number, whole=whole), pairs=pairs)
            found[key] = float((ends_s + drains_s if whole else ends_s).max())
        yield found[key]


def lower_bound_s(plan: Plan, pricing: Pricing) -> float:
    """The same with what ZeRO sends inside forwards and backwards, with the reduction of the last stage's gradients,
    and with the optimizer step: after clipping the slowest of all ranks, else each rank's own."""
    slots, schedule = _slots_of(plan.placement), "" if plan.schedule.file else plan.schedule.name
    whole, places = schedule in WHOLE_BACKWARDS, _places(slots)
    firsts, number = _distinct([pricing.price_class(Kind.F, *place) for place in places])
    columns = _columns([_sharded(pricing, *places[first], whole=whole) for first in firsts], number, whole=whole)
    ends_s, drains_s = _chains(plan, slots, columns, pairs=schedule not in WITHOUT_PAIRS)
    after_s = np.array([_after_s(pricing, *places[first]) for first in firsts])[number]
    done_s = ends_s + np.minimum.reduceat(after_s[slots.by_rank], slots.rank_first)
    of_ranks = [places[i] for i in slots.by_rank[slots.rank_first].tolist()]
    # What lower stages hide of a STEP differs from rank to rank. The longest counts after clipping, and of ranks that
    # send the same the first hides least.
    clips = bool(plan.optimizer.clip_grad_norm)
    class_of = pricing.sending_class if clips else pricing.price_class
    firsts, number = _distinct([class_of(Kind.STEP, *place) for place in of_ranks])
    step_s = np.array([pricing.seconds(Kind.STEP, *of_ranks[first]).total_s for first in firsts])[number]
    drained_s = (
        float((ends_s + drains_s).max() + after_s[: slots.first[1]].min()) if whole and len(slots.first) > 1 else 0.0
    )
    if clips:
        return max(float(done_s.max()), drained_s) + float(step_s.max())
    return max(float((done_s + step_s).max()), drained_s + float(step_s.min()) if drained_s else 0.0)


def _sharded(pricing: Pricing, stage: int, replica: int, *, whole: bool) -> _Passes:
    """What a stage's passes cost; where no backward is split, the whole one stands for the split one."""
    forward, backward = pricing.seconds(Kind.F, stage, replica), pricing.seconds(Kind.B, stage, replica)
    if whole:
        return _Passes(forward, backward, backward)
    return _Passes(forward, backward, pricing.seconds(Kind.I, stage, replica) + pricing.seconds(Kind.W, stage, replica))


def _after_s(pricing: Pricing, stage: int, replica: int) -> float:
    """Seconds of a stage's reduction that remain after its last backward."""
    reduce_s, lead_s, tail_s = pricing.reduction_s(stage, replica)
    return max(tail_s, reduce_s - lead_s)


def _distinct(classes: Sequence[object]) -> tuple[list[int], np.ndarray]:
    """Where each class comes first, and the number of the class of every place: equal prices are asked for once."""
    numbers: dict[object, int] = {}
    number = np.array([numbers.setdefault(each, len(numbers)) for each in classes])
    return np.unique(number, return_index=True)[1].tolist(), number


def _columns(passes: Sequence[_Passes], number: np.ndarray, *, whole: bool) -> np.ndarray:
    """`_Passes.columns` of every slot, of which `number` says whose passes are its own."""
    columns: np.ndarray = np.array([each.columns(whole=whole) for each in passes])[number].T
    return columns


def _chains(plan: Plan, slots: _Slots, columns: np.ndarray, *, pairs: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of every rank: when its own work can have ended, and how long the backwards of lower stages take after it."""
    forward_s, backward_s, exchange_s, compute_s = columns
    busy_s = _per_rank(slots, slots.count * (forward_s + backward_s))
    if pairs and exchange_s.any():
        busy_s -= _hidden_s(plan, _per_rank(slots, slots.count * exchange_s), _per_rank(slots, slots.count * compute_s))
        busy_s -= _per_rank(slots, slots.count) / GRID
        forward_s, backward_s = (column - exchange_s for column in (forward_s, backward_s))
    before_s, after_s = (
        _below(np.minimum.reduceat(column, slots.first))[slots.stage] for column in (forward_s, backward_s)
    )
    begins_s, drains_s = (
        np.minimum.reduceat(column[slots.by_rank], slots.rank_first) for column in (before_s, after_s)
    )
    return begins_s + busy_s, drains_s


def _hidden_s(plan: Plan, exchange_s: np.ndarray, compute_s: np.ndarray) -> np.ndarray:
    """The most that pairs of a rank can hide of all its exchanges of tokens behind all its computation.

    What a pair hides is concave in both and grows in proportion to them (`Pricing.price`), so it is no more for all
    pairs together than for one pair of their sums, and each pair's price is rounded once.
    """
    cluster = plan.cluster
    pairs = zip(exchange_s.tolist(), compute_s.tolist(), strict=True)
    return np.array([each_s - (max(slowed_s(cluster, work_s, each_s), each_s) - work_s) for each_s, work_s in pairs])


def _per_rank(slots: _Slots, column: np.ndarray) -> np.ndarray:
    """The sum of every rank."""
    found: np.ndarray = np.add.reduceat(column[slots.by_rank], slots.rank_first)
    return found


def _below(per_stage: np.ndarray) -> np.ndarray:
    """Sums over the stages below each one."""
    return np.cumsum(per_stage) - per_stage


def _places(slots: _Slots) -> list[tuple[int, int]]:
    """Stage and replica of every slot."""
    return list(zip(slots.stage.tolist(), slots.replica.tolist(), strict=True))


@lru_cache(maxsize=512)
def _slots_of(placement: Placement) -> _Slots:
    rows = [
        (stage, replica, rank, hi - lo)
        for stage, owners in enumerate(placement.ranks)
        for replica, rank in enumerate(owners)
        for lo, hi in (placement.microbatches_of(stage, replica),)
        if hi > lo
    ]
    stage, replica, rank, count = np.array(rows).T
    by_rank = np.argsort(rank, kind="stable")
    first = np.flatnonzero(np.diff(stage, prepend=-1))
    return _Slots(stage, replica, rank, count, first, by_rank, np.flatnonzero(np.diff(rank[by_rank], prepend=-1)))
