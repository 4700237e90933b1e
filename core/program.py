"""What each action computes and sends on one rank: the one description that the simulator prices and the backend is held to.

Each layer type is described once, as a `LayerWork`: what its forward, its input gradient and its weight gradient compute and send.
`operations` assembles the actions of a stage from them. Exact and fast numerics share the products and differ in the collectives:
fast numerics leave the sum to the library, exact numerics move partial sums and add them in a fixed order (`core.reduction`).

Letters: b samples per microbatch, s sequence, h hidden, n tensor-parallel size. Norms, biases, activations, rotations and softmax are
elementwise or row-wise work without products; they are not listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .action import Kind
from .leaves import Leaves
from .parameters import Parameter, layer_prefix, stage_parameters, stage_usages
from .reduction import cut, maximal_nodes

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Product:
    """`count` matrix products [m, k] x [k, n] of one layer."""

    layer: str
    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two."""
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Collective:
    """One collective call of one rank: `sent_bytes` leave this rank for the others of its group over `axis`.

    Axes are `tp`, `dp`, `replica` (all copies of a stage that has pipeline replicas, dp included), `model` and `embedding`.
    """

    layer: str
    op: Literal["all_to_all", "all_gather", "all_reduce", "reduce_scatter"]
    axis: str
    group_size: int
    sent_bytes: int


@dataclass(frozen=True)
class Message:
    """One point-to-point message between neighbouring stages."""

    layer: str
    num_bytes: int


Operation = Product | Collective | Message
Operations = tuple[Operation, ...]

EXACT_SCALAR_BYTES = 24 * 8
"""Payload of an exactly summed scalar: 23 limbs of 32 bits and a word of flags, each in an int64 (`backend.numerics.exact_sum`)."""
FAST_SCALAR_BYTES = 8
"""Payload of a scalar summed in fp64."""
PARTIAL_BYTES = 4
"""Partial sums, gradients and softmax statistics travel in fp32 whatever the precision of the products."""


@dataclass(frozen=True)
class LayerWork:
    """What one layer computes and sends for one microbatch on one rank.

    `recomputed` are the operations that the plan's recompute mode repeats before the input gradient.
    """

    layer: str
    forward: Operations
    input_gradient: Operations
    weight_gradient: Operations
    recomputed: Operations = ()


def activation_bytes(dtype: str) -> int:
    """Bytes per element of a hidden state: 4 for fp32, else 2 (with fp8 only the operands of products are narrower)."""
    return 4 if dtype == "fp32" else 2


def weight_bytes(dtype: str) -> int:
    """Bytes per element of a weight as products and parameter gathers see it: 4 for fp32, else 2."""
    return 4 if dtype == "fp32" else 2


def local_elements(plan: Plan, parameter: Parameter, tp_rank: int = 0) -> int:
    """Elements of a parameter that a tensor-parallel rank holds, before any ZeRO cut."""
    if parameter.cut is None:
        return parameter.num_elements
    dim, feature = parameter.cut
    lo, hi = plan.leaf_sizes.feature(feature).owned_items(plan.layout.tp, tp_rank)
    return parameter.num_elements // parameter.shape[dim] * (hi - lo) * parameter.unit


def stage_elements(plan: Plan, stage: int, tp_rank: int = 0) -> int:
    """Parameter elements that a tensor-parallel rank of a stage holds, before any ZeRO cut; a tied table once per stage."""
    return sum(local_elements(plan, parameter, tp_rank) for parameter in stage_parameters(plan.model, plan.stages[stage]))


def gradient_elements(plan: Plan, stage: int, tp_rank: int = 0) -> int:
    """Gradient elements that a stage accumulates: as its parameters, but a table used at both ends of one stage counts twice."""
    return sum(local_elements(plan, usage.parameter, tp_rank) for usage in stage_usages(plan.model, plan.stages[stage]))


def rank_stages(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, ascending."""
    return plan.placement.stages_of(pp_rank)


def rank_elements(plan: Plan, pp_rank: int, tp_rank: int = 0) -> int:
    """Parameter elements of all stages of a pipeline rank, before any ZeRO cut."""
    return sum(stage_elements(plan, stage, tp_rank) for stage in rank_stages(plan, pp_rank))


def operations(plan: Plan, kind: Kind, stage: int, tp_rank: int = 0, dp_rank: int = 0, *, replica: int = 0) -> Operations:
    """What one action of a stage computes and sends on one rank, in execution order.

    F, B, I, W, SEND_F and SEND_B are per microbatch; REDUCE_GRAD and UNSHARD per stage; STEP belongs to a pipeline rank and is asked
    for with its lowest stage. B is I and W together, layer by layer. Receives and RESHARD compute and send nothing. `replica` says
    which of the stage's pipeline ranks (`plan.placement.ranks[stage]`) is meant.
    """
    pp_rank = plan.placement.ranks[stage][replica]
    match kind:
        case Kind.F:
            return tuple(operation for work in stage_work(plan, stage, tp_rank) for operation in work.forward)
        case Kind.B | Kind.I | Kind.W:
            return tuple(_backward(stage_work(plan, stage, tp_rank), kind))
        case Kind.SEND_F | Kind.SEND_B:
            return (Message("", message_bytes(plan, tp_rank)),)
        case Kind.REDUCE_GRAD:
            return tuple(_reduce_gradients(plan, stage, tp_rank, plan.copy_of(stage, dp_rank=dp_rank, pp_rank=pp_rank)))
        case Kind.UNSHARD:
            return _gather_parameters(plan, stage, tp_rank) if plan.layout.zero == 3 else ()
        case Kind.STEP:
            return tuple(_step(plan, pp_rank, tp_rank))
        case _:
            return ()


def message_bytes(plan: Plan, tp_rank: int = 0) -> int:
    """Bytes of one hidden state, or its gradient, between two stages: b*s*h; with sequence parallelism each rank sends its tokens."""
    return _Tensors(plan, tp_rank).own_tokens * plan.model.hidden_size * activation_bytes(plan.precision.dtype)


def stage_work(plan: Plan, stage: int, tp_rank: int = 0) -> tuple[LayerWork, ...]:
    """The layers of a stage in forward order."""
    content = plan.stages[stage]
    works: list[LayerWork] = [embedding_work(plan, tp_rank)] if content.embedding else []
    for layer in content.layers:
        works += transformer_work(plan, layer, tp_rank)
    return tuple([*works, *head_work(plan, tp_rank)] if content.head else works)


def embedding_work(plan: Plan, tp_rank: int = 0) -> LayerWork:
    """Token lookup: each rank brings the rows it owns, and the sum over ranks picks the one that is there. The gradient of its rows
    needs all tokens."""
    layer, tensors = "embedding.tokens", _Tensors(plan, tp_rank)
    return LayerWork(layer, forward=tensors.reduce(layer, num_nodes=1), input_gradient=tensors.gather(layer), weight_gradient=())


def transformer_work(plan: Plan, layer: int, tp_rank: int = 0) -> tuple[LayerWork, ...]:
    """One transformer layer: qkv, attention core, output, up, down. Equal for all layers but for the names."""
    model, tensors, prefix = plan.model, _Tensors(plan, tp_rank), layer_prefix(layer)
    heads, ffn = plan.leaf_sizes.heads, plan.leaf_sizes.ffn
    group = model.query_heads_per_group * model.head_dim
    works = (
        _column(tensors, f"{prefix}.attention.qkv", heads, group + 2 * model.head_dim),
        _attention_core(tensors, f"{prefix}.attention.core"),
        _row(tensors, f"{prefix}.attention.output", heads, group),
        _column(tensors, f"{prefix}.mlp.up", ffn, 2 if model.gated else 1),
        _row(tensors, f"{prefix}.mlp.down", ffn, 1),
    )
    match plan.recompute.mode:
        case "full":
            return tuple(replace(work, recomputed=work.forward) for work in works)
        case "selective":
            return tuple(replace(work, recomputed=work.forward if work.layer.endswith("core") else ()) for work in works)
        case _:
            return works


def head_work(plan: Plan, tp_rank: int = 0) -> tuple[LayerWork, ...]:
    """Output product over the local vocabulary, and the cross-entropy over the cut one."""
    tensors, vocab = _Tensors(plan, tp_rank), plan.leaf_sizes.vocab
    return (_column(tensors, "head.output", vocab, 1), LayerWork("head.loss", tensors.softmax("head.loss", vocab), (), ()))


@dataclass(frozen=True)
class _Tensors:
    """Sizes of one microbatch's tensors on one tensor-parallel rank, and the collectives that complete them."""

    plan: Plan
    tp_rank: int

    @property
    def tp(self) -> int:
        return self.plan.layout.tp

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch: b*s."""
        return self.plan.batch.micro_size * self.plan.batch.sequence

    @property
    def own_tokens(self) -> int:
        """Tokens whose hidden states this rank holds outside the cut layers: a part of each sequence with sequence parallelism."""
        if not self.plan.layout.sequence_parallel:
            return self.tokens
        lo, hi = cut(self.plan.batch.sequence, self.tp, self.tp_rank)
        return self.plan.batch.micro_size * (hi - lo)

    def owned(self, leaves: Leaves, unit: int) -> int:
        """Features of a cut dimension that this rank holds."""
        lo, hi = leaves.owned_items(self.tp, self.tp_rank)
        return (hi - lo) * unit

    def num_nodes(self, leaves: Leaves) -> int:
        """Partial sums this rank ships for a sum over `leaves`."""
        return len(maximal_nodes(leaves.num_leaves, *leaves.owned(self.tp, self.tp_rank)))

    def reduce(self, layer: str, num_nodes: int) -> Operations:
        """Completes a sum over tensor-parallel ranks: [b, s, h] on every rank, or its own tokens with sequence parallelism."""
        if self.tp == 1:
            return ()
        hidden = self.plan.model.hidden_size
        if self.plan.numerics.mode == "fast":
            payload = self.tokens * hidden * activation_bytes(self.plan.precision.dtype)
            if self.plan.layout.sequence_parallel:
                return (self._collective(layer, "reduce_scatter", _scattered(payload, self.tp)),)
            return (self._collective(layer, "all_reduce", 2 * (self.tp - 1) * payload, divisor=self.tp),)
        own = self._own_elements()
        scatter = self._collective(layer, "all_to_all", num_nodes * (self.tokens * hidden - own) * PARTIAL_BYTES)
        return (scatter,) if self.plan.layout.sequence_parallel else (scatter, self._gather(layer, own))

    def gather(self, layer: str) -> Operations:
        """Brings all tokens to every rank before a cut layer; nothing to do without sequence parallelism."""
        if self.tp == 1 or not self.plan.layout.sequence_parallel:
            return ()
        return (self._gather(layer, self.own_tokens * self.plan.model.hidden_size),)

    def softmax(self, layer: str, leaves: Leaves) -> Operations:
        """The global maximum, then block sums of exponentials together with the target's logit, one number per token each."""
        if self.tp == 1:
            return ()
        column = self.tokens * PARTIAL_BYTES
        if self.plan.numerics.mode == "fast":
            maximum = self._collective(layer, "all_reduce", 2 * (self.tp - 1) * column, divisor=self.tp)
            return (maximum, self._collective(layer, "all_reduce", 2 * (self.tp - 1) * 2 * column, divisor=self.tp))
        sums = self._collective(layer, "all_gather", (self.num_nodes(leaves) + 1) * column * (self.tp - 1))
        return (self._collective(layer, "all_gather", column * (self.tp - 1)), sums)

    def _own_elements(self) -> int:
        """Elements of the completed sum that this rank finishes: its tokens, or an even part of the flat tensor."""
        hidden = self.plan.model.hidden_size
        if self.plan.layout.sequence_parallel:
            return self.own_tokens * hidden
        lo, hi = cut(self.tokens * hidden, self.tp, self.tp_rank)
        return hi - lo

    def _gather(self, layer: str, own_elements: int) -> Collective:
        return self._collective(layer, "all_gather", own_elements * activation_bytes(self.plan.precision.dtype) * (self.tp - 1))

    def _collective(
        self, layer: str, op: Literal["all_to_all", "all_gather", "all_reduce", "reduce_scatter"], sent_bytes: int, divisor: int = 1
    ) -> Collective:
        return Collective(layer, op, "tp", self.tp, -(-sent_bytes // divisor))


def _column(tensors: _Tensors, layer: str, leaves: Leaves, unit: int) -> LayerWork:
    """Output features cut. The input gradient sums over them, hence over ranks; tokens gathered for the forward are gathered again
    for the weight gradient rather than kept (Korthikanti et al. 2022, section 4.2.2)."""
    m, n, k = tensors.tokens, tensors.owned(leaves, unit), tensors.plan.model.hidden_size
    return LayerWork(
        layer,
        forward=(*tensors.gather(layer), Product(layer, m, n, k)),
        input_gradient=(Product(layer, m, k, n), *tensors.reduce(layer, tensors.num_nodes(leaves))),
        weight_gradient=(*tensors.gather(layer), Product(layer, n, k, m)),
    )


def _row(tensors: _Tensors, layer: str, leaves: Leaves, unit: int) -> LayerWork:
    """Input features cut: the forward sums over them, hence over ranks."""
    m, n, k = tensors.tokens, tensors.plan.model.hidden_size, tensors.owned(leaves, unit)
    return LayerWork(
        layer,
        forward=(Product(layer, m, n, k), *tensors.reduce(layer, tensors.num_nodes(leaves))),
        input_gradient=(*tensors.gather(layer), Product(layer, m, k, n)),
        weight_gradient=(Product(layer, k, n, m),),
    )


def _attention_core(tensors: _Tensors, layer: str) -> LayerWork:
    """Scores and their product with the values, per query head, over the full square (a causal kernel may skip half of it).

    Backward: the gradient of the scores, then those of values, queries and keys. The second computation of the scores inside a
    flash kernel is not counted.
    """
    plan = tensors.plan
    s, d = plan.batch.sequence, plan.model.head_dim
    count = plan.batch.micro_size * tensors.owned(plan.leaf_sizes.heads, plan.model.query_heads_per_group)
    return LayerWork(
        layer,
        forward=(Product(layer, s, s, d, count), Product(layer, s, d, s, count)),
        input_gradient=(Product(layer, s, s, d, count), Product(layer, s, d, s, 3 * count)),
        weight_gradient=(),
    )


def _backward(works: tuple[LayerWork, ...], kind: Kind) -> Iterator[Operation]:
    if kind is not Kind.W:
        for work in works:
            yield from work.recomputed
    for work in reversed(works):
        if kind is not Kind.W:
            yield from work.input_gradient
        if kind is not Kind.I:
            yield from work.weight_gradient


def copies_axis(plan: Plan, stage: int) -> str:
    """The axis over which the copies of a stage add their gradients: `dp`, or `replica` (dp and pipeline replicas together)."""
    return "dp" if len(plan.placement.ranks[stage]) == 1 else "replica"


def own_token_parameters(plan: Plan, stage: int) -> tuple[Parameter, ...]:
    """The parameters of a stage whose gradients a tensor-parallel rank knows for its own tokens only, until REDUCE_GRAD adds them over tp.

    With sequence parallelism these are the vectors that no rank cuts: norms, and biases after a row-parallel layer. All other
    gradients come from products over all tokens, and the tables of the embedding from the tokens that its backward gathers.
    """
    if not plan.layout.sequence_parallel:
        return ()
    held = stage_parameters(plan.model, plan.stages[stage])
    return tuple(parameter for parameter in held if parameter.cut is None and len(parameter.shape) == 1)


def _reduce_gradients(plan: Plan, stage: int, tp_rank: int, copy: int) -> Iterator[Operation]:
    """The gradients of a stage, flat: over tensor parallelism what each rank knows for its tokens only, then over all copies.

    With ZeRO 1 and above each copy keeps a part of the sum, so the second half of the reduction falls away.
    """
    layout, size, axis = plan.layout, plan.num_copies(stage), copies_axis(plan, stage)
    replicated = sum(parameter.num_elements for parameter in own_token_parameters(plan, stage))
    if replicated and layout.tp > 1:
        yield Collective("", "all_reduce", "tp", layout.tp, -(-2 * (layout.tp - 1) * replicated * PARTIAL_BYTES // layout.tp))
    if size == 1:
        return
    elements = gradient_elements(plan, stage, tp_rank)
    if not elements:  # a stage without layers
        return
    if plan.numerics.mode == "fast":
        payload = elements * PARTIAL_BYTES
        if layout.zero:
            yield Collective("", "reduce_scatter", axis, size, _scattered(payload, size))
        else:
            yield Collective("", "all_reduce", axis, size, -(-2 * (size - 1) * payload // size))
        return
    lo, hi = cut(elements, size, copy)
    num_nodes = len(maximal_nodes(plan.batch.global_size, *plan.copy_samples(stage, copy)))
    yield Collective("", "all_to_all", axis, size, num_nodes * (elements - (hi - lo)) * PARTIAL_BYTES)
    if not layout.zero:
        yield Collective("", "all_gather", axis, size, (hi - lo) * PARTIAL_BYTES * (size - 1))


def _gather_parameters(plan: Plan, stage: int, tp_rank: int) -> Operations:
    """Brings the whole stage's weights to every copy, from equal parts."""
    size, elements = plan.num_copies(stage), stage_elements(plan, stage, tp_rank)
    if size == 1 or not elements:
        return ()
    part = -(-elements // size)
    return (Collective("", "all_gather", copies_axis(plan, stage), size, part * weight_bytes(plan.precision.dtype) * (size - 1)),)


def tied_ends(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The pipeline ranks of first and last stage that add up a tied table together with this rank; () where nothing is to be sent.

    Nothing is tied, the rank holds neither stage, or it holds both.
    """
    return plan.placement.ends_of(pp_rank) if plan.model.tied_embeddings else ()


def _step(plan: Plan, pp_rank: int, tp_rank: int) -> Iterator[Operation]:
    """The tied table's two sums (first and last stage), the gradient norm, the loss, and with ZeRO 1 or 2 the updated weights."""
    layout = plan.layout
    if tied_ends(plan, pp_rank):
        table = stage_parameters(plan.model, plan.stages[0])[0]
        yield Collective("embedding.tokens", "all_gather", "embedding", 2, local_elements(plan, table, tp_rank) * PARTIAL_BYTES)
    if layout.zero:  # each copy then holds the squares of its part only
        yield from _scalar(plan, "grad_norm", "dp", layout.dp)
    yield from _scalar(plan, "grad_norm", "model", layout.tp * layout.pp)
    yield from _scalar(plan, "loss", "dp", layout.dp)
    yield from _scalar(plan, "loss", "model", layout.tp * layout.pp)
    if layout.zero in (1, 2):
        for own_stage in rank_stages(plan, pp_rank):
            yield from _gather_parameters(plan, own_stage, tp_rank)


def _scalar(plan: Plan, layer: str, axis: str, size: int) -> Iterator[Operation]:
    if size == 1:
        return
    if plan.numerics.mode == "exact":
        yield Collective(layer, "all_gather", axis, size, EXACT_SCALAR_BYTES * (size - 1))
    else:
        yield Collective(layer, "all_reduce", axis, size, -(-2 * (size - 1) * FAST_SCALAR_BYTES // size))


def _scattered(payload_bytes: int, size: int) -> int:
    """Bytes that leave each rank in a ring reduce-scatter: (n-1)/n of the payload, rounded up."""
    return -(-(size - 1) * payload_bytes // size)
