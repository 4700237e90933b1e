"""The gradients of one step by the formulas of a decoder (`decoder`), in fp64, differentiated by torch and without code
of the backend.

Which experts tokens go to, and which of them find no room, is held fixed at what the step's own forward chose, so that
the loss is smooth in every weight, routers' too; what dropout and noise draw follows from its definition (`draws`). The
rank that trained calls this: it has torch.

Shape suffixes: S tokens of the sequence, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.model.blocks import mtp_prefix
from ...core.model.parameters import expert_bias_name, parameters
from ...core.plan.plan import Plan
from .decoder import Decoder, Inputs
from .formulas import Array, chosen_experts, expert_loads, router_losses, router_scores

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRAPH_VALUES = 2**27
"""Values that autograd may keep of one sequence, 1 GiB; of more it keeps what goes into each layer, and goes through
that once more."""

Rounding = Callable[[Array], Array]
"""An array as a format leaves it."""


@dataclass(frozen=True)
class Step:
    """What a step is made from: `weights` by name, fp64 and rounded as products take them, the biases of experts among
    them; `sequences` in the order of the batch; of every router and sequence, by (layer, sample), what the step's own
    forward made: `logits` [S, E] and which experts worked on a token (`routed`, [S, E]); of somebody's own layers
    (`own_block`) the `outputs` [S, H]."""

    plan: Plan
    weights: Mapping[str, np.ndarray]
    sequences: Sequence[Inputs]
    num_counted: int
    loss_scale: float
    logits: Mapping[tuple[int, int], np.ndarray]
    routed: Mapping[tuple[int, int], np.ndarray]
    outputs: Mapping[tuple[int, int], np.ndarray]
    own_block: bool


@dataclass(frozen=True)
class Derivative:
    """What losses of tokens come to for each that counts; the gradients, by parameter, of what is minimised; and these
    `rounded`: of the same formulas with hidden states and their gradients rounded to the format. All fp64."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    rounded: Mapping[str, np.ndarray]


def tested_names(plan: Plan, *, own_block: bool) -> list[str]:
    """The parameters whose gradients follow from formulas: all of them; with somebody's own layers those behind the
    last of these."""
    model, names = plan.model, [each.name for each in parameters(plan.model)]
    if not own_block:
        return names
    last = mtp_prefix(model.num_mtp_layers - 1) if model.num_mtp_layers else "head"
    behind = [f"{last}.norm.weight", f"{last}.norm.bias"] + (
        ["head.output.weight"] if not model.tied_embeddings else []
    )
    return [name for name in names if name in behind]


def derivative(step: Step, device: torch.device) -> Derivative:
    """The loss of a step and its gradients, sequence by sequence, computed on `device`."""
    loss, gradients = _differentiated(step, device, lambda x: x, lambda x: x)
    stored, single = _rounding(step.plan.precision.dtype), _rounding("fp32")
    return Derivative(loss, gradients, _differentiated(step, device, stored, single)[1])


def _differentiated(step: Step, device: Any, stored: Rounding, single: Rounding) -> tuple[float, dict[str, np.ndarray]]:
    """With hidden states, and what is always computed in fp32, as two functions leave them."""
    import torch

    wanted = tested_names(step.plan, own_block=step.own_block)
    leaves = {
        name: torch.tensor(values, device=device, requires_grad=name in wanted) for name, values in step.weights.items()
    }
    loss, scale = 0.0, step.num_counted * step.loss_scale
    for inputs in step.sequences:
        sequence = _Differentiated(step, inputs, leaves, stored, single)
        losses = sequence.losses()
        ((losses + sequence.added()) * step.loss_scale).backward()
        loss += float(losses.detach()) / step.num_counted
    return loss, {name: _filled(leaves[name]).cpu().numpy() / scale for name in wanted}


def _filled(leaf: Any) -> Any:
    return leaf.new_zeros(leaf.shape) if leaf.grad is None else leaf.grad


def _rounding(dtype: str) -> Rounding:
    """A function that rounds to a format, and the gradient of what it gives too."""
    import torch

    narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> object:
            return x.to(narrow).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Tensor:
            return gradient.to(narrow).to(gradient.dtype)

    return Rounded.apply


def _graph_values(plan: Plan) -> int:
    """About what autograd keeps of a sequence: four squares of scores of every head, and the hidden states of every
    layer."""
    model, length = plan.model, plan.batch.sequence
    width = model.expert_width * model.experts_per_token if model.is_moe else model.ffn_hidden_size
    return model.num_layers * length * (4 * model.num_heads * length + 16 * model.hidden_size + 8 * width)


class _Differentiated(Decoder):
    """Routing is what was recorded. `routers` has what each of them adds to the loss, for every token."""

    def __init__(self, step: Step, inputs: Inputs, leaves: Mapping[str, object], stored: Rounding, single: Rounding):
        super().__init__(step.plan, inputs, leaves.__getitem__)
        self.step, self._stored, self._single = step, stored, single
        self.routers: list[Array] = []

    def shown(self, name: str, x: Array) -> Array:
        return x if name.endswith((".router", ".losses")) else self.stored(x)

    def stored(self, x: Array) -> Array:
        return self._stored(x)

    def single(self, x: Array) -> Array:
        return self._single(x)

    def losses(self) -> Array:
        """The sum over the sequence's tokens of the model's losses and, times their weight, of the mean over modules of
        those of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, equation 25)."""
        own_S, *ahead = self.run()
        weight = self.plan.train.mtp_loss_weight / max(1, len(ahead))
        return own_S.sum() + weight * sum(losses_S.sum() for losses_S in ahead)

    def added(self) -> Array:
        """What routers add to that: their mean over all tokens of a step, be they counted or not, once for each token
        that counts."""
        share = self.step.num_counted / (self.plan.batch.global_size * self.plan.batch.sequence)
        return share * sum(added_S.sum() for added_S in self.routers)

    def run(self) -> list[Array]:
        return self.head(self._output(self.model.num_layers - 1)) if self.step.own_block else super().run()

    def layer(self, layer: int, x_SH: Array) -> Array:
        if self.step.own_block:
            return self._output(layer)
        if _graph_values(self.plan) <= GRAPH_VALUES:
            return super().layer(layer, x_SH)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().layer, layer, x_SH, use_reentrant=False)

    def _output(self, layer: int) -> Array:
        import torch

        weight = self.weight("head.norm.weight")
        return torch.tensor(self.step.outputs[layer, self.inputs.sample], dtype=weight.dtype, device=weight.device)

    def chosen(self, layer: int, logits_SE: Array) -> tuple[np.ndarray, np.ndarray]:
        """As the step's own forward chose. A token that found no room somewhere had chosen what the formulas say,
        unless these rank two that are equal but for rounding in another way; then it had what it got."""
        model, train, place = self.model, self.plan.train, (layer, self.inputs.sample)
        scores_SE, routed_SE = router_scores(self.step.logits[place], model), self.step.routed[place]
        bias = self.step.weights[expert_bias_name(layer)] if model.expert_bias else 0.0
        chosen_SE, _ = chosen_experts(scores_SE + bias, model)
        if train.adds_router_losses:
            load_E = logits_SE.new_tensor(expert_loads(scores_SE, model)[0])
            self.routers.append(
                router_losses(logits_SE, load_E, model, aux=train.router_aux_loss, z=train.router_z_loss)
            )
        return np.where((routed_SE & ~chosen_SE).any(-1, keepdims=True), routed_SE, chosen_SE), routed_SE
