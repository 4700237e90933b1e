"""The tapes of embedding, transformer layer and output head: which tensors each operation keeps for its backward.

Letters: T tokens of a microbatch on this rank, h hidden, e bytes per element, t tensor parallelism; H = T*h*e is a
hidden state, cut over t with sequence parallelism where a rank only holds its own tokens. Megatron-Core with
Transformer Engine was read at Megatron core_r0.14.0 (23e00ed) and Transformer Engine 2.11:
- `LayerNormLinear` keeps its input and the normalised input, each rank its own tokens, and gathers the latter again in
  the backward (transformer_engine/pytorch/module/layernorm_linear.py); `Linear` keeps its input, which after the
  attention core is the core's own output and after the activation the activation's (module/linear.py);
- rotary embedding, the split of q, k, v and the residual sum keep nothing; a fused attention keeps q, k, v, its output
  and one fp32 number per query and head (attention/dot_product_attention); the activation keeps its input
  (megatron/core/fusions/fused_bias_swiglu.py);
- latent attention normalises and projects up from two low-rank vectors
  (megatron/core/transformer/multi_latent_attention.py);
- experts: the router's tables, the permuted input, the gate and up-projections and the activation of the experts;
  permutation, all-to-all and sorting hold their input and output while they run
  (megatron/core/transformer/moe/{router,token_dispatcher,experts}.py).
Without fusion (Korthikanti et al. 2022, section 4.1) the attention core keeps softmax output, dropout
output and mask: 5as^2b bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...core.model.operators import Kind, Operator
from ...core.model.roles import Role
from ...core.plan.plan import Plan
from .tape import Node
from .tensors import INDEX_BYTES, MASK_BYTES, STATISTIC_BYTES, LayerTensors, rotary_table_bytes


def layer_nodes(tensors: LayerTensors, operators: tuple[Operator, ...]) -> tuple[Node, ...]:
    """One transformer layer in forward order, with the plan's selective recomputation."""
    by_role = {operator.role: operator for operator in operators}
    middle = operators.index(by_role[Role.ATTENTION_OUTPUT]) + 1
    attention = _attention(tensors, operators[:middle])
    if tensors.plan.model.parallel_block:  # what the MLP says of the gradient of the norm of both waits for attention
        attention = (node._replace(transient_bytes=node.transient_bytes + tensors.hidden) for node in attention)
    mlp = (_experts if Role.ROUTER in by_role else _mlp)(tensors, by_role)
    has_norms = tensors.plan.model.post_norms
    behind = [_norm(tensors, role) for role in (Role.ATTENTION_POST_NORM, Role.MLP_POST_NORM) if has_norms]
    nodes = (*attention, *behind[:1], *mlp, *behind[1:])
    recompute = tensors.plan.recompute
    if recompute.mode == "selective" and tensors.profile.selective_operators:
        return tuple(_operators_retained(tensors, nodes, by_role))
    return tuple(_selective(nodes, recompute.modules if recompute.mode == "selective" else ()))


def full_recompute(nodes: tuple[Node, ...], input_bytes: int, retained_bytes: int | None = None) -> tuple[Node, ...]:
    """A layer of which only the input is kept, or `retained_bytes` of it: everything else is dropped and comes back
    when the backward starts, with its output."""
    first, *rest = (
        node._replace(
            dropped_bytes=node.saved_bytes, recompute="layer", transient_bytes=node.transient_bytes + input_bytes
        )
        for node in nodes
    )
    return (
        first._replace(dropped_bytes=first.saved_bytes - (input_bytes if retained_bytes is None else retained_bytes)),
        *rest,
    )


def _selective(nodes: tuple[Node, ...], modules: tuple[str, ...]) -> Iterator[Node]:
    """The nodes without what the recomputed modules give up."""
    for node in nodes:
        given_up = [(module, num_bytes) for module, num_bytes in node.drops if module in modules and num_bytes]
        if given_up:
            dropped = min(node.saved_bytes, sum(num_bytes for _, num_bytes in given_up))
            yield node._replace(dropped_bytes=dropped, recompute=given_up[0][0])
        else:
            yield node


def _operators_retained(
    tensors: LayerTensors, nodes: tuple[Node, ...], by_role: Mapping[Role, Operator]
) -> Iterator[Node]:
    """A layer that keeps its input, every second product's output (query, value, gate, down) and, unless the
    plan names the core among what is recomputed, the attention core's, and computes the rest again from them
    when its backward starts."""
    gate, experts = by_role.get(Role.ACTIVATION), by_role.get(Role.EXPERTS_ACTIVATION)
    core = (
        0
        if "core_attn" in tensors.plan.recompute.modules
        else tensors.attended + STATISTIC_BYTES * tensors.tokens * tensors.heads
    )
    retained = {
        nodes[0].name: tensors.hidden,
        "attention.core": tensors.queries + tensors.values + core,
        "mlp.activation": tensors.tokens * tensors.held(gate.makes) * tensors.element if gate else 0,
        "mlp.down": tensors.hidden,
        "experts.up": tensors.routed_tokens * tensors.held(experts.makes) * tensors.element if experts else 0,
        "experts.down": tensors.hidden,
    }
    for node in nodes:
        yield node._replace(
            dropped_bytes=node.saved_bytes - min(node.saved_bytes, retained.get(node.name, 0)), recompute="layer"
        )


def mtp_nodes(tensors: LayerTensors) -> Iterator[Node]:
    """A module of multi-token prediction without its transformer layer: both norms, the projection of the two, the norm
    and a head of its own (megatron/core/transformer/multi_token_prediction.py)."""
    hidden, normal = tensors.hidden, tensors.normalised
    yield Node("mtp.norms", 2 * (hidden + tensors.statistics), hidden, hidden)
    yield Node(
        "mtp.projection",
        2 * normal,
        2 * hidden,
        hidden,
        forward_bytes=hidden,
        backward_bytes=2 * tensors.gathered,
        weight_input_bytes=2 * normal,
        weight_gradient_bytes=hidden,
    )
    yield from head_nodes(tensors)


def embedding_nodes(tensors: LayerTensors) -> Iterator[Node]:
    """Token lookup: keeps token numbers; its weight gradient is a whole table in the format of the weights,
    added to the gradients."""
    hidden, table = tensors.hidden, tensors.vocabulary * tensors.plan.model.hidden_size * tensors.element
    dense = table if tensors.profile.dense_embedding_gradient else 0
    saved = INDEX_BYTES * tensors.tokens + (MASK_BYTES * hidden // tensors.element if tensors.profile.dropout else 0)
    yield Node(
        "embedding.tokens",
        saved,
        transient_bytes=hidden,
        forward_bytes=2 * tensors.whole,
        backward_bytes=dense + tensors.gathered,
    )
    if tensors.plan.model.embedding_norm:
        yield _norm(tensors, Role.TOKENS_NORM)


def head_nodes(tensors: LayerTensors) -> Iterator[Node]:
    """Final norm, output product and cross-entropy.

    A cross-entropy in place writes the gradient over the logits (transformer_engine/pytorch/cross_entropy.py).
    Otherwise the softmax is kept in fp32 and its gradient cast to the format of the logits
    (megatron/core/tensor_parallel/cross_entropy.py).
    """
    hidden, elements = tensors.hidden, tensors.tokens * tensors.vocabulary
    logits, in_place = elements * tensors.element, tensors.profile.cross_entropy_in_place
    train = tensors.plan.train  # the sums over the vocabulary and the target's logit are one tensor; z-loss keeps log Z
    num_statistics = 2 + (train.label_smoothing > 0) + (train.z_loss > 0)
    rows = tensors.tokens * (num_statistics * STATISTIC_BYTES + INDEX_BYTES + MASK_BYTES)
    yield Node("head.norm", hidden + tensors.statistics, hidden, forward_bytes=0)
    yield Node(
        "head.output",
        hidden,
        hidden,
        forward_bytes=logits,
        backward_bytes=tensors.whole if tensors.gathered else 0,
        weight_input_bytes=hidden,
        weight_gradient_bytes=logits,
    )
    if tensors.plan.model.logit_softcap:  # whose backward needs what came of it; ours keeps that in fp32
        capped = elements * (STATISTIC_BYTES if tensors.profile.counted_masks else tensors.element)
        yield Node("head.cap", capped, logits, forward_bytes=2 * capped)
    if in_place:
        # the gradient lies where the logits did
        yield Node("head.loss", logits, logits, forward_bytes=rows, backward_bytes=-logits)
        return
    softmax = elements * STATISTIC_BYTES
    # torch's own keeps the targets and how many count
    if tensors.profile.separate_gradients and _is_plain_loss(tensors.plan):
        rows = tensors.tokens * INDEX_BYTES + STATISTIC_BYTES
    if tensors.profile.eager_loss:  # besides the softmax its gradient and that of the loss, both fp32
        copies = 2 + (tensors.profile.loss_copies if tensors.plan.layout.tp > 1 else 0)
        yield Node(
            "head.loss",
            softmax + rows,
            logits,
            forward_bytes=logits + softmax,
            backward_bytes=copies * softmax - logits,
        )
        return
    yield Node("head.loss", softmax + rows, logits if tensors.element < STATISTIC_BYTES else 0, forward_bytes=logits)


def _is_plain_loss(plan: Plan) -> bool:
    """Whether our own backend takes the library's cross-entropy (`backend.tensor_parallel.cross_entropy`)."""
    has_choice = plan.train.label_smoothing or plan.train.z_loss or plan.model.padding_rows
    return plan.numerics.mode == "fast" and plan.layout.tp == 1 and not has_choice


def _attention(tensors: LayerTensors, operators: Sequence[Operator]) -> Iterator[Node]:
    """Norms and products up to queries, keys and values, split and rotation, attention core, output product.

    A norm and the one product that takes its result are a node; where several do, as the down-projections of latent
    attention, the norm has its own, and those that are held whole share one.
    """
    hidden, e, heads = tensors.hidden, tensors.element, 0
    down = tensors.own_tokens * e * sum(each.makes.size for each in operators if _is_linear(each) and not each.axis)
    if down:
        if operators[0].role is Role.ATTENTION_NORM:
            yield Node("attention.norm", hidden + tensors.statistics, hidden, hidden)
        yield Node(
            "attention.down",
            tensors.normalised,
            hidden,
            hidden,
            forward_bytes=down,
            backward_bytes=hidden,
            drops=(("norm", tensors.normalised),),
            weight_input_bytes=tensors.normalised,
            weight_gradient_bytes=down,
        )
    before_each: tuple[Operator | None, ...] = (None, *operators)
    products = [
        (norm, each) for norm, each in zip(before_each, operators, strict=False) if _is_linear(each) and each.makes.axis
    ]
    for norm, product in products:
        before, heads = heads, tensors.tokens * tensors.held(product.makes) * e
        # the backward of what comes later has left its gradients
        waiting = hidden + (before if product is products[-1][1] else down)
        is_first = norm is None or norm.role is Role.ATTENTION_NORM
        if down and is_first:
            yield Node(product.role.value, 0, hidden, hidden, backward_bytes=hidden, weight_gradient_bytes=heads)
            continue
        yield _norm_linear(
            tensors,
            product.role.value,
            tensors.own_tokens * (product.takes.size + product.carries) * e,
            tensors.own_tokens * product.takes.size * tensors.operand,
            heads,
            module="norm" if is_first else "mla_up_proj",
            transient=waiting,
            has_norm=norm is not None,
        )
    mixed = tensors.queries + tensors.keys + tensors.values
    core = next(each for each in operators if each.kind is Kind.ATTEND)
    if down:
        yield Node("attention.rotary", 0, heads, hidden + tensors.queries, forward_bytes=heads)
        yield from _core(tensors, core, mixed, up=mixed)
        return
    if num_rows := _normed_rows(tensors):  # each norm keeps what it is given
        normed = tensors.queries + tensors.keys
        statistics = STATISTIC_BYTES * tensors.tokens * num_rows
        yield Node("attention.head_norms", normed + statistics, mixed, hidden, forward_bytes=mixed + normed)
    rotates, eager = core.turns, tensors.profile.eager
    makes_tables = rotates and eager and (tensors.plan.train.packed or not tensors.profile.stores_tables)
    tables = rotary_table_bytes(tensors.plan) if makes_tables else 0
    rotated = tensors.queries + tensors.keys if rotates else 0
    yield Node("attention.rotary", tables, mixed, hidden, forward_bytes=mixed + rotated)
    # keys and values repeated for every query head
    yield from _core(tensors, core, tensors.queries * 3 if eager and not tensors.attends_by_blocks(core) else mixed)


def _normed_rows(tensors: LayerTensors) -> int:
    """Rows of queries and keys of a token that are normed on a rank: heads, or all of either; 0 without such norms."""
    model = tensors.plan.model
    return tensors.heads + tensors.kv_heads if model.qk_norm else 2 * model.whole_qk_norm


def _is_linear(operator: Operator) -> bool:
    return operator.kind is Kind.LINEAR


def _core(tensors: LayerTensors, core: Operator, mixed: int, *, up: int = 0) -> Iterator[Node]:
    """The attention core, which keeps its operands, and the output product, whose input is the core's output. `up` of
    the operands come from up-projections of low-rank vectors."""
    hidden, attended = tensors.hidden, tensors.attended
    if core.sinks and tensors.profile.counted_masks:  # their scores lie behind the queries
        mixed += tensors.tokens * tensors.heads * tensors.element
    scores = tensors.tokens * tensors.plan.batch.sequence * tensors.heads
    if tensors.profile.fused_attention:
        rows = STATISTIC_BYTES * tensors.tokens * tensors.heads
        dropped, work = rows, (0, _kernel_sums(tensors) + rows)
    elif tensors.num_written:
        pairs = tensors.plan.batch.micro_size * tensors.heads * tensors.attended_pairs
        shares = tensors.tokens * tensors.heads if core.sinks else 0  # what of the probabilities goes to sinks
        dropped = (tensors.num_written * pairs + shares) * STATISTIC_BYTES
        work = scores * STATISTIC_BYTES, 2 * scores * STATISTIC_BYTES
    else:
        dropped = scores * (2 * tensors.element + MASK_BYTES if tensors.profile.dropout else tensors.element)
        work = (scores * tensors.element, 2 * scores * tensors.element)
    if tensors.attends_by_blocks(core) and tensors.plan.numerics.mode == "exact":  # the result in fp32
        dropped += attended * STATISTIC_BYTES // tensors.element - attended
    # the output product keeps a copy of its own
    copied = attended if tensors.profile.eager and not tensors.attends_by_token(core) else 0
    yield Node(
        "attention.core",
        mixed + attended + dropped,
        mixed,
        hidden,
        forward_bytes=work[0],
        backward_bytes=work[1],
        drops=(("core_attn", dropped + copied), ("mla_up_proj", up)),
    )
    mask = MASK_BYTES * tensors.hidden // tensors.element if tensors.profile.dropout else 0
    yield Node(  # the gradient that comes from the MLP is that of the residual
        "attention.output",
        mask + copied,
        attended,
        forward_bytes=tensors.gathered + hidden,
        backward_bytes=tensors.gathered,
        weight_input_bytes=attended,
        weight_gradient_bytes=hidden,
    )


def _kernel_sums(tensors: LayerTensors) -> int:
    """fp32 sums of the gradients of queries, keys and values, one of each per query head, that the backward
    of a fused kernel holds.

    Modelled: FlashAttention-2 documents that of the queries alone. On Blackwell the peaks of the DeepSeek-V2 rows of
    SimuMax, which lie in this backward, need 1,000 to 1,040 MiB besides q, k, v and their gradients; this gives 1,024.
    No other published peak lies here.
    """
    model = tensors.plan.model
    return STATISTIC_BYTES * tensors.tokens * tensors.heads * (2 * model.head_dim + model.value_head_dim)


def _norm(tensors: LayerTensors, role: Role) -> Node:
    """A norm of what nobody else keeps: behind attention or MLP, or of embeddings."""
    return Node(role.value, tensors.hidden + tensors.statistics, tensors.hidden, tensors.hidden)


def _norm_linear(
    tensors: LayerTensors,
    name: str,
    retained: int,
    normalised: int,
    output: int,
    *,
    module: str,
    transient: int,
    has_norm: bool = True,
) -> Node:
    """A norm fused with the column-parallel linear layer after it: input and normalised input are kept, the
    latter can be recomputed. Without a norm the product's input is kept alone."""
    full = tensors.gathered * retained // tensors.hidden if tensors.hidden else 0
    return Node(
        name,
        retained + normalised + tensors.statistics if has_norm else normalised,
        retained,
        transient,
        forward_bytes=full + output,
        backward_bytes=(2 * full) or retained,
        drops=((module, normalised),) if has_norm else (),
        weight_input_bytes=normalised,
        weight_gradient_bytes=output,
    )


def _mlp(tensors: LayerTensors, by_role: Mapping[Role, Operator]) -> Iterator[Node]:
    """Norm and up-product, activation, down-product."""
    hidden, activation = tensors.hidden, by_role[Role.ACTIVATION]
    up = tensors.tokens * tensors.held(activation.takes) * tensors.element
    # a fused norm and product are one module, of which the input is kept
    module = "norm" if tensors.profile.eager else "mlp"
    has_norm = tensors.plan.model.pre_norms
    made = _norm_linear(
        tensors, "mlp.up", hidden, tensors.normalised, up, module=module, transient=hidden, has_norm=has_norm
    )
    # in a parallel block attention keeps what the MLP takes
    yield made._replace(saved_bytes=0, drops=()) if tensors.plan.model.parallel_block else made
    yield from _activated(tensors, "mlp", activation, tensors.tokens, hidden, work=tensors.gathered, modules=("mlp",))


def _activated(
    tensors: LayerTensors,
    name: str,
    activation: Operator,
    tokens: int,
    transient: int,
    *,
    work: int,
    modules: tuple[str, ...],
) -> Iterator[Node]:
    """The activation, which keeps its input, and the down-product, which keeps the activation's output.

    Eager operations keep the activated gate too, a compiled MLP does not. `modules` recompute all; `mlp_act` and
    `moe_act` only what the activation makes.
    """
    units = tokens * tensors.held(activation.makes)
    up, out = tokens * tensors.held(activation.takes) * tensors.element, units * tensors.operand
    mask = MASK_BYTES * tensors.hidden // tensors.element if tensors.profile.dropout and name == "mlp" else 0
    eager = tensors.profile.eager and not (name == "mlp" and tensors.plan.runtime.compile)
    gate = units * tensors.element * _gate_tensors(tensors) if eager else 0
    alone = "moe_act" if name == "experts" else "mlp_act"
    drops = (*((module, up + gate) for module in modules), (alone, gate))
    yield Node(f"{name}.activation", up + gate, up, transient, forward_bytes=units * tensors.element, drops=drops)
    yield Node(
        f"{name}.down",
        out + mask,
        units * tensors.element,
        transient,
        forward_bytes=work + tensors.hidden,
        backward_bytes=work,
        drops=(*((module, out) for module in modules), (alone, out)),
        weight_input_bytes=out,
        weight_gradient_bytes=tensors.hidden,
    )


def _gate_tensors(tensors: LayerTensors) -> int:
    """Tensors as large as the units that eager operations keep of a gated activation besides its input: the activated
    gate; with limits both sides as they are clamped; of a gelu by a sigmoid what that takes and gives."""
    model = tensors.plan.model
    if not model.gated:
        return 0
    return 1 + 2 * (model.gate_limit is not None) + 2 * (model.activation == "quick_geglu")


def _experts(tensors: LayerTensors, by_role: Mapping[Role, Operator]) -> Iterator[Node]:
    """Norm, router, permutation and all-to-all, shared expert, experts, and the way back.

    The router keeps, per token and expert, softmax outputs of the routing and of the balancing loss (fp32 each), the
    mask of chosen experts, the mask within capacity and that of the balancing loss (a byte each) and the probabilities
    (moe/router.py), and the permutation its row map: two int32 a token and expert
    (transformer_engine/common/triton/permutation.py).
    """
    plan, model, hidden, e = tensors.plan, tensors.plan.model, tensors.hidden, tensors.element
    routed = tensors.routed_tokens
    permuted = routed * model.hidden_size * e
    sent = permuted // plan.layout.expert_tp
    tables = tensors.own_tokens * model.num_experts * (2 * STATISTIC_BYTES + 3 * MASK_BYTES + e)
    row_map = tensors.own_tokens * (2 * model.num_experts + 1) * 4
    normalised = 0 if model.parallel_block else tensors.normalised  # attention keeps what both take
    if has_norm := Role.MLP_NORM in by_role:
        yield Node("experts.norm", hidden + tensors.statistics, hidden, hidden)
    drops = (("moe", tables), ("norm", normalised if has_norm else 0))
    yield Node("experts.router", normalised + tables, hidden, 2 * hidden, drops=drops)
    yield Node("experts.permute", row_map, hidden, 2 * hidden, forward_bytes=sent, drops=(("moe", row_map),))
    exchange = 2 * sent if plan.layout.ep > 1 else 0
    yield Node("experts.dispatch", 0, sent, 2 * hidden, forward_bytes=exchange)
    if shared := by_role.get(Role.SHARED_ACTIVATION):
        shared_up = tensors.tokens * tensors.held(shared.takes) * e
        yield Node(
            "shared.up",
            0,
            hidden,
            hidden + permuted,
            forward_bytes=sent + shared_up,
            backward_bytes=2 * tensors.gathered,
            weight_gradient_bytes=shared_up,
        )
        work, modules = tensors.gathered, ("moe", "shared_experts")
        yield from _activated(tensors, "shared", shared, tensors.tokens, hidden + permuted, work=work, modules=modules)
        if model.shared_expert_gate:  # of what it weighs, and of each token one number
            weighed = hidden + tensors.own_tokens * e
            yield Node("shared.gate", weighed, hidden, hidden, drops=(("moe", weighed),))
    yield Node("experts.sort", 0, permuted, hidden, forward_bytes=sent + permuted)
    activation = by_role[Role.EXPERTS_ACTIVATION]
    up = routed * tensors.held(activation.takes) * e
    retained = routed * model.hidden_size * tensors.operand
    yield Node(
        "experts.up",
        retained,
        permuted,
        hidden,
        forward_bytes=up,
        drops=(("moe", retained),),
        weight_input_bytes=retained,
        weight_gradient_bytes=up,
    )
    yield from _activated(tensors, "experts", activation, routed, hidden, work=permuted, modules=("moe",))
    yield Node("experts.unsort", 0, permuted, hidden, forward_bytes=2 * permuted)
    yield Node("experts.combine", 0, sent, hidden, forward_bytes=exchange)
    yield Node("experts.unpermute", 0, sent, hidden, forward_bytes=sent + hidden)
