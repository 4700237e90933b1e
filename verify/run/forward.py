"""A decoder's forward of one sequence held to its formulas: what each activation of a ledger must be, given the
recorded ones that go into it.

Every part is held for itself, from inputs that were rounded already: rounding does not grow from layer to layer, and a
part that is wrong is named alone. So are the gradients of routers' logits, from those of their layers' results. Experts
with room for a limited number of tokens are left out.

Shape suffixes: S tokens of the sequence, H hidden, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...core.model.blocks import layer_prefix, mtp_prefix
from ...core.model.model import ModelSpec
from ...core.model.parameters import expert_bias_name
from ...core.plan.plan import Plan
from .decoder import Decoder, Inputs
from .formulas import chosen_experts, expert_loads, expert_weights, rounded, router_losses, router_scores

DIFFERENCE = 1e-5
"""What logits are moved by for a gradient; the error is its square."""

MOST_VALUES = 2**26
"""Activations that are kept, all together: of as many layers as there is room for, from the first."""


@dataclass(frozen=True)
class Recorded:
    """One recorded sequence: what it is made from, and activations by name, [S, ...]. `weight` gives parameters by
    name, fp64."""

    inputs: Inputs
    values: Mapping[str, np.ndarray]
    weight: Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Made:
    """What an activation must be: `values` [S, ...], NaN in rows of which that is not known, to the rounding of a
    format, of numbers of a size that `cancelled` in it, too."""

    name: str
    values: np.ndarray
    dtype: str
    cancelled: float = 0.0

    def off(self, found: np.ndarray) -> np.ndarray:
        """[S]: how far tokens of `found` are away, as a share of their norm and of the mean of all tokens'; 0
        where nothing is known."""
        right, wrong = (each.reshape(len(found), -1) for each in (self.values, found))
        known = ~np.isnan(right).any(1)
        norms = np.linalg.norm(right, axis=1)
        usual = math.sqrt(float(np.square(norms[known]).mean())) if known.any() else 0.0
        size = norms + usual + self.cancelled
        distance = np.linalg.norm(wrong - right, axis=1)
        return np.where(known, np.divide(distance, size, out=np.where(distance > 0, np.inf, 0.0), where=size > 0), 0.0)


def samples_checked(plan: Plan) -> list[int]:
    """The sequences of a step whose activations are kept: the first and the last, of which one may
    be nothing but spaces."""
    return sorted({0, plan.batch.global_size - 1})


def layers_checked(plan: Plan) -> range:
    """The layers whose activations are kept."""
    model = plan.model
    return range(min(model.num_layers, max(1, MOST_VALUES // (12 * plan.batch.sequence * model.hidden_size))))


def activation_names(plan: Plan) -> list[str]:
    """The recorded activations that `made` works from."""
    model, names = plan.model, ["embedding.output"]
    ahead = [model.num_layers + depth for depth in range(model.num_mtp_layers)]
    for layer in (*layers_checked(plan), *ahead):
        before, behind = ("attention.norm", "attention", "attention.post_norm"), ("mlp", "mlp.post_norm", "output")
        parts = (*before, "mlp.norm", "mlp.router", *behind)  # those that there are
        names += [f"{layer_prefix(layer)}.{part}" for part in parts]
    names += [f"{layer_prefix(model.num_layers - 1)}.output", "head.losses"]
    names += [f"{mtp_prefix(depth)}.{part}" for depth in range(len(ahead)) for part in ("projection", "losses")]
    return list(dict.fromkeys(names))


def routed_layers(plan: Plan) -> list[int]:
    """The layers whose routers' gradients are checked: in fp32, without noise of their own and without
    experts of limited room."""
    model = plan.model
    if plan.precision.dtype != "fp32" or plan.train.router_jitter or model.expert_capacity_factor is not None:
        return []
    layers = (*layers_checked(plan), *range(model.num_layers, model.num_layers + model.num_mtp_layers))
    return [layer for layer in layers if model.layer_is_moe(layer)]


def gradient_names(plan: Plan) -> list[str]:
    """The tensors of which `router_gradients` needs the gradients."""
    return [f"{layer_prefix(layer)}.mlp{part}" for layer in routed_layers(plan) for part in ("", ".router")]


def router_gradients(
    plan: Plan, sequence: Recorded, gradients: Mapping[str, np.ndarray], share: float
) -> Iterator[Made]:
    """What the gradients of routers' logits must be, from those of their layers' results; `share` is how much what a
    router adds for a token counts with the token's loss: the tokens that count over all tokens."""
    forward = _Checked(plan, sequence, own_block=False)
    for layer in routed_layers(plan):
        name = f"{layer_prefix(layer)}.mlp"
        recorded = {*_before_mlp(plan.model, layer), f"{name}.router"}
        if {name, f"{name}.router"} <= gradients.keys() and recorded <= sequence.values.keys():
            yield forward.router_gradient(layer, gradients[name], share)


def made(plan: Plan, sequence: Recorded, *, own_block: bool) -> list[Made]:
    """What recorded activations must be, in the order of the forward. Of somebody's own layers (`own_block`) only
    what lies around them."""
    forward = _Checked(plan, sequence, own_block=own_block)
    forward.run()
    return forward.made


class _Checked(Decoder):
    """Every activation is made from the recorded ones before it."""

    def __init__(self, plan: Plan, sequence: Recorded, *, own_block: bool):
        dtype = plan.precision.dtype
        super().__init__(plan, sequence.inputs, lambda name: as_multiplied(name, sequence.weight(name), dtype))
        self.values, self.own_block = sequence.values, own_block
        self.made: list[Made] = []
        self._unclear = np.zeros(0, bool)

    def shown(self, name: str, x: np.ndarray) -> np.ndarray:
        if name not in self.values:
            return x
        exact, cancelled = name.endswith(".mlp.router"), 0.0
        if name.endswith(".mlp") and len(self._unclear):
            x, self._unclear = np.where(self._unclear[:, None], np.nan, x), np.zeros(0, bool)
        if name.endswith(".losses"):
            cancelled = self._largest_logit
        self.made.append(Made(name, x, "fp32" if exact else self.plan.precision.dtype, cancelled=cancelled))
        return self.values[name]

    def stored(self, x: np.ndarray) -> np.ndarray:
        return rounded(x, self.plan.precision.dtype)

    def layer(self, layer: int, x_SH: np.ndarray | None) -> np.ndarray | None:
        """What a layer gives; None where that is neither recorded nor made from what is."""
        prefix = layer_prefix(layer)
        if x_SH is None or self.own_block or f"{prefix}.mlp" not in self.values:
            return self.values.get(f"{prefix}.output")
        return super().layer(layer, x_SH)

    def head(self, x_SH: np.ndarray | None) -> list[np.ndarray]:
        return [] if x_SH is None else super().head(x_SH)

    def logits(self, normed_SH: np.ndarray) -> np.ndarray:
        logits = super().logits(normed_SH)
        self._largest_logit = float(np.abs(logits).max())
        return logits

    def chosen(self, layer: int, logits_SE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chosen_SE, clear_S = self._choice(router_scores(logits_SE, self.model), layer)
        limited = self.model.expert_capacity_factor is not None
        self._unclear = np.ones(len(clear_S), bool) if limited else ~clear_S
        return chosen_SE, chosen_SE

    def _choice(self, scores_SE: np.ndarray, layer: int) -> tuple[np.ndarray, np.ndarray]:
        bias = self.weight(expert_bias_name(layer)) if self.model.expert_bias else 0.0
        return chosen_experts(scores_SE + bias, self.model)

    def router_gradient(self, layer: int, dy_SH: np.ndarray, share: float) -> Made:
        """The gradient of a router's logits, by differences: of what the gradient `dy_SH` of the layer's result says of
        the weights of experts, and of what the router adds to the loss, `share` of it for each token."""
        model, train, name = self.model, self.plan.train, f"{layer_prefix(layer)}.mlp"
        x_SH, logits_SE = self._taken(layer), self.values[f"{name}.router"]
        scores_SE = router_scores(logits_SE, model)
        (chosen_SE, clear_S), (load_E, plain_clear_S) = self._choice(scores_SE, layer), expert_loads(scores_SE, model)
        said_SE, size = np.zeros_like(logits_SE), 0.0
        for expert, (rows, results) in enumerate(self.results(name, x_SH, chosen_SE)):
            said_SE[rows, expert] = (results * dy_SH[rows]).sum(-1)
            if len(rows):
                size = max(size, float((np.linalg.norm(results, axis=-1) * np.linalg.norm(dy_SH[rows], axis=-1)).max()))

        def minimised(logits_SE: np.ndarray) -> np.ndarray:
            added_S = router_losses(logits_SE, load_E, model, aux=train.router_aux_loss, z=train.router_z_loss)
            weights_SE = expert_weights(router_scores(logits_SE, model), chosen_SE, model)
            return np.asarray((weights_SE * said_SE).sum(-1) + share * added_S)

        moves = np.eye(model.num_experts) * DIFFERENCE
        found_SE = np.stack(
            [(minimised(logits_SE + move) - minimised(logits_SE - move)) / (2 * DIFFERENCE) for move in moves], -1
        )
        found_SE[~clear_S | (not plain_clear_S.all() and bool(train.router_aux_loss))] = np.nan
        return Made(f"{name}.router", found_SE, "fp32", cancelled=size * model.router_scaling)

    def _taken(self, layer: int) -> np.ndarray:
        """What the MLP of a layer takes, from what is recorded before it."""
        first, *attended = (self.values[name] for name in _before_mlp(self.model, layer))
        if not attended:
            return first
        return self.stored(self._added(first, f"{layer_prefix(layer)}.attention", attended[0]))


def _before_mlp(model: ModelSpec, layer: int) -> tuple[str, ...]:
    """The recorded activations that the MLP's input of a layer follows from: a norm, or where there is none before MLPs
    what goes into the layer and what its attention makes."""
    prefix = layer_prefix(layer)
    if model.pre_norms:
        return (f"{prefix}.{'attention' if model.parallel_block else 'mlp'}.norm",)
    if layer >= model.num_layers:
        return f"{mtp_prefix(layer - model.num_layers)}.projection", f"{prefix}.attention"
    return "embedding.output" if layer == 0 else f"{layer_prefix(layer - 1)}.output", f"{prefix}.attention"


def as_multiplied(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """A parameter as products take it: rounded to their format, but for what routers work with."""
    return values if ".router." in name else rounded(values, dtype)
