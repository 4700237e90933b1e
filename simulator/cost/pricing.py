"""What every action of a plan costs: blocks put together to stages, with what passes between ranks
and what hides behind what.

`blocks` prices layers, `traffic` holds their memory-bound kernels, `communication` what ranks send, `profiles` what a
stack runs at once. Modelled assumptions: tensor-parallel rank 0 (which holds the longest cut) and data-parallel rank 0
speak for their groups; experts are equally busy; an action takes the longer of its kernels and their launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import numpy as np

from ...core.program import (
    Collective,
    Group,
    composition,
    copies_axis,
    finish_sequences,
    group_ops,
    num_shards,
    operations,
    rank_stages,
)
from ...core.program.offload import piece_bytes
from ...core.schedule.action import Kind
from ..compute.compute import elementwise_s, host_s, slowed_s, traffic_s
from ..engine.attribution import Sort, Sorts
from ..engine.contention import Traffic
from ..engine.seconds import NOTHING, Seconds, on_grid
from ..memory.sizes import group_retained_bytes, stage_sizes
from ..stack.delayed_scaling import AMAX_CALLS, amax_reduction, update_s
from .blocks import COMPONENT_OF_AXIS, Block, BlockPricer, Part
from .communication import CommunicationPricing, Place
from .expert_load import loaded_traffic, loaded_work
from .graph_launches import LAYER_CALLS, sum_calls
from .host_blocks import host_block, host_check_s, host_flatten_s, host_step_s
from .host_cores import core_loads, skew_s
from .host_link import backward_wait_s, copies_under_work, forward_wait_s, update_wait_s
from .muon import muon, update_bytes
from .once_a_step import waited_s
from .shared_links import shared_links
from .traffic import group_traffic
from .zero import alone_s, shared_card_s, table_share, uncovered, units

OPTIMIZER_KERNELS = 12
"""Launches of a multi-tensor optimizer step. Modelled."""


PARTS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_gradient", Kind.W: "weight_gradient"}
"""Kind of action -> part of a block."""

DISPATCH_PROCESSORS = 32
"""Processors that DeepEP and HybridEP take for the exchange of tokens, and no more (Megatron-Bridge,
`moe_hybridep_num_sms`)."""


class GraphPrices(NamedTuple):
    """Prices of a graph's sorts of action, the duration of each action, and for reductions that run under the last
    backward of their stage `lead_s` and `tail_s` of the engine, and the links on which they meet messages (None where
    nothing leaves a node)."""

    prices: tuple[Seconds, ...]
    duration_s: np.ndarray
    overlap: dict[str, np.ndarray]
    links: Traffic | None


class Pricing(CommunicationPricing):
    """Prices of one plan, worked out once per kind of stage. `seconds(kind, stage)` is what every caller needs."""

    def unsharded(self, stage: int, replica: int = 0) -> tuple[Seconds, Seconds, Seconds]:
        """Forward, whole backward and split backward of a stage without what ZeRO sends inside them: no less than this
        is in `seconds` whatever the ZeRO stage."""
        place = Place(stage, self._owners[stage][replica])
        key = ("unsharded", composition(self._groups[stage]), self._inner_spreads(place), self._of_host)
        if key not in self._blocks:
            sums = not self._may_sum_shards
            forward, backward, *split = (
                self._work(kind, place, sums).on_grid() for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            self._blocks[key] = (forward, backward, split[0] + split[1])
        found: tuple[Seconds, Seconds, Seconds] = self._blocks[key]
        return found

    def group_s(self, group: Group, stage: int) -> float:
        """Seconds of a forward and a backward of one part of a group on a stage: its kernels, and what is exchanged
        inside it."""
        block = self._block(group, Place(stage, self._owners[stage][0]), not self._may_sum_shards)
        return block.forward.seconds.total_s + block.backward.seconds.total_s

    def blocks_of(self, stage: int) -> Iterator[tuple[Group, tuple[Seconds, Seconds, Seconds]]]:
        """The groups of a stage with the forward, whole backward and split backward of a part: its kernels, and what is
        exchanged inside it."""
        place = Place(stage, self._owners[stage][0])
        for group in self._groups[stage]:
            block = self._block(group, place, not self._may_sum_shards)
            split = block.input_gradient.seconds + block.weight_gradient.seconds
            yield group, (block.forward.seconds, block.backward.seconds, split)

    def inner_class(self, stage: int, replica: int = 0) -> object:
        """Equal for stages of which `unsharded` is the same."""
        return composition(self._groups[stage]), self._spreads.shift(self._owners[stage][replica])

    def price_class(self, kind: Kind, stage: int, replica: int = 0) -> object:
        """Equal for stages of which `seconds` of an action that is no message is the same."""
        place = Place(stage, self._owners[stage][replica])
        return place if self._is_host else self._price_class(kind, place)

    def sending_class(self, kind: Kind, stage: int, replica: int = 0) -> object:
        """Equal for stages whose actions are the same but for what other stages' work hides of them."""
        place = Place(stage, self._owners[stage][replica])
        return place if self._is_host else self._sending_class(kind, place)

    def even_spreads(self) -> object:
        """Equal for plans of the same degrees whose layers cost the same wherever they lie in a pipeline, but for what
        a microbatch is and what is recomputed; None where layers of one plan do not, or on a calibrated host."""
        if self._is_host or not self.is_placed_evenly():
            return None
        return self._spreads.of_rank(self._inner_axes, 0, 0)

    def is_placed_evenly(self) -> bool:
        """Whether the groups over which layers communicate are placed in the same way on all pipeline ranks."""
        first, *others = (self._spreads.of_rank(self._inner_axes, 0, pp_rank) for pp_rank in range(self.plan.layout.pp))
        return all(each == first for each in others)

    def reduction_s(self, stage: int, replica: int = 0) -> tuple[float, float, float]:
        """Seconds of a stage's REDUCE_GRAD, and its lead and tail (`reduction_overlap`)."""
        sort = Sort(Kind.REDUCE_GRAD, stage, -1, self._owners[stage][replica])
        return self.seconds(Kind.REDUCE_GRAD, stage, replica).total_s, *self.reduction_overlap(sort)

    def seconds(self, kind: Kind, stage: int, replica: int = 0) -> Seconds:
        """Seconds of one action on tensor- and data-parallel rank 0 of a stage's pipeline rank (of a
        replica's), on the grid."""
        place = Place(stage, self._owners[stage][replica])
        key = (kind, place.stage, place.pp_rank)
        if key not in self._cache:
            self._cache[key] = self._priced(kind, place)
        return self._cache[key]

    def price(self, sort: Sort) -> Seconds:
        """Seconds of a sort of action: as `seconds`, and of an overlapped pair."""
        replica_of = self.plan.placement.replica_of
        if sort.kind is not Kind.OVERLAP_F_B:
            return self.seconds(sort.kind, sort.stage, replica_of(sort.stage, sort.pp_rank))
        forward = self.seconds(Kind.F, sort.stage, replica_of(sort.stage, sort.pp_rank))
        return self._pair(forward, self.seconds(Kind.B, sort.pair_stage, replica_of(sort.pair_stage, sort.pp_rank)))

    def of_graph(self, sorts: Sorts) -> GraphPrices:
        """The prices of all actions of a graph."""
        if sorts not in self._shared:
            prices = tuple(self.price(sort) for sort in sorts.sorts)
            duration_s = np.array([seconds.total_s for seconds in prices])[sorts.of_action]
            overlap: dict[str, np.ndarray] = {}
            links = None
            if self.profile.overlap_grad_reduce:
                pairs = [
                    self.reduction_overlap(sort) if sort.kind is Kind.REDUCE_GRAD else (0.0, 0.0)
                    for sort in sorts.sorts
                ]
                overlap = dict(zip(("lead_s", "tail_s"), np.array(pairs).T[:, sorts.of_action], strict=True))
                links = shared_links(self.plan, sorts, prices)
            links = core_loads(self.plan, sorts, prices) or links
            self._shared[sorts] = GraphPrices(prices, duration_s, overlap, links)
        return self._shared[sorts]

    def _pair(self, forward: Seconds, backward: Seconds) -> Seconds:
        """A forward and a backward together: exchanges of tokens between experts in one hide behind the other's
        computation (DeepSeek-V3, arXiv 2412.19437, section 3.2.1)."""
        both = forward + backward
        if self.profile.overlaps_in_pairs == "asked" and not self.profile.expert_overlap:
            return both  # one after the other
        hidden_s, compute_s = both.ep_comm, both.compute + both.recompute
        if not hidden_s:
            return both
        units = self.plan.cluster.num_compute_units
        share = (
            max(1 - DISPATCH_PROCESSORS / units, self.plan.cluster.overlap_compute_share)
            if self.profile.dispatch_once
            else None
        )
        exposed_s = max(slowed_s(self.plan.cluster, compute_s, hidden_s, share=share), hidden_s) - compute_s
        return (both + Seconds(ep_comm=min(exposed_s - hidden_s, 0.0))).on_grid()

    def _paired(self, work: Seconds, place: Place) -> Seconds:
        """A forward or backward that overlaps with the other of another microbatch, where a stack does that without a
        schedule that says so: what remains of the pair's exchanges is shared out by their lengths (Megatron-Core,
        `--overlap-moe-expert-parallel-comm`)."""
        if not self.profile.expert_overlap or self.profile.overlaps_in_pairs == "asked" or not work.ep_comm:
            return work
        forward, backward = self._stage(place, "forward"), self._stage(place, "backward")
        share = self._pair(forward, backward).ep_comm / (forward.ep_comm + backward.ep_comm)
        return work + Seconds(ep_comm=work.ep_comm * (share - 1))

    def reduction_overlap(self, sort: Sort) -> tuple[float, float]:
        """(lead, tail) of a REDUCE_GRAD: how long before the end of its stage's last backward it may start, and how
        long after that at least one bucket remains; (0, 0) where a stack reduces after the backward.

        Buckets fill one by one during the last backward, and the last is full when it ends (Li et al. 2020, PyTorch
        distributed, section 3.2.3). What the backward loses while the reduction overlaps with it is put at the end.
        """
        replica = self.plan.placement.replica_of(sort.stage, sort.pp_rank)
        reduce_s = self.seconds(Kind.REDUCE_GRAD, sort.stage, replica).total_s
        if not self.profile.overlap_grad_reduce or self.plan.layout.zero >= 2 or not reduce_s:
            return 0.0, 0.0
        place = Place(sort.stage, sort.pp_rank)
        early, backward = (
            1 - max(1 / self._num_buckets(place), self._tables_last(place.stage)),
            self.seconds(Kind.B, sort.stage, replica),
        )
        covering_s = backward.total_s * early
        hidden_s = min(covering_s, reduce_s * early)
        lost_s = slowed_s(self.plan.cluster, covering_s, hidden_s) - covering_s
        lost_s += shared_card_s(self._crossing_s(backward, place) * early, covering_s, hidden_s)
        return on_grid(covering_s), on_grid(reduce_s * (1 - early) + lost_s)

    def _priced(self, kind: Kind, place: Place) -> Seconds:
        if kind in (Kind.SEND_F, Kind.SEND_B):
            return Seconds(pp_comm=on_grid(self._message_s(kind, place)))
        key = (kind, self._price_class(kind, place))
        if key not in self._shared:
            self._shared[key] = self._price(kind, place).on_grid()
        found: Seconds = self._shared[key]
        if self._is_host and kind in (Kind.F, Kind.B, Kind.I):
            found += Seconds(pp_comm=on_grid(self._message_work_s(place)))
        return found

    def _work(self, kind: Kind, place: Place, sums_gradients: bool) -> Seconds:
        """A pass of a stage without what ZeRO sends inside it."""
        work = self._stage(place, PARTS[kind], sums_gradients)
        if kind in (Kind.B, Kind.W):
            finishing_s = sum(
                self._collective_s(operation, place) for operation in finish_sequences(self.plan, place.stage)
            )
            work += Seconds(cp_comm=finishing_s)
        return self._paired(work, place) if kind in (Kind.F, Kind.B) else work

    def _price(self, kind: Kind, place: Place) -> Seconds:
        match kind:
            case Kind.F | Kind.B | Kind.I | Kind.W:
                reduces, work = kind in (Kind.B, Kind.W), self._work(kind, place, self._sums_gradients)
                if self._agrees and kind is not Kind.W:
                    work += self._agreeing(place, backward=kind is not Kind.F)
                if self.plan.offload.activations and kind is not Kind.W:
                    work += Seconds(other=self._host_link_s(kind, place))
                return self._with_sharding(
                    work, place, gathers=kind is not Kind.W, reduces=reduces, backward=kind is not Kind.F
                )
            case Kind.REDUCE_GRAD:
                return NOTHING if self._reduces_in_step else self._reduction(place)
            case Kind.UNSHARD:
                return self._communication(kind, place)
            case Kind.STEP:
                return self._step(place)
            case _:
                return NOTHING

    @property
    def _agrees(self) -> bool:
        """True where ranks agree on the magnitudes of fp8 operands after every pass (`delayed_scaling`)."""
        return self.profile.amax_reduction != "none" and self.plan.precision.dtype == "fp8"

    def _agreeing(self, place: Place, *, backward: bool) -> Seconds:
        """What that takes a device after a pass."""
        ranks = self.profile.amax_reduction
        assert ranks != "none"
        num_layers = sum(map(self._num_blocks, rank_stages(self.plan, place.pp_rank)))
        operation = amax_reduction(self.plan, ranks, num_layers, backward=backward)
        component = COMPONENT_OF_AXIS[operation.axis]
        return Seconds(compute=update_s(self.plan.cluster), **{component: self._collective_s(operation, place)})

    @property
    def _reduces_in_step(self) -> bool:
        """True where a stack reduces all gradients at once when its rank has finished every microbatch."""
        return self.profile.reduces_last and not self.profile.overlap_grad_reduce and self.plan.layout.zero < 2

    def _reduction(self, place: Place) -> Seconds:
        """The gradients of a stage; with ZeRO 2 and 3 only those of the last block are left, the others hid
        in the last backward."""
        seconds = self._communication(Kind.REDUCE_GRAD, place)
        if self._is_host:
            flatten_s = host_flatten_s(self.plan, self._elements(place.stage)) if seconds.total_s else 0.0
            seconds += Seconds(other=host_check_s(self.plan, place.stage) + flatten_s)
        hides = self.plan.layout.zero >= 2 and not self.profile.reduces_by_program
        return Seconds(dp_comm=seconds.total_s / (self._num_blocks(place.stage) if hides else 1))

    def _stage(self, place: Place, part: str, sums_gradients: bool = True) -> Seconds:
        """One part of all blocks of a stage; what the host takes longer to launch it than the device to run it is
        `other`; all of it where the host waits for every kernel."""
        total = Part()
        for group in self._groups[place.stage]:
            own: Part = getattr(self._block(group, place, sums_gradients), part)
            total += self._launched(own, group, part).times(group.count)
        if self._agrees and part != PARTS[Kind.W]:
            total += Part(num_kernels=AMAX_CALLS)
        if self.profile.engine_share:
            total += Part(Seconds(other=self.profile.engine_share * total.seconds.total_s))
        if (self.profile.cuda_graphs and self.profile.graph_scope == "step") or self._is_host:
            return total.seconds
        launching_s = host_s(self.plan.cluster, total.num_kernels) * self.profile.host_calls
        waited_s = launching_s if self.profile.launch_blocking else launching_s - total.seconds.total_s
        return total.seconds + Seconds(other=waited_s) if waited_s > 0 else total.seconds

    def _launched(self, part: Part, group: Group, name: str) -> Part:
        """A part of a block with the launches that are left where layers are graphs: what comes in is copied to where
        the graph reads it, and the graph launched; W takes nothing. Our backend adds weight gradients to their sums
        after that. Embedding, head and layers with experts, of which graphs hold some kernels at most, are launched as
        without."""
        graphed = self.profile.cuda_graphs and self.profile.graph_scope == "layer"
        if not graphed or group.kind != "layer" or group.has_experts:
            return part
        calls = 1 if name == PARTS[Kind.W] else LAYER_CALLS
        if self.profile.reduces_by_program and name in (PARTS[Kind.B], PARTS[Kind.W]):
            calls += sum_calls(self.plan.model, group)
        return Part(part.seconds, calls / self.profile.host_calls)

    def _host_link_s(self, kind: Kind, place: Place) -> float:
        """What a pass waits for copies to or from host memory."""
        cluster, parts = self.plan.cluster, list[tuple[float, float]]()
        for group in self._groups[place.stage]:
            copy_s = group_retained_bytes(self.plan, group) / cluster.host_link_bytes_per_s if group.offloaded else 0.0
            work_s = getattr(self._block(group, place, self._sums_gradients), PARTS[kind]).seconds.total_s
            parts += [(work_s, copy_s)] * group.count
        if not copies_under_work(cluster):
            return sum(copy_s for _, copy_s in parts)
        return forward_wait_s(parts) if kind is Kind.F else backward_wait_s(parts)

    def _block(self, group: Group, place: Place, sums_gradients: bool = True) -> Block:
        dense = not (group.has_experts or self._is_host)
        blocks = self._dense_blocks if dense else self._blocks
        spreads = self._spreads.of_rank(self._dense_axes, *place) if dense else self._inner_spreads(place)
        key: tuple[object, ...] = (group.part, sums_gradients, spreads, self._of_host)
        if key not in blocks:
            blocks[key] = self._price_block(group, place, sums_gradients)
        found: Block = blocks[key]
        return found

    def _price_block(self, group: Group, place: Place, sums_gradients: bool) -> Block:
        plan = self.plan
        if self._is_host:
            return host_block(plan, group, lambda operation: self._collective_s(operation, place))
        pricer = BlockPricer(
            plan,
            self.profile,
            lambda operation: self._collective_s(operation, place),
            sums_gradients,
            lambda axis: self.spread(axis, place),
            self._layers,
        )
        works, pieces = group_ops(plan, group), group_traffic(plan, self.profile, group)
        works, pieces = loaded_work(works, self._expert_load), loaded_traffic(pieces, self._expert_load)
        return pricer.block(works, pieces, recomputes_all=group.recomputed)

    def _with_sharding(self, work: Seconds, place: Place, *, gathers: bool, reduces: bool, backward: bool) -> Seconds:
        """Adds what ZeRO-2 and 3 communicate inside a forward or backward, layer by layer during the computation of the
        next layer, and the copies around it.

        ZeRO-3 gathers weights before every forward and every backward (Rajbhandari et al. 2020, section 7.2.2), ZeRO-2
        and 3 reduce gradients after every backward. What does not hide, and the one unit that has no neighbour to hide
        behind (a layer, or the tables, gathered first and reduced last), is exposed.
        """
        zero, communicated_s, reduce_s = self.plan.layout.zero, 0.0, 0.0
        if zero == 3 and gathers and not self._gathers_scheduled:
            communicated_s += self._communication(Kind.UNSHARD, place).total_s
        if zero >= 2 and reduces and self.profile.reduces_by_program and not self.profile.overlap_grad_reduce:
            work += Seconds(dp_comm=self._after_microbatch_s(place))
        elif zero >= 2 and reduces:
            reduce_s = self._after_microbatch_s(place)
            communicated_s += reduce_s
        if not communicated_s:
            return work
        copied = (gathers and zero == 3) * self.profile.gather_copy_bytes + reduces * self.profile.reduce_copies(
            self.plan.precision.dtype
        )
        if copied:
            work += Seconds(other=traffic_s(self.plan.cluster, copied * self._elements(place.stage)))
        if self.profile.gathers_by_tensor:
            return work + self._by_tensor(place, communicated_s, gathers=gathers, reduces=reduces)
        uncovered_s = 0.0
        if self.profile.gather_ahead_elements < inf:
            uncovered_s = self._uncovered_s(place, communicated_s - reduce_s, reduce_s, backward=backward)
            communicated_s -= uncovered_s
        first = (
            table_share(self.plan, place.stage, self._elements(place.stage))
            if self.profile.tables_in_one_gather
            else 0.0
        )
        covered = 1 - max(1 / self._num_blocks(place.stage), first)
        covering_s, hidden_s = work.total_s * covered, communicated_s * covered
        if crossing_s := self._crossing_s(work, place) * covered:
            work += Seconds(dp_comm=shared_card_s(crossing_s, covering_s, hidden_s))
            covering_s = work.total_s * covered
        exposed_s = max(slowed_s(self.plan.cluster, covering_s, hidden_s), hidden_s) - covering_s
        return work + Seconds(dp_comm=uncovered_s + communicated_s - hidden_s + exposed_s)

    def _crossing_s(self, work: Seconds, place: Place) -> float:
        """Seconds of a pass in which tokens are exchanged between nodes, between which its weights are sent too; 0 for
        a stack that hides the exchanges, of which only what is left is known."""
        plan = self.plan
        if plan.layout.ep == 1 or self.profile.expert_overlap or self.spread("ep", place).num_nodes == 1:
            return 0.0
        return work.ep_comm if self.spread(copies_axis(plan, place.stage), place).num_nodes > 1 else 0.0

    def _uncovered_s(self, place: Place, gather_s: float, reduce_s: float, *, backward: bool) -> float:
        """Seconds of what ZeRO-2 and 3 communicate in a pass over a stage's blocks that overlap
        with nothing (`zero.uncovered`)."""
        plan, expert_s = self.plan, 0.0
        alone = uncovered(plan, self.profile, units(plan, place.stage, self._held(place.stage)), backward=backward)
        if gather_s and plan.layout.ep > 1:
            gathers = (each for each in operations(plan, Kind.UNSHARD, place.stage) if isinstance(each, Collective))
            expert_s = sum(self._collective_s(each, place) for each in gathers if each.axis == "edp")
        return alone.dense * (gather_s - expert_s) + alone.expert * expert_s + alone.reduced * reduce_s

    def _by_tensor(self, place: Place, communicated_s: float, *, gathers: bool, reduces: bool) -> Seconds:
        """What ZeRO-3 communicates when every tensor goes alone and nothing overlaps with it; what is computed again
        gathers again. `communicated_s` is what all tensors take as one."""
        again = reduces and gathers and self.plan.recompute.mode == "full"
        if again:
            communicated_s += self._communication(Kind.UNSHARD, place).total_s
        size = num_shards(self.plan, place.stage).dense
        ring_s = self._collective_s(
            Collective("", "all_gather", copies_axis(self.plan, place.stage), size, size), place
        )
        return Seconds(dp_comm=communicated_s + (gathers + reduces + again) * alone_s(self.plan, place.stage, ring_s))

    def _step(self, place: Place) -> Seconds:
        plan, stages = self.plan, rank_stages(self.plan, place.pp_rank)
        num_bytes = self._updated_elements(place) * update_bytes(plan, stages, self.profile.optimizer_bytes)
        # every rank casts the weights that it holds
        if plan.precision.dtype == "fp8" and self.profile.casts.once_a_step:
            num_bytes += self.profile.casts.input_bytes * sum(map(self._elements, stages))
        optimizer_s = (
            host_step_s(plan, stages) if self._is_host else elementwise_s(plan.cluster, num_bytes, OPTIMIZER_KERNELS)
        )
        update = Seconds(optimizer=optimizer_s)
        if plan.optimizer.name == "muon":
            update += muon(plan, stages, lambda operation: self._collective_s(operation, place))
        communicated = self._communication(Kind.STEP, place)
        if self.profile.overlap_param_gather and plan.layout.zero in (1, 2):
            communicated += Seconds(dp_comm=-self._hidden_gather_s(place, communicated.dp_comm))
        if self._reduces_in_step:
            for stage in stages:
                communicated += self._reduction(Place(stage, place.pp_rank))
        waited_s = self._waited_s(stages) + self._skew_s(stages)
        if plan.offload.optimizer:
            away = sum(stage_sizes(plan)[stage].offloaded_optimizer_bytes for stage in stages)
            piece = piece_bytes(plan.optimizer, masters=plan.offload.masters)
            waited_s += update_wait_s(plan.cluster, away, optimizer_s * plan.offload.optimizer, piece)
        return update + communicated + Seconds(other=waited_s)

    def _skew_s(self, stages: tuple[int, ...]) -> float:
        """What replicas and pipeline ranks of a calibrated host wait for each other in a step, who meet once."""
        layout = self.plan.layout
        if not self._is_host or layout.dp * layout.pp == 1:
            return 0.0
        passes = (self.seconds(kind, stage).compute for stage in stages for kind in (Kind.F, Kind.B))
        return skew_s(self.plan, sum(passes) * self.plan.num_microbatches)

    def _waited_s(self, stages: tuple[int, ...]) -> float:
        """What the device waits for the host once a step."""
        if not (self.profile.check_gradients or self.profile.optimizer_by_tensor):
            return 0.0
        total_s = 0.0
        for stage in stages:
            key = ("waited", self._groups[stage].weights)
            if key not in self._copies:
                self._copies[key] = waited_s(self.plan, self.profile, stage)
            total_s += self._copies[key]
        return total_s

    def _hidden_gather_s(self, place: Place, gather_s: float) -> float:
        """Seconds of the weight gather of ZeRO 1 and 2 that run under the next step's first forwards, and before a
        later pipeline rank's first forward, which the lower stages delay. The first bucket is exposed, and what
        compute loses meanwhile."""
        stages = rank_stages(self.plan, place.pp_rank)
        waited_s = sum(self.seconds(Kind.F, stage).total_s for stage in range(min(stages)))
        forwards = [(self.seconds(Kind.F, stage), Place(stage, place.pp_rank)) for stage in stages]
        under_s = sum(forward.total_s for forward, _ in forwards)
        buckets = sum(self._num_buckets(Place(stage, place.pp_rank)) for stage in stages)
        tables = self._tables_last(stages[0]) * self._elements(stages[0]) / sum(map(self._elements, stages))
        first_s = gather_s * max(1 / buckets, tables)
        covering_s = max(0.0, gather_s - first_s - waited_s)
        longer_s = shared_card_s(sum(self._crossing_s(*each) for each in forwards), under_s, min(under_s, covering_s))
        exposed_s = max(slowed_s(self.plan.cluster, under_s + longer_s, min(under_s, covering_s)), covering_s) - under_s
        return gather_s - max(0.0, first_s - waited_s) - exposed_s
