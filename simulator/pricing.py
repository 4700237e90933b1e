"""What every action of a plan costs: the operations of `core.program`, priced by the roofline and the network model.

Beside products and collectives, memory-bound work is priced by its traffic (`_layer_traffic` and below). Attention is one fused
kernel that skips the masked half of the square. Modelled assumptions that later versions refine: efficiencies do not depend on
shapes, tensor-parallel collectives overlap with nothing, and tensor-parallel rank 0 (which holds the longest cut) speaks for its group.
So an overlapped pair takes as long as its forward and its backward: what it could hide is the all-to-all of experts, and models are
dense so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ..core.action import Kind
from ..core.errors import PlanError
from ..core.parameters import layer_parameters
from ..core.plan import Plan
from ..core.program import (
    Collective,
    LayerWork,
    Message,
    Operation,
    Product,
    copies_axis,
    embedding_work,
    head_work,
    local_elements,
    operations,
    rank_stages,
    stage_elements,
    tied_ends,
    transformer_work,
)
from .compute import ELEMENT_BYTES, elementwise_s, product_s, traffic_s
from .network import Spread, collective_s, message_s, spread_of

GRID = 2.0**40
"""Prices are rounded to 1/GRID seconds (0.9 ps), so that sums of them are exact in float64 up to 8,192 s, in any order."""

ATTENTION_EFFICIENCY = 0.55
"""Share of the peak that a fused attention kernel reaches, forward and backward: within the 50-73% that Dao 2023 (FlashAttention-2,
section 4.1) measures on an A100 with head dim 128. Modelled: taken for every device."""

RECOMPUTED_SCORES = 5 / 4
"""A fused attention backward runs five products per head where the mathematics needs four: it computes the scores again (Dao et al.
2022, algorithm 4)."""

CAUSAL_SHARE = 0.5
"""Share of the score square that a causal kernel computes."""

OPTIMIZER_BYTES = 40
"""fp32 traffic per element of an AdamW step with clipping: gradient read for the norm, then gradient, master weight and two moments
read, the latter three written, and the gradient cleared; the low-precision weight comes on top."""

OPTIMIZER_KERNELS = 12
"""Launches of a multi-tensor optimizer step. Modelled."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of an action by the components of `time_s` of the report."""

    compute: float = 0.0
    recompute: float = 0.0
    tp_comm: float = 0.0
    dp_comm: float = 0.0
    pp_comm: float = 0.0
    optimizer: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in COMPONENTS))

    def times(self, count: int) -> Seconds:
        """The same work `count` times."""
        return Seconds(*(getattr(self, name) * count for name in COMPONENTS))

    def on_grid(self) -> Seconds:
        """Every component rounded to the grid."""
        return Seconds(*(on_grid(getattr(self, name)) for name in COMPONENTS))

    @property
    def total_s(self) -> float:
        """The action's duration."""
        return self.compute + self.recompute + self.tp_comm + self.dp_comm + self.pp_comm + self.optimizer


COMPONENTS = tuple(field.name for field in fields(Seconds))


def on_grid(seconds: float) -> float:
    """Seconds rounded to the grid on which sums are exact. Raises `PlanError` for a duration that is no finite number."""
    if not math.isfinite(seconds * GRID):
        raise PlanError("an action takes longer than can be counted. Use larger rates in [cluster], or a smaller model and batch.")
    return round(seconds * GRID) / GRID


@dataclass(frozen=True)
class Block:
    """Seconds of one block (a transformer layer, the embedding or the head) by action kind: F, I and W; B is I and W."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds


class Place(NamedTuple):
    """A stage and the pipeline rank that holds it (one of two where the stage has replicas)."""

    stage: int
    pp_rank: int


class Pricing:
    """Prices of one plan, worked out once per kind of stage. `seconds(kind, stage)` is what every caller needs."""

    def __init__(self, plan: Plan, *, gathers_scheduled: bool = False, shared: dict[tuple[object, ...], Any] | None = None):
        """`gathers_scheduled` says that the schedule has UNSHARD actions; otherwise ZeRO-3 gathers inside every F and B.

        `shared` may be passed to the pricings of plans that differ only in layout, microbatch, recompute and schedule: what they
        have in common is then priced once.
        """
        self.plan = plan
        self._gathers_scheduled = gathers_scheduled
        self._cache: dict[tuple[object, ...], Seconds] = {}
        self._spreads: dict[tuple[str, object], Spread] = {}
        self._owners = plan.placement.ranks
        self._replicated = any(len(owners) > 1 for owners in self._owners)
        self._shared = {} if shared is None else shared
        layout = plan.layout
        self._block_key = (layout.tp, layout.sequence_parallel, plan.batch.micro_size, plan.recompute.mode)
        kind = plan.placement.kind
        self._group_key = (layout.tp, layout.dp, layout.pp, layout.vpp, layout.zero, layout.sequence_parallel, layout.order, kind)

    def seconds(self, kind: Kind, stage: int, replica: int = 0) -> Seconds:
        """Seconds of one action on tensor- and data-parallel rank 0 of a stage's pipeline rank (of a replica's), on the grid."""
        place = Place(stage, self._owners[stage][replica])
        if kind in (Kind.SEND_F, Kind.SEND_B):
            key: tuple[object, ...] = (kind, place)
        else:
            key = (kind, *self._likeness(kind, place))
        if key not in self._cache:
            self._cache[key] = self._price(kind, place).on_grid()
        return self._cache[key]

    def _likeness(self, kind: Kind, place: Place) -> tuple[object, ...]:
        """Equal for stages whose actions cost the same: they hold as many layers, on groups that lie alike."""
        stages = rank_stages(self.plan, place.pp_rank) if kind is Kind.STEP else (place.stage,)
        contents = [(len(content.layers), content.embedding, content.head) for content in (self.plan.stages[s] for s in stages)]
        alike = (*contents, self.spread("tp", place), self.spread("dp", place))
        if not self._replicated:
            return alike
        copies = [self.spread(copies_axis(self.plan, stage), Place(stage, place.pp_rank)) for stage in stages]
        return (*alike, *copies, kind is Kind.STEP and bool(tied_ends(self.plan, place.pp_rank)))

    def table(self, replica: int = 0) -> np.ndarray:
        """[kinds, stages] -> duration in seconds; OVERLAP_F_B is left at zero because it names two stages.

        `replica` 1 prices the second replica of the stages that have one.
        """
        table = np.zeros((len(Kind), len(self._owners)))
        for kind in _PRICED:
            for stage, owners in enumerate(self._owners):
                table[kind, stage] = self.seconds(kind, stage, min(replica, len(owners) - 1)).total_s
        return table

    def spread(self, axis: str, place: Place) -> Spread:
        """How a group of a stage on its pipeline rank lies over nodes.

        Axes are `tp`, `dp`, `replica` (dp and the stage's pipeline replicas), `model` (tp and pp) and `embedding` (first and last).
        """
        key = (axis, place if axis == "replica" else place.pp_rank)
        if key not in self._spreads:
            self._spreads[key] = spread_of(self.plan.cluster, self._group(axis, place).tolist())
        return self._spreads[key]

    def _group(self, axis: str, place: Place) -> np.ndarray:
        layout = self.plan.layout
        here = layout.global_rank(pp=place.pp_rank)
        stride = {name: layout.global_rank(**{name: 1}) for name in ("tp", "dp", "pp")}
        match axis:
            case "embedding":
                return np.array(tied_ends(self.plan, place.pp_rank)) * stride["pp"]
            case "replica":
                return np.add.outer(np.arange(layout.dp) * stride["dp"], np.array(self._owners[place.stage]) * stride["pp"]).ravel()
            case "model":
                return np.add.outer(np.arange(layout.pp) * stride["pp"], np.arange(layout.tp) * stride["tp"]).ravel()
            case _:
                return here + np.arange(layout.sizes[axis]) * stride[axis]

    def _price(self, kind: Kind, place: Place) -> Seconds:
        match kind:
            case Kind.F:
                return self._with_sharding(self._stage(place, ("forward",)), place, gathers=True, reduces=False)
            case Kind.B:
                work = self._stage(place, ("input_gradient", "weight_gradient"))
                return self._with_sharding(work, place, gathers=True, reduces=True)
            case Kind.I:
                return self._with_sharding(self._stage(place, ("input_gradient",)), place, gathers=True, reduces=False)
            case Kind.W:
                return self._with_sharding(self._stage(place, ("weight_gradient",)), place, gathers=False, reduces=True)
            case Kind.SEND_F | Kind.SEND_B:
                return Seconds(pp_comm=self._send_s(kind, place))
            case Kind.REDUCE_GRAD:
                seconds = self._communication(kind, place)
                return Seconds(dp_comm=seconds.total_s / (self._num_blocks(place.stage) if self.plan.layout.zero >= 2 else 1))
            case Kind.UNSHARD:
                return self._communication(kind, place)
            case Kind.STEP:
                return self._step(place)
            case _:
                return Seconds()

    def _stage(self, place: Place, parts: tuple[str, ...]) -> Seconds:
        content = self.plan.stages[place.stage]
        counts = {"layer": len(content.layers), "embedding": int(content.embedding), "head": int(content.head)}
        total = Seconds()
        for name, count in counts.items():
            if count:
                block = self._block(name, place)
                for part in parts:
                    total += getattr(block, part).times(count)
        return total

    def _block(self, name: str, place: Place) -> Block:
        key = (name, self.spread("tp", place), *self._block_key)
        if key not in self._shared:
            plan = self.plan
            match name:
                case "layer":
                    works, traffic = transformer_work(plan, 0), _layer_traffic(plan)
                case "embedding":
                    works, traffic = (embedding_work(plan),), _embedding_traffic(plan)
                case _:
                    works, traffic = head_work(plan), _head_traffic(plan)
            self._shared[key] = self._price_block(works, traffic, place)
        return self._shared[key]

    def _price_block(self, works: tuple[LayerWork, ...], traffic: _Traffic, place: Place) -> Block:
        cluster = self.plan.cluster
        forward_s = elementwise_s(cluster, traffic.forward_bytes, traffic.forward_kernels)
        recomputes_all = all(work.recomputed == work.forward for work in works) and self.plan.recompute.mode == "full"
        return Block(
            forward=self._work((op for work in works for op in work.forward), place) + Seconds(compute=forward_s),
            input_gradient=self._work((op for work in works for op in work.input_gradient), place)
            + Seconds(compute=elementwise_s(cluster, traffic.backward_bytes, traffic.backward_kernels))
            + self._recompute((op for work in works for op in work.recomputed), place)
            + Seconds(recompute=forward_s if recomputes_all else 0.0),
            weight_gradient=self._work((op for work in works for op in work.weight_gradient), place)
            + Seconds(compute=traffic_s(cluster, traffic.gradient_bytes)),
        )

    def _work(self, found: Iterable[Operation], place: Place) -> Seconds:
        total = Seconds()
        core: list[Product] = []
        for operation in found:
            match operation:
                case Product() if operation.layer.endswith("attention.core"):
                    core.append(operation)
                case Product():
                    total += Seconds(compute=product_s(self.plan.cluster, self.plan.precision.dtype, operation))
                case Collective():
                    total += self._collective(operation, place)
                case Message():
                    raise AssertionError("layers send no messages of their own")
        return total + Seconds(compute=self._attention_s(core)) if core else total

    def _recompute(self, found: Iterable[Operation], place: Place) -> Seconds:
        """Products count as recompute, their collectives as communication."""
        seconds = self._work(found, place)
        return Seconds(recompute=seconds.compute, tp_comm=seconds.tp_comm)

    def _attention_s(self, products: list[Product]) -> float:
        """One fused kernel: arithmetic of the unmasked half, or reading and writing the [s, d] operands, whichever is longer."""
        cluster, plan = self.plan.cluster, self.plan
        backward = sum(product.count for product in products) > 2 * products[0].count
        flops = sum(product.flops for product in products) * CAUSAL_SHARE * (RECOMPUTED_SCORES if backward else 1)
        # fp8 recipes keep attention in 16 bits.
        peak = cluster.peak_flops_per_s["bf16" if plan.precision.dtype == "fp8" else plan.precision.dtype]
        operands = 2 * sum(product.count for product in products)
        num_bytes = operands * plan.batch.sequence * plan.model.head_dim * ELEMENT_BYTES[plan.precision.dtype]
        return max(flops / (peak * ATTENTION_EFFICIENCY), traffic_s(cluster, num_bytes)) + cluster.kernel_launch_s

    def _collective(self, operation: Collective, place: Place) -> Seconds:
        seconds = collective_s(self.plan.cluster, self.spread(operation.axis, place), operation)
        return Seconds(**{_COMPONENT_OF_AXIS[operation.axis]: seconds})

    def _communication(self, kind: Kind, place: Place) -> Seconds:
        """Seconds of the collectives of REDUCE_GRAD, UNSHARD or STEP."""
        key = (kind, *self._likeness(kind, place), *self._group_key)
        if key not in self._shared:
            total = Seconds()
            replica = self.plan.placement.replica_of(*place)
            for operation in operations(self.plan, kind, place.stage, replica=replica):
                assert isinstance(operation, Collective)
                total += self._collective(operation, place)
            self._shared[key] = total
        return self._shared[key]

    def _send_s(self, kind: Kind, place: Place) -> float:
        layout, replica = self.plan.layout, self.plan.placement.replica_of(*place)
        target = place.stage + (1 if kind is Kind.SEND_F else -1)
        if not 0 <= target < len(self._owners):
            return 0.0
        owners = self._owners[target]
        peer = owners[min(replica, len(owners) - 1)]
        if peer == place.pp_rank:
            return 0.0
        (message,) = operations(self.plan, kind, place.stage)
        assert isinstance(message, Message)
        ranks = (layout.global_rank(pp=place.pp_rank), layout.global_rank(pp=peer))
        return message_s(self.plan.cluster, *ranks, message.num_bytes)

    def _num_blocks(self, stage: int) -> int:
        content = self.plan.stages[stage]
        return max(1, len(content.layers) + content.embedding + content.head)

    def _with_sharding(self, work: Seconds, place: Place, *, gathers: bool, reduces: bool) -> Seconds:
        """Adds what ZeRO-2 and 3 communicate inside a forward or backward, layer by layer beside the computation of the next layer.

        ZeRO-3 gathers weights before every forward and every backward (Rajbhandari et al. 2020, section 7.2.2), ZeRO-2 and 3 reduce
        gradients after every backward. What does not hide, and the one layer that has no neighbour to hide behind, is exposed.
        """
        zero, communicated_s = self.plan.layout.zero, 0.0
        if zero == 3 and gathers and not self._gathers_scheduled:
            communicated_s += self._communication(Kind.UNSHARD, place).total_s
        if zero >= 2 and reduces:
            communicated_s += self._communication(Kind.REDUCE_GRAD, place).dp_comm
        if not communicated_s:
            return work
        blocks = self._num_blocks(place.stage)
        hidden_s = min(communicated_s * (blocks - 1) / blocks, work.total_s * (blocks - 1) / blocks)
        return work + Seconds(dp_comm=communicated_s - hidden_s)

    def _updated_elements(self, place: Place) -> float:
        """Elements that the optimizer of a pipeline rank updates: all it holds, or with ZeRO its part of each stage's copies."""
        stages = rank_stages(self.plan, place.pp_rank)
        key = ("elements", self.plan.layout.tp, *self._likeness(Kind.STEP, place))
        if key not in self._shared:
            self._shared[key] = [stage_elements(self.plan, stage) for stage in stages]
        copies = [self.plan.num_copies(stage) if self.plan.layout.zero else 1 for stage in stages]
        return sum(elements / parts for elements, parts in zip(self._shared[key], copies, strict=True))

    def _step(self, place: Place) -> Seconds:
        plan = self.plan
        num_bytes_each = OPTIMIZER_BYTES + (0 if plan.precision.dtype == "fp32" else ELEMENT_BYTES[plan.precision.dtype])
        num_bytes = self._updated_elements(place) * num_bytes_each
        update = Seconds(optimizer=elementwise_s(plan.cluster, num_bytes, OPTIMIZER_KERNELS))
        return update + self._communication(Kind.STEP, place)


_PRICED = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.STEP)
_COMPONENT_OF_AXIS = {"tp": "tp_comm", "dp": "dp_comm", "replica": "dp_comm", "model": "pp_comm", "embedding": "pp_comm"}


@dataclass(frozen=True)
class _Traffic:
    """Memory traffic of the elementwise work of one block for one microbatch, and how many kernels move it."""

    forward_bytes: float
    forward_kernels: int
    backward_bytes: float
    backward_kernels: int
    gradient_bytes: float


def _layer_traffic(plan: Plan) -> _Traffic:
    """A transformer layer: two norms, two residual additions, rotation of queries and keys, the activation; the fp32 accumulation of
    weight gradients reads and writes 4 bytes per element. Biases are part of their product's or neighbour's kernel."""
    model, tp = plan.model, plan.layout.tp
    element = ELEMENT_BYTES[plan.precision.dtype]
    tokens = plan.batch.micro_size * plan.batch.sequence
    hidden = tokens * model.hidden_size * element / (tp if plan.layout.sequence_parallel else 1)
    rotated = 2 * tokens * (model.num_heads + model.num_kv_heads) * model.head_dim * element / tp if model.position == "rope" else 0.0
    inputs = 2 if model.gated else 1
    unit = tokens * model.ffn_hidden_size * element / tp
    rope_kernels = int(model.position == "rope")
    return _Traffic(
        forward_bytes=2 * (2 + 3) * hidden + rotated + (inputs + 1) * unit,
        forward_kernels=5 + rope_kernels,
        backward_bytes=2 * (3 + 3) * hidden + rotated + (2 * inputs + 1) * unit,
        backward_kernels=5 + rope_kernels,
        gradient_bytes=8 * sum(local_elements(plan, parameter) for parameter in layer_parameters(model, 0)),
    )


def _table_elements(plan: Plan) -> float:
    return plan.model.vocab_size * plan.model.hidden_size / plan.layout.tp


def _embedding_traffic(plan: Plan) -> _Traffic:
    """Forward reads and writes each token's row (and its position's); backward adds rows into an fp32 table."""
    element = ELEMENT_BYTES[plan.precision.dtype]
    hidden = plan.batch.micro_size * plan.batch.sequence * plan.model.hidden_size
    return _Traffic(
        forward_bytes=4 * hidden * element, forward_kernels=3, backward_bytes=hidden * (element + 8), backward_kernels=3, gradient_bytes=0
    )


def _head_traffic(plan: Plan) -> _Traffic:
    """Final norm, and the cross-entropy over local logits in fp32: cast, maximum, exponentials and their sum; then the gradient."""
    element = ELEMENT_BYTES[plan.precision.dtype]
    tokens = plan.batch.micro_size * plan.batch.sequence
    hidden = tokens * plan.model.hidden_size * element
    logits = tokens * plan.model.vocab_size / plan.layout.tp
    return _Traffic(
        forward_bytes=2 * hidden + (element + 16) * logits,
        forward_kernels=5,
        backward_bytes=3 * hidden + (element + 8) * logits,
        backward_kernels=3,
        gradient_bytes=8 * _table_elements(plan),
    )
