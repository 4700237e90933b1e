"""What a block (a transformer layer, the embedding, the head) costs: its operations of `core.program` and
its memory-bound kernels.

Products are priced by shape, attention as one core, collectives by how their group lies; then what a stack runs at the
same time is put side by side (`simulator.stack.profiles`): a collective hides behind the product it is launched with,
which slows down meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ...core.plan.plan import Plan
from ...core.program import Collective, Message, Op, Operation, Operations, Product, Role
from ..compute.compute import (
    AttentionShape,
    attention_kernels,
    attention_s,
    elementwise_s,
    grouped_product_s,
    product_kernels,
    product_s,
    slowed_s,
    traffic_s,
)
from ..engine.seconds import NOTHING, Seconds, made_of
from ..stack.casts import cast_bytes
from ..stack.profile import Profile
from ..stack.projections import second_products, separate, sum_bytes
from .traffic import Traffic

Pass = Literal["forward", "input", "weight"]
"""Forward, input gradient, weight gradient."""

COMPONENT_OF_AXIS: Mapping[str, str] = {
    "tp": "tp_comm",
    "etp": "tp_comm",
    "cp": "cp_comm",
    "cp_inner": "cp_comm",
    "cp_outer": "cp_comm",
    "tp_cp": "cp_comm",
    "tp_cp_dp": "dp_comm",
    "ep": "ep_comm",
    **{
        f"{axis}{part}": "dp_comm"
        for axis in ("dp", "edp", "replica", "expert_replica")
        for part in ("", "_shard", "_replicate")
    },
    "model": "pp_comm",
    "embedding": "pp_comm",
}
"""Axis of a collective -> component of `Seconds`."""

MAKES_NO_OPERAND = Role.DOWN
"""A product whose result is added to the residual, so that no gradient needs it."""

CHUNK_CALLS = 6
"""Calls with which the library launches a chunk of a product with its collective: the product, a send, a receive, an
event and two waits for it (Transformer Engine, comm_gemm_overlap.cpp, split_overlap_ag)."""

ACCUMULATION_BYTES = 8
"""An fp32 sum over microbatches read and written."""


class Part(NamedTuple):
    """Seconds on the device of one part of a block for one microbatch, and the kernels that its host launches for it
    (those that a library launches by itself count less)."""

    seconds: Seconds = NOTHING
    num_kernels: float = 0

    def __add__(self, other: Part) -> Part:  # type: ignore[override]
        return made_of(Part, (self.seconds + other.seconds, self.num_kernels + other.num_kernels))

    def times(self, count: int) -> Part:
        """The same part `count` times."""
        return made_of(Part, (self.seconds.times(count), self.num_kernels * count))

    def recomputed(self) -> Part:
        """The same part done a second time."""
        return Part(self.seconds.recomputed(), self.num_kernels)


_ELEMENTWISE = {"mlp_act": "mlp"}
"""Module of selective recomputation -> the memory-bound pieces it repeats, where they have another name."""


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of a block by action kind: F, I, W, and B, which is I and W with what overlaps."""

    forward: Part
    input_gradient: Part
    weight_gradient: Part
    backward: Part


NO_MESSAGES = "layers send no messages of their own"


class _Passes(NamedTuple):
    """The parts of one layer's work: both halves of its backward one after the other, and as they overlap."""

    forward: Part
    input_gradient: Part
    weight_gradient: Part
    backward: Part


@dataclass(frozen=True)
class BlockPricer:
    """Prices the blocks of one plan; `collective_s` gives the seconds of a collective of the pipeline rank in question,
    and `spread` how its group over an axis lies.

    `sums_gradients` is False where weight gradients leave for their owners microbatch by microbatch,
    and only shards are summed. `window` is that of the attention of the block in question. `known` keeps what layers'
    work costs, by all that is multiplied and sent: plans may share it that are equal in model, cluster, stack,
    precision, numerics, batch, tp, cp and sequence parallelism.
    """

    plan: Plan
    profile: Profile
    collective_s: Callable[[Collective], float]
    sums_gradients: bool = True
    spread: Callable[[str], object] = str
    known: dict[object, Any] = field(default_factory=dict)
    window: int = 0

    def block(self, works: tuple[Op, ...], pieces: Mapping[str, Traffic], *, recomputes_all: bool) -> Block:
        """The price of a block from the work of its layers and its memory-bound pieces."""
        window = max((work.window for work in works), default=0)
        return replace(self, window=window)._block(works, pieces, recomputes_all=recomputes_all)

    def _block(self, works: tuple[Op, ...], pieces: Mapping[str, Traffic], *, recomputes_all: bool) -> Block:
        total = sum(pieces.values(), Traffic())
        forward = self._elementwise(total.forward_bytes, total.forward_kernels)
        backward = self._elementwise(total.backward_bytes, total.backward_kernels)
        weight, both = Part(), backward
        if self.profile.keeps_gathered:
            works = tuple(replace(work, weight_gradient=_without_gathers(work.weight_gradient)) for work in works)
        for work in works:
            own = self._passes(work)
            forward += own.forward
            backward += own.input_gradient
            weight += own.weight_gradient
            both += own.backward
        again = self._whole_again(works, total) if recomputes_all else self._recomputed(works, pieces)
        again = again.recomputed()
        return Block(forward, backward + again, weight, both + again)

    def _passes(self, work: Op) -> _Passes:
        """The parts of one layer's work."""
        parts = (work.forward, work.input_gradient, work.weight_gradient)
        key = (work.role, self.window, self.sums_gradients, *map(self._shapes, parts))
        found: _Passes | None = self.known.get(key)
        if found is None:
            summed = self._gradient_sum(work)
            found = self.known[key] = _Passes(
                self._forward(work.forward, work.role),
                self._parts(work.input_gradient, work.role, of="input"),
                self._parts(work.weight_gradient, work.role, of="weight") + summed,
                self._chain(work) + summed,
            )
        return found

    def _again(self, work: Op) -> Part:
        """What is computed a second time of one layer's work."""
        key = (work.role, self.window, self._shapes(work.recomputed))
        found: Part | None = self.known.get(key)
        if found is None:
            found = self.known[key] = self._forward(work.recomputed, work.role)
        return found

    def _shapes(self, found: Operations) -> tuple[object, ...]:
        """Equal for operations that cost the same: all of them but what they are called, and how their groups lie."""
        return tuple(map(self._shape, found))

    def _shape(self, operation: Operation) -> tuple[object, ...]:
        if isinstance(operation, Product):
            sizes = (operation.m, operation.n, operation.k, operation.count)
            return (*sizes, operation.grouped, operation.dtype)
        assert isinstance(operation, Collective), NO_MESSAGES
        sent = (operation.op, operation.group_size, operation.sent_bytes)
        return (*sent, operation.axis, self.spread(operation.axis))

    def _whole_again(self, works: tuple[Op, ...], total: Traffic) -> Part:
        """A whole layer computed a second time, and what brings back its input, which its
        forward does not do itself."""
        return self._elementwise(total.forward_bytes, total.forward_kernels) + self._operations_again(works)

    def _operations_again(self, works: tuple[Op, ...]) -> Part:
        """The operations that a plan has computed a second time, as far as a stack does."""
        needed = (
            work for work in works if not (self.profile.recomputation_stops_early and work.role is MAKES_NO_OPERAND)
        )
        return sum(map(self._again, needed), Part())

    def _recomputed(self, works: tuple[Op, ...], pieces: Mapping[str, Traffic]) -> Part:
        """What is computed a second time when some modules only are, or some operations."""
        recompute = self.plan.recompute
        if recompute.mode == "selective" and self.profile.selective_operators and "residual" in pieces:
            return self._operators_again(works, pieces)
        again = self._operations_again(works)
        if recompute.mode == "selective":
            for name in (_ELEMENTWISE.get(name, name) for name in recompute.modules):
                if name in pieces:
                    again += self._elementwise(pieces[name].forward_bytes, pieces[name].forward_kernels)
        return again

    def _operators_again(self, works: tuple[Op, ...], pieces: Mapping[str, Traffic]) -> Part:
        """All kernels that are no products, every second product, and the attention core where the plan names it."""
        total, again = sum(pieces.values(), Traffic()), Part()
        for role, found in second_products(self.plan.model, works):
            again += self._forward(found, role)
        for work in works:
            if work.role is Role.CORE and "core_attn" in self.plan.recompute.modules:
                again += self._forward(work.forward, work.role)
        return again + self._elementwise(total.forward_bytes, total.forward_kernels)

    def _forward(self, found: Iterable[Operation], role: Role) -> Part:
        """Products, and collectives that hide behind them where the stack cuts both into chunks."""
        found = tuple(found)
        if self.profile.tensor_overlap in ("forward", "all") and self.plan.layout.sequence_parallel:
            return self._chunked(found, role, of="forward")
        return self._parts(found, role, of="forward")

    def _chain(self, work: Op) -> Part:
        """The whole backward of one layer. What precedes the weight gradient's product overlaps with the input
        gradient's, and what follows that with the weight gradient's (Korthikanti et al. 2022, section 4.2.2;
        Megatron's asynchronous linear layer)."""
        first, second = work.input_gradient, work.weight_gradient
        if self.profile.tensor_overlap in ("none", "forward") or not any(isinstance(op, Product) for op in second):
            return self._parts(first, work.role, of="input") + self._parts(second, work.role, of="weight")
        before, products, after = _split(first)
        gathers, weight_products, rest = _split(second)
        if self.profile.tensor_overlap == "all":
            one = self._chunked((*before, *products), work.role, of="input")
        else:
            one = self._parts((*before, *products), work.role, of="input")
        return (
            self._overlapped(one, gathers, work.role)
            + self._overlapped(self._parts(weight_products, work.role, of="weight"), after, work.role)
            + self._parts(rest, work.role, of="weight")
        )

    def _overlapped(self, compute: Part, collectives: tuple[Operation, ...], role: Role) -> Part:
        """Compute with collectives launched during it: what outlasts it is exposed, and it slows down meanwhile."""
        if not collectives:
            return compute
        other = self._parts(collectives, role, of="weight")
        hidden_s, compute_s = other.seconds.tp_comm, compute.seconds.compute
        exposed_s = max(slowed_s(self.plan.cluster, compute_s, hidden_s), hidden_s) - compute_s
        rest = other.seconds + Seconds(tp_comm=exposed_s - hidden_s)
        return Part(compute.seconds + rest, compute.num_kernels + other.num_kernels)

    def _chunked(self, found: tuple[Operation, ...], role: Role, *, of: Pass) -> Part:
        """Products with their collectives in tp chunks: all but the first or last chunk is hidden (Transformer
        Engine, userbuffers)."""
        part, tp = self._parts(found, role, of=of), self.plan.layout.tp
        comm_s, compute_s = part.seconds.tp_comm, part.seconds.compute
        if not comm_s or not compute_s:
            return part
        exposed_s = max(slowed_s(self.plan.cluster, compute_s, comm_s), comm_s) - compute_s + comm_s / tp
        kernels = part.num_kernels + tp * CHUNK_CALLS / self.profile.host_calls
        return Part(part.seconds + Seconds(tp_comm=min(comm_s, exposed_s) - comm_s), kernels)

    def _parts(self, found: Iterable[Operation], role: Role, *, of: Pass) -> Part:
        """Operations one after the other; an attention core with the exchange of its keys and values."""
        found = tuple(found)
        if role is Role.CORE and found:
            return self._attention(found, of=of)
        return self._in_turn(found, role, of=of)

    def _in_turn(self, found: Iterable[Operation], role: Role, *, of: Pass) -> Part:
        """Products and collectives one after the other."""
        total = Part()
        for operation in found:
            match operation:
                case Product():
                    total += self._product(operation, role, of=of)
                case Collective():
                    total += Part(
                        Seconds(**{COMPONENT_OF_AXIS[operation.axis]: self.collective_s(self._sent(operation, role))}),
                        1,
                    )
                case Message():
                    raise AssertionError(NO_MESSAGES)
        return total

    def _product(self, product: Product, role: Role, *, of: Pass) -> Part:
        """The product of a layer, or those that the stack makes of it, with fp8 after the casts of their operands."""
        dtype = self._dtype(product, role)
        products = separate(self.plan.model, role, product, of) if self.profile.separate_projections else (product,)
        total = sum((self._kernel(one, dtype, of=of) for one in products), Part())
        if of == "input" and len(products) > 1:
            reduced = self.plan.layout.tp > 1
            added = sum_bytes(product, len(products), compiled=self.profile.fused_elementwise, reduced=reduced)
            total += self._elementwise(added, len(products) - 1)
        return total + self._casts(product, role, of=of) if dtype == "fp8" else total

    def _kernel(self, product: Product, dtype: str, *, of: Pass) -> Part:
        """One product as the library runs it."""
        adds = of == "weight" and self.profile.fused_gradients  # to the gradient buffer: reads and writes it
        output_bytes = 2 * self.profile.gradient_bytes(self.plan.precision.dtype) if adds else None
        grouped = product.grouped and product.count > 1
        seconds = (grouped_product_s if grouped else product_s)(
            self.plan.cluster, dtype, product, output_bytes=output_bytes
        )
        # The library launches the products of a group by itself, without the stack around each.
        return Part(
            Seconds(compute=seconds), 1 + (product_kernels(product, grouped=grouped) - 1) / self.profile.host_calls
        )

    def _casts(self, product: Product, role: Role, *, of: Pass) -> Part:
        """What brings the operands of a product to 8 bits; an expert's tokens have a scale of their own."""
        num_bytes = cast_bytes(self.profile.casts, role, product, of=of, cut=self.plan.layout.tp)
        if not num_bytes:
            return Part()
        kernels = product.count if product.grouped else 1
        return Part(self._elementwise(num_bytes, kernels).seconds, 1 + (kernels - 1) / self.profile.host_calls)

    def _sent(self, operation: Collective, role: Role) -> Collective:
        """A collective as the stack runs it: tokens gathered in 8 bits where they are cast before."""
        narrow = self.profile.casts.gathers_narrow and self.plan.precision.dtype == "fp8" and role is not Role.HEAD
        if narrow and operation.op == "all_gather" and operation.axis == "tp":
            return replace(operation, sent_bytes=operation.sent_bytes // 2)
        return operation

    def _gradient_sum(self, work: Op) -> Part:
        """The sum over microbatches of a layer's weight gradients, where the products do not make it themselves."""
        if self.profile.fused_gradients or not self.sums_gradients:
            return Part()
        elements = sum(op.count * op.m * op.n for op in work.weight_gradient if isinstance(op, Product))
        width = self.profile.gradient_bytes(self.plan.precision.dtype)
        return Part(Seconds(compute=traffic_s(self.plan.cluster, elements * ACCUMULATION_BYTES * width / 4)))

    def _dtype(self, product: Product, role: Role) -> str:
        """Number format of a product's operands: fp8 recipes leave output heads in 16 bits."""
        dtype = product.dtype or self.plan.precision.dtype
        if self.profile.router_dtype == "weights" and role is Role.ROUTER:
            dtype = self.plan.precision.dtype if self.plan.precision.dtype != "fp8" else "bf16"
        return "bf16" if dtype == "fp8" and role is Role.HEAD else dtype

    def _attention(self, found: tuple[Operation, ...], *, of: Pass) -> Part:
        """The core on this rank's queries. With context parallelism all but the first of the blocks of keys and values
        are sent while attention works on those before. Heads that neighbours exchange for tokens come before and go
        after it."""
        cluster, fused, backward = self.plan.cluster, self.profile.fused_attention, of == "input"
        dtype, share = self.plan.precision.dtype, self.profile.attention_share(cluster, backward=backward)
        dropout = self.profile.dropout
        seconds = attention_s(
            cluster, dtype, self.attention_shape, backward=backward, fused=fused, share=share, dropout=dropout
        )
        total = Part(Seconds(compute=seconds), attention_kernels(backward=backward, fused=fused))
        sent = [op for op in found if isinstance(op, Collective)]
        total += self._in_turn((op for op in sent if op.axis == "cp_inner"), Role.CORE, of=of)
        exchange = self._in_turn((op for op in sent if op.axis != "cp_inner"), Role.CORE, of=of)
        cp, comm_s = self.plan.layout.cp_outer, exchange.seconds.cp_comm
        if comm_s and self.profile.context_overlap:
            cover_s = seconds * (cp - 1) / cp
            exposed_s = max(slowed_s(cluster, cover_s, comm_s), comm_s) - cover_s
            exchange = Part(exchange.seconds + Seconds(cp_comm=exposed_s - comm_s), exchange.num_kernels)
        return total + exchange

    @property
    def attention_shape(self) -> AttentionShape:
        """The attention core of tensor- and context-parallel rank 0."""
        plan, model = self.plan, self.plan.model
        inner = plan.layout.cp_inner
        groups = plan.leaf_sizes.heads.owned_items(plan.layout.tp, 0)[1] // inner
        return AttentionShape(
            batch=plan.batch.micro_size,
            heads=groups * model.query_heads_per_group,
            kv_heads=groups,
            queries=plan.batch.sequence // plan.layout.cp * inner,
            keys=plan.batch.sequence,
            qk_head_dim=model.head_dim,
            v_head_dim=model.value_head_dim,
            window=self.window,
        )

    def _elementwise(self, num_bytes: float, num_kernels: int) -> Part:
        return (
            Part(Seconds(compute=elementwise_s(self.plan.cluster, num_bytes, num_kernels)), num_kernels)
            if num_kernels
            else Part()
        )


def _split(found: tuple[Operation, ...]) -> tuple[tuple[Operation, ...], tuple[Operation, ...], tuple[Operation, ...]]:
    """Operations before the first product, up to the last one, and after it."""
    where = [i for i, operation in enumerate(found) if isinstance(operation, Product)]
    if not where:
        return (), (), found
    return found[: where[0]], found[where[0] : where[-1] + 1], found[where[-1] + 1 :]


def _without_gathers(found: tuple[Operation, ...]) -> tuple[Operation, ...]:
    return tuple(op for op in found if not (isinstance(op, Collective) and op.op == "all_gather"))
