"""Memory-bound work of every block: what its kernels other than products read and write, for
one microbatch on one rank.

Each function returns the traffic of one piece of a block, in the units of Korthikanti et al. 2022, section 4: tensors
are tokens times width, and every kernel reads its inputs and writes its outputs once. What a stack fuses is in
`simulator.stack.profiles`. All modelled: a kernel that is fused otherwise, or cached in part, moves less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...core.model.operators import Operator
from ...core.model.roles import Role
from ...core.model.rotary import rotary_growth
from ...core.plan.plan import Plan
from ...core.program import Group
from ..compute.compute import ELEMENT_BYTES
from ..stack.profile import Profile


class Traffic(NamedTuple):
    """Bytes that the kernels of one piece move, and how many kernels there are, forward and backward."""

    forward_bytes: float = 0.0
    forward_kernels: int = 0
    backward_bytes: float = 0.0
    backward_kernels: int = 0

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(
            self.forward_bytes + other.forward_bytes,
            self.forward_kernels + other.forward_kernels,
            self.backward_bytes + other.backward_bytes,
            self.backward_kernels + other.backward_kernels,
        )

    def times(self, elements: float, calls: int = 1) -> Traffic:
        """Traffic given per element, for so many elements in so many calls."""
        return Traffic(
            self.forward_bytes * elements,
            self.forward_kernels * calls,
            self.backward_bytes * elements,
            self.backward_kernels * calls,
        )


EAGER_RMSNORM = Traffic(36, 7, 60, 14)
"""Bytes per 16-bit element of an RMSNorm whose steps are kernels of PyTorch: to fp32 (2 + 4), square (4 + 4), mean (4),
product with the inverse root (4 + 4), to 16 bits (4 + 2), product with the weight (2 + 2) and what they hand on;
backward each step's gradient, two operands read and one written. Counted (aten/src/ATen/native/layer_norm.cpp,
rms_norm)."""

EAGER_ROTATION = Traffic(20, 6, 20, 6)
"""Bytes per 16-bit element of a rotation by complex products in fp32: to fp32 (2 + 4), product (4 + 4), back (4 + 2)
(torchtitan/models/llama3/model.py, apply_rotary_emb); kernels for queries and keys."""

STEPPED_ROTATION = Traffic(24, 12, 28, 12)
"""Bytes per 16-bit element of Megatron's rotation in steps (rope_utils.py, _apply_rotary_pos_emb_bshd): times the
cosines (2 + 2), halves negated (1 + 1) and exchanged (2 + 2), times the sines (2 + 2), sum (4 + 2), joined with what is
not rotated (2 + 2); backward the same but for that copy, gradients of both uses added (4 + 2) and those of the empty
rest filled (2); kernels for queries and keys."""

EXPERT_BIAS = Traffic(28, 2, 40, 2)
"""Bytes per 16-bit element of experts' results to which Megatron adds biases expert by expert (experts.py,
_apply_bias): the bias times the tokens' fp32 weights (4), the sum (2 + 4 + 4), joined (4 + 4) and to 16 bits (4 + 2);
backward the two casts (2 + 4, 4 + 2), the gradients split from each other put together (2 + 2), and a product and its
sum for the biases and for the weights (4 + 4 + 4 each)."""

EXPERT_BIAS_CALLS = (2, 6)
"""Calls per expert of `EXPERT_BIAS`, forward and backward; PyTorch's own, none with the stack around it."""

EAGER_GATE = Traffic(10, 2, 18, 3)
"""Bytes per 16-bit element of silu(gate) * up in two kernels: (2 + 2) and (4 + 2); backward (4
+ 2) twice and (4 + 2)."""

EAGER_LIMITS = Traffic(12, 3, 12, 2)
"""Bytes per 16-bit element of what limits a gate and moves its up-projection: two clamps and a sum (2 + 2 each),
backward two masks (4 + 2 each)."""

EAGER_SQUARED_RELU = Traffic(8, 2, 20, 4)
"""Bytes per 16-bit element of relu(x) ** 2 in two kernels: (2 + 2) each; backward the base copied as its first power (2
+ 2), doubled (2 + 2), times the gradient (4 + 2), and the gradient masked (4 + 2) (PyTorch,
tools/autograd/derivatives.yaml, `pow` and `relu`)."""

ROUTER_KERNELS = 8
"""Kernels of a router besides its product: scores, top-k, normalisation, token counts, auxiliary loss, index maps
(Megatron-Core moe_utils.py, unfused). Counted, approximately."""


HIDDEN_NORMS = (Role.ATTENTION_NORM, Role.ATTENTION_POST_NORM, Role.MLP_NORM, Role.MLP_POST_NORM)
"""The norms of a layer's hidden states."""


@dataclass(frozen=True)
class _Sizes:
    """What the tables multiply: tokens of a rank inside and outside the cut layers, and bytes per element."""

    plan: Plan

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.plan.precision.dtype]

    @property
    def tokens(self) -> float:
        return self.plan.batch.micro_size * self.plan.batch.sequence / self.plan.layout.cp

    @property
    def own_tokens(self) -> float:
        return self.tokens / (self.plan.layout.tp if self.plan.layout.sequence_parallel else 1)

    @property
    def hidden_bytes(self) -> float:
        """One hidden state as it lies between cut layers."""
        return self.own_tokens * self.plan.model.hidden_size * self.element


def group_traffic(plan: Plan, profile: Profile, group: Group) -> Mapping[str, Traffic]:
    """The pieces of one part of a stage."""
    match group.kind:
        case "embedding":
            return {"embedding": embedding_traffic(plan, profile)}
        case "head":
            return {"head": head_traffic(plan, profile)}
        case "prediction":
            return {
                **layer_traffic(plan, profile, group.operators),
                "embedding": embedding_traffic(plan, profile) + _norms(plan, profile),
                "head": head_traffic(plan, profile),
            }
        case "layer":
            return layer_traffic(plan, profile, group.operators)


def layer_traffic(plan: Plan, profile: Profile, operators: Iterable[Operator]) -> Mapping[str, Traffic]:
    """The pieces of one transformer layer by the names of `recompute.modules`, with `residual` and
    `attention` for the rest."""
    by_role = {operator.role: operator for operator in operators}
    pieces = {
        "norm": _norms(plan, profile, sum(role in HIDDEN_NORMS for role in by_role)),
        "residual": _residuals(plan, profile),
        "attention": _attention(plan, profile, by_role),
    }
    if experts := by_role.get(Role.EXPERTS_ACTIVATION):
        routing = _routing(plan)
        if by_role[Role.EXPERTS_UP].bias:
            routing += _expert_biases(plan, profile, experts)
        if Role.SHARED_GATE in by_role:
            routing += _weighed(plan)
        pieces |= {"moe_act": _activation(plan, profile, _routed_tokens(plan) * experts.makes.size), "moe": routing}
    for module, role in (("shared_experts", Role.SHARED_ACTIVATION), ("mlp", Role.ACTIVATION)):
        if dense := by_role.get(role):
            biased = plan.model.bias or plan.model.mlp_bias
            pieces[module] = _mlp(plan, profile, dense.makes.size, biased=biased)
    return pieces


def _norms(plan: Plan, profile: Profile, count: int = 2) -> Traffic:
    """So many norms: read and write; backward reads the input and the gradient and writes one, then sums the weights'
    gradients. An RMSNorm in steps goes through `EAGER_RMSNORM`."""
    hidden, element = _Sizes(plan).hidden_bytes, ELEMENT_BYTES[plan.precision.dtype]
    if profile.fused_elementwise or plan.model.norm == "layernorm":
        return Traffic(count * 2 * hidden, count, count * 3 * hidden, 2 * count)
    return EAGER_RMSNORM.times(count * hidden / element, count)


def _factor(plan: Plan, profile: Profile, times: float, count: int) -> Traffic:
    """A hidden state times a factor other than 1, so often: a kernel each way unless it is part of others."""
    if times == 1 or profile.fused_elementwise:
        return Traffic()
    moved = count * 2 * _Sizes(plan).hidden_bytes
    return Traffic(moved, count, moved, count)


def _weighed(plan: Plan) -> Traffic:
    """Shared experts times their gate; backward the product and a sum of each row of another."""
    hidden = _Sizes(plan).hidden_bytes
    return Traffic(2 * hidden, 2, 4 * hidden, 3)


def _residuals(plan: Plan, profile: Profile) -> Traffic:
    """Two additions (bias and dropout in the same kernel); backward adds the two gradients that meet, and
    passes the dropout's mask."""
    sizes = _Sizes(plan)
    scaled = _factor(plan, profile, plan.model.residual_multiplier, 2)
    mask = sizes.hidden_bytes / sizes.element if profile.dropout else 0.0
    dropped = (2 * sizes.hidden_bytes + mask) if profile.dropout else 0.0
    return scaled + Traffic(
        2 * (3 * sizes.hidden_bytes + mask), 2, 2 * (3 * sizes.hidden_bytes + dropped), 4 if profile.dropout else 2
    )


def _attention(plan: Plan, profile: Profile, by_role: Mapping[Role, Operator]) -> Traffic:
    """Rotation of queries and keys and norms of heads (read and write), the copy of the context where
    scores are unfused; backward the same, the gradients of queries, keys and values put together, and the
    sums of bias gradients."""
    sizes, model, tp = _Sizes(plan), plan.model, plan.layout.tp
    unit = sizes.tokens * sizes.element / tp
    queries, values = unit * model.num_heads * model.head_dim, unit * model.num_heads * model.value_head_dim
    keys = unit * model.num_kv_heads * (model.head_dim + model.value_head_dim)
    rotated = queries + keys / 2
    low_rank = sum(by_role[role].makes.size for role in (Role.QUERIES_DOWN, Role.KEYS_DOWN) if role in by_role)
    if low_rank:  # position parts only, but head by head they are put together with the rest in new tensors
        latent = sizes.own_tokens * sizes.element * low_rank
        return Traffic(
            2 * (queries + keys) + 2 * latent, 6, 2 * (queries + keys) + 3 * latent + 2 * (queries + keys), 8
        )
    turns = by_role[Role.CORE].turns
    stepped = profile.scaled_rotation_in_steps and turns and rotary_growth(model) != 1
    eager = stepped or (turns and not profile.fused_elementwise)
    rotation = STEPPED_ROTATION if stepped else EAGER_ROTATION
    extra = rotation.times(rotated / sizes.element) if eager else Traffic()
    norms = int(model.qk_norm or model.whole_qk_norm)
    passes = int(turns and not eager) + norms
    copied = 0.0 if profile.fused_attention else 2 * values
    has_biases = by_role[Role.QKV].bias, by_role[Role.ATTENTION_OUTPUT].bias
    biased = has_biases[0] * (queries + keys) + has_biases[1] * sizes.hidden_bytes
    return extra + Traffic(
        2 * passes * rotated + copied,
        passes + int(not profile.fused_attention),
        (2 + norms) * passes * rotated + copied + 2 * (queries + keys) + biased,
        passes + int(not profile.fused_attention) + 1 + sum(has_biases),
    )


def _mlp(plan: Plan, profile: Profile, width: int, *, biased: bool) -> Traffic:
    """The activation of a dense MLP, and backward the sums of its bias gradients."""
    sizes = _Sizes(plan)
    activation = _activation(plan, profile, sizes.tokens * width / plan.layout.tp)
    if not biased:
        return activation
    summed = sizes.tokens * width * sizes.element / plan.layout.tp + sizes.hidden_bytes
    return activation + Traffic(backward_bytes=summed, backward_kernels=2)


def _activation(plan: Plan, profile: Profile, elements: float) -> Traffic:
    """One kernel: reads the product's output (gate and up), writes the activation; backward reads all of
    them and writes as many."""
    if plan.model.gated and not profile.fused_elementwise:
        limited = plan.model.gate_limit is not None
        return EAGER_GATE.times(elements) + (EAGER_LIMITS.times(elements) if limited else Traffic())
    if plan.model.activation == "relu_squared" and not profile.fused_squared_relu:
        return EAGER_SQUARED_RELU.times(elements)
    inputs, num_bytes = 2 if plan.model.gated else 1, elements * ELEMENT_BYTES[plan.precision.dtype]
    return Traffic((inputs + 1) * num_bytes, 1, (2 * inputs + 1) * num_bytes, 1)


def _routed_tokens(plan: Plan) -> float:
    """Copies of tokens that the experts of a rank see when all are equally busy; the width of an expert cut over etp is
    made up for by the tokens gathered from the etp ranks."""
    return _Sizes(plan).own_tokens * plan.model.experts_per_token


def _routing(plan: Plan) -> Traffic:
    """Router scores in fp32; tokens put in the order of experts and back, on either side of the exchange: two
    reorderings forward (each read and written), the weighted sum of the copies, and the same backward (Megatron-Core
    token_dispatcher.py, all-to-all). Those next to the experts move what was gathered from all ranks that share one."""
    sizes, model = _Sizes(plan), plan.model
    copies = _routed_tokens(plan) * model.hidden_size * sizes.element
    local = model.num_experts // plan.layout.ep > 1
    permuted = sizes.hidden_bytes + copies
    gathered = copies * (plan.layout.expert_tp if plan.layout.sequence_parallel else 1)
    moved = 2 * permuted + (4 * gathered if local else 0.0)
    scores = 4 * sizes.own_tokens * model.num_experts * ROUTER_KERNELS
    return Traffic(
        moved + scores, ROUTER_KERNELS + (4 if local else 2), moved + scores, ROUTER_KERNELS + (4 if local else 2)
    )


def _expert_biases(plan: Plan, profile: Profile, activation: Operator) -> Traffic:
    """Sums of the experts' bias gradients, and their results' biases where the stack adds those in steps."""
    model, copies = plan.model, _routed_tokens(plan)
    sums = Traffic(
        backward_bytes=copies * (activation.takes.size + model.hidden_size) * _Sizes(plan).element, backward_kernels=2
    )
    if not profile.expert_bias_in_steps:
        return sums
    local = model.num_experts // plan.layout.ep
    added = EXPERT_BIAS.times(copies * model.hidden_size)
    calls = [round(local * each / profile.host_calls) for each in EXPERT_BIAS_CALLS]
    return sums + added + Traffic(forward_kernels=calls[0], backward_kernels=calls[1])


def embedding_traffic(plan: Plan, profile: Profile) -> Traffic:
    """Forward reads and writes each token's row (and adds its position's, or norms it); backward adds rows into an
    fp32 table."""
    sizes = _Sizes(plan)
    hidden = sizes.tokens * plan.model.hidden_size
    mask = hidden / plan.layout.tp if profile.dropout else 0.0
    scaled = _factor(plan, profile, plan.model.embedding_multiplier, 1)
    scaled += _norms(plan, profile, int(plan.model.embedding_norm))
    return scaled + Traffic(4 * hidden * sizes.element + mask, 3, hidden * (sizes.element + 8) + mask, 3)


def head_traffic(plan: Plan, profile: Profile) -> Traffic:
    """Final norm, and the cross-entropy over local logits.

    Step by step in fp32 (Megatron-Core cross_entropy.py): cast (6 bytes a logit), maximum (4), difference,
    exponentials, their sum, quotient (28); backward the gradient in place (8) and its cast (6). Fused: cast with
    maximum, exponentials with their sum, quotient (22); backward one pass that reads fp32 and writes 16 bits (6).
    """
    sizes = _Sizes(plan)
    logits = sizes.tokens * plan.model.vocab_size / plan.layout.tp
    forward, backward, kernels = (22, 6, 4) if profile.fused_loss else (38, 14, 8)
    return _factor(plan, profile, plan.model.logit_multiplier, 1) + Traffic(
        2 * sizes.hidden_bytes + forward * logits, 1 + kernels, 3 * sizes.hidden_bytes + backward * logits, 3
    )
