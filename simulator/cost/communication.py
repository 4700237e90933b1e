"""What the ranks of a plan send each other, and what that takes: collectives, messages, gradients in buckets; and which
stages cost the same, so that each price is worked out once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ...core.plan.plan import Plan
from ...core.program import (
    Collective,
    Held,
    composition,
    copies_axis,
    gradient_bytes,
    held_elements,
    message_bytes,
    num_shards,
    operations,
    rank_stages,
    reduce_microbatch,
    stage_groups,
    tied_ends,
)
from ...core.schedule.action import Kind
from ..engine.seconds import Seconds
from ..network.network import collective_s, message_s, message_work_s
from ..network.spreads import Spreads
from ..network.topology import Spread
from ..stack.profiles import profile_of
from .blocks import COMPONENT_OF_AXIS
from .host_blocks import is_host, rate_share
from .host_cores import shares_cores
from .once_a_step import num_buckets
from .zero import table_share

MOST_SHARED = 4096
"""Layouts whose prices a process keeps for one model, cluster and stack."""


@lru_cache(maxsize=16)
def _prices_of(*_family: object) -> dict[tuple[object, ...], Any]:
    """The prices that plans share of one model, cluster, stack, sharding, precision, numerics, [runtime], [train] and
    [optimizer]; empty at first. Whole sections are in it, so that a new key of one is too."""
    return {}


def forget() -> None:
    """Lets go of the prices that a process keeps, for whoever changes a constant that they depend on."""
    _prices_of.cache_clear()


class Place(NamedTuple):
    """A stage and the pipeline rank that holds it (one of two where the stage has replicas)."""

    stage: int
    pp_rank: int


class CommunicationPricing:
    """What the actions of one plan send, worked out once per kind of stage."""

    def __init__(
        self,
        plan: Plan,
        *,
        gathers_scheduled: bool = False,
        shared: dict[tuple[object, ...], Any] | None = None,
        spreads: Spreads | None = None,
        expert_load: float = 1.0,
    ):
        """`gathers_scheduled` says that the schedule has UNSHARD actions; otherwise ZeRO-3
        gathers inside every F and B.

        `shared` may be passed to the pricings of plans that differ only in layout, batch, recompute, offload and
        schedule: what they have in common is then priced once. By default all such plans of the process share.
        `spreads` says how groups lie, if not as those of data-parallel rank 0 over whole links, and `expert_load` how
        many times the average the busiest experts have to do; their prices are shared with no others.
        """
        self.plan = plan
        self.profile = profile_of(plan)
        self._is_host = is_host(plan)
        # what else prices of a host depend on
        self._of_host = (plan.num_microbatches, rate_share(plan)) if self._is_host else ()
        self._gathers_scheduled = gathers_scheduled
        # Prices of this plan alone, by (kind, stage, replica).
        self._cache: dict[tuple[object, ...], Seconds] = {}
        self._expert_load = expert_load
        # By stage the pipeline ranks that hold it; two where stages have replicas.
        self._owners = plan.placement.ranks
        self._replicated = any(len(owners) > 1 for owners in self._owners)
        layout = plan.layout
        # Whether the backward of a stage adds to whole gradients or to shards that ZeRO has reduced.
        self._may_sum_shards = bool(self.profile.reduce_copy_bytes)
        self._sums_gradients = not (layout.zero >= 2 and self._may_sum_shards)
        # `_layers`, `_blocks`, `_copies` and `_shared` are parts of one table for all plans of a family: layers by what
        # each multiplies and sends, blocks by what a block is made of (and those without experts whatever the experts'
        # degrees), what copies of weights send by what and where these are, whatever a microbatch is and what is
        # recomputed, the rest by the whole layout too. Conditions of single ranks (links, load of experts) share
        # nothing.
        if spreads is not None or expert_load != 1:
            shared = {}
        elif shared is None:
            shared = _prices_of(
                plan.model,
                plan.cluster,
                self.profile,
                plan.data_parallel.shard,
                plan.precision,
                plan.numerics,
                plan.runtime,
                plan.train,
                plan.optimizer,
            )
            if len(shared) > MOST_SHARED:
                shared.clear()
        degrees = (layout.tp, layout.cp, layout.cp_inner, layout.ep, layout.etp)
        self._spreads = spreads or _spreads_of(plan, shared.setdefault(("spreads",), {}))
        layer_key = ("layers", layout.tp, layout.cp, layout.cp_inner, layout.sequence_parallel, plan.batch)
        self._layers: dict[object, Any] = shared.setdefault(layer_key, {})
        how = (layout.sequence_parallel, plan.batch, plan.recompute)
        widest = max(layout.tp, layout.expert_tp)  # which leaves admit
        dense_key = ("dense", layout.tp, layout.cp, layout.cp_inner, widest, *how)
        self._dense_blocks: dict[tuple[object, ...], Any] = shared.setdefault(dense_key, {})
        block_key = (*degrees, *how)
        self._blocks: dict[tuple[object, ...], Any] = shared.setdefault(block_key, {})
        copies_key = ("copies", layout, self._owners, plan.batch.sequence, len(plan.microbatch_counts))
        exact = plan.batch if plan.numerics.mode == "exact" else None  # then each copy sends nodes of its samples
        self._copies: dict[object, Any] = shared.setdefault((*copies_key, exact), {})
        whole_key = (block_key, layout, plan.offload, self._owners, gathers_scheduled)
        self._shared: dict[object, Any] = shared.setdefault(whole_key, {})
        # By stage its groups of equal layers; the axes over which layers communicate, those of
        # layers without experts first, and all axes.
        self._groups = [stage_groups(plan, stage) for stage in range(len(self._owners))]
        sizes = {"cp": layout.cp, "cp_inner": layout.cp_inner}
        dense = ("tp", *(axis for axis, size in sizes.items() if size > 1))
        self._dense_axes = (*dense, "cp_outer") if 1 < layout.cp_inner < layout.cp else dense
        inner = (*self._dense_axes, "ep") if layout.ep > 1 else self._dense_axes
        self._inner_axes = (*inner, "etp") if plan.model.is_moe else inner
        self._axes = (*self._inner_axes, "dp", "edp") if plan.model.is_moe else (*inner, "dp")
        # Seconds of a message by (sender, receiver), and the class of equal prices by stage.
        self._messages: dict[tuple[int, int], float] = {}
        self._price_classes: dict[Place, int] = {}
        self._weight_classes: dict[Place, int] = {}

    def spread(self, axis: str, place: Place) -> Spread:
        """How a group of a stage on its pipeline rank lies over nodes; axes are those of `core.program`."""
        return self._spreads.spread(axis, *place)

    def _num_buckets(self, place: Place) -> int:
        """Buckets of a stage's gradients."""
        key = ("buckets", self._groups[place.stage].weights)
        if key not in self._copies:
            self._copies[key] = num_buckets(self.plan, self.profile, place.stage)
        found: int = self._copies[key]
        return found

    def _tables_last(self, stage: int) -> float:
        """Share of a stage's parameters that wait for its last bucket because they are tables in 16 bits."""
        if not self.profile.fp8_tables_last or self.plan.precision.dtype != "fp8":
            return 0.0
        return table_share(self.plan, stage, self._elements(stage))

    def _message_work_s(self, place: Place) -> float:
        """Seconds that the messages of a pass, one in and one out for every neighbour on another rank, take from the
        work of a rank on a core of its own. With fewer cores than ranks messages are work themselves (`host_cores`)."""
        cluster = self.plan.cluster
        if shares_cores(cluster, self.plan.layout.world_size) or self.plan.layout.world_size < cluster.num_cores:
            return 0.0
        ends = sum(self._message_s(kind, place) > 0 for kind in (Kind.SEND_F, Kind.SEND_B))
        return ends * message_work_s(cluster, message_bytes(self.plan))

    def _price_class(self, kind: Kind, place: Place) -> object:
        """Equal for stages whose actions cost the same: they hold as many layers of each kind, on
        groups that are placed in the same way."""
        sending = self._sending_class(kind, place)
        hides = kind is Kind.STEP and self.profile.overlap_param_gather and self.plan.layout.zero in (1, 2)
        return (place.pp_rank, sending) if hides else sending

    def _sending_class(self, kind: Kind, place: Place) -> object:
        """Equal for stages whose actions send the same; what of it is hidden may differ."""
        if kind is not Kind.STEP:
            return self._stage_price_class(place)
        stages = rank_stages(self.plan, place.pp_rank)
        tied = bool(tied_ends(self.plan, place.pp_rank))
        return (tied, *(self._stage_price_class(Place(stage, place.pp_rank)) for stage in stages))

    def _stage_price_class(self, place: Place) -> int:
        if place not in self._price_classes:
            key = (composition(self._groups[place.stage]), self._stage_weight_class(place))
            numbers = self._shared.setdefault("price classes", {})
            self._price_classes[place] = numbers.setdefault(key, len(numbers))
        return self._price_classes[place]

    def _weight_class(self, kind: Kind, place: Place) -> object:
        """Equal for stages whose weights and gradients are sent in the same way by REDUCE_GRAD, UNSHARD or STEP."""
        if kind is not Kind.STEP:
            return self._stage_weight_class(place)
        stages = rank_stages(self.plan, place.pp_rank)
        tied = bool(tied_ends(self.plan, place.pp_rank))
        return (tied, *(self._stage_weight_class(Place(stage, place.pp_rank)) for stage in stages))

    def _stage_weight_class(self, place: Place) -> int:
        """Equal for stages that hold the same weights, on groups that are placed in the same way."""
        if place not in self._weight_classes:
            key: tuple[object, ...] = (self._groups[place.stage].weights, self._rank_spreads(place))
            if self._replicated:
                key = (*key, self.spread(copies_axis(self.plan, place.stage), place))
            numbers = self._copies.setdefault("weight classes", {})
            self._weight_classes[place] = numbers.setdefault(key, len(numbers))
        return self._weight_classes[place]

    def _rank_spreads(self, place: Place) -> tuple[Spread, ...]:
        """The spreads of the axes that do not depend on the stage, in the order of `_axes`."""
        return self._spreads.of_rank(self._axes, *place)

    def _inner_spreads(self, place: Place) -> tuple[Spread, ...]:
        """Those of the axes over which layers communicate."""
        return self._spreads.of_rank(self._inner_axes, *place)

    def _collective_s(self, operation: Collective, place: Place) -> float:
        spread = self.spread(operation.axis, place)
        if self.profile.dispatch_once and operation.axis == "ep" and operation.op == "all_to_all":
            share = distinct_share(
                spread.num_nodes if spread.num_nodes > 1 else spread.size, self.plan.model.experts_per_token
            )
            operation = replace(operation, sent_bytes=round(operation.sent_bytes * share))
        return collective_s(self.plan.cluster, spread, operation)

    def _communication(self, kind: Kind, place: Place) -> Seconds:
        """Seconds of the collectives of REDUCE_GRAD, UNSHARD or STEP."""
        key = ("communication", kind, self._weight_class(kind, place))
        if key not in self._copies:
            total, width = Seconds(), self.profile.gradient_bytes(self.plan.precision.dtype)
            replica = self.plan.placement.replica_of(*place)
            each = (
                reduce_microbatch(self.plan, place.stage)
                if kind is Kind.REDUCE_GRAD and not self.profile.reduces_by_program
                else ()
            )
            for operation in (*each, *operations(self.plan, kind, place.stage, replica=replica)):
                assert isinstance(operation, Collective)
                if kind is Kind.REDUCE_GRAD and COMPONENT_OF_AXIS[operation.axis] == "dp_comm":
                    operation = replace(operation, sent_bytes=operation.sent_bytes * width // gradient_bytes(self.plan))
                total += Seconds(**{COMPONENT_OF_AXIS[operation.axis]: self._collective_s(operation, place)})
            self._copies[key] = total
        found: Seconds = self._copies[key]
        return found

    def _after_microbatch_s(self, place: Place) -> float:
        """Seconds in which gradients are reduced after a microbatch, with ZeRO 2 and 3."""
        if not self.profile.reduces_by_program:
            return self._communication(Kind.REDUCE_GRAD, place).dp_comm
        key = ("after a microbatch", self._weight_class(Kind.REDUCE_GRAD, place))
        if key not in self._copies:
            sent = reduce_microbatch(self.plan, place.stage)
            self._copies[key] = sum(self._collective_s(operation, place) for operation in sent)
        found: float = self._copies[key]
        return found

    def _message_s(self, kind: Kind, place: Place) -> float:
        """Seconds of one message from a stage to its neighbour; 0 where there is none, or it lies on the same rank."""
        layout, replica = self.plan.layout, self.plan.placement.replica_of(*place)
        target = place.stage + (1 if kind is Kind.SEND_F else -1)
        if not 0 <= target < len(self._owners):
            return 0.0
        owners = self._owners[target]
        peer = owners[min(replica, len(owners) - 1)]
        if peer == place.pp_rank:
            return 0.0
        key = (place.pp_rank, peer)
        if key not in self._messages:
            ranks = (self._spreads.global_rank(place.pp_rank), self._spreads.global_rank(peer))
            num_bytes, gather_s = message_bytes(self.plan), 0.0
            if self.profile.scatter_gather and layout.tp > 1 and not layout.sequence_parallel:
                gather = Collective("", "all_gather", "tp", layout.tp, num_bytes * (layout.tp - 1) // layout.tp)
                num_bytes, gather_s = -(-num_bytes // layout.tp), self._collective_s(gather, place)
            self._messages[key] = gather_s + message_s(self._spreads.between(*key), *ranks, num_bytes, ranks=layout.pp)
        return self._messages[key]

    def _num_blocks(self, stage: int) -> int:
        return max(1, sum(group.count for group in self._groups[stage]))

    def _held(self, stage: int) -> Held:
        key = ("held", self._groups[stage].weights)
        if key not in self._copies:
            self._copies[key] = held_elements(self.plan, stage)
        found: Held = self._copies[key]
        return found

    def _elements(self, stage: int) -> int:
        return sum(self._held(stage))

    def _updated_elements(self, place: Place) -> float:
        """Elements that the optimizer of a pipeline rank updates: all it holds, or with ZeRO its part of them."""
        plan, stages = self.plan, rank_stages(self.plan, place.pp_rank)
        if not plan.layout.zero:
            return sum(map(self._elements, stages))
        pairs = (pair for stage in stages for pair in zip(self._held(stage), num_shards(plan, stage), strict=True))
        return sum(elements / parts for elements, parts in pairs)


def _spreads_of(plan: Plan, known: dict[tuple[object, ...], Spreads]) -> Spreads:
    """How groups lie, looked at once for all plans of the same degrees and placement; which ranks share a tied table,
    and its parts, is a matter of ZeRO too."""
    layout = plan.layout
    key = (
        layout.tp,
        layout.cp,
        layout.cp_inner,
        layout.ep,
        layout.etp,
        layout.dp,
        layout.pp,
        layout.zero,
        layout.order,
        plan.placement.ranks,
    )
    if key not in known:
        known[key] = Spreads(plan)
    return known[key]


def distinct_share(places: int, choices: int) -> float:
    """Distinct places that so many even choices hit on average, as a share of the choices."""
    return places * (1 - (1 - 1 / places) ** choices) / choices
