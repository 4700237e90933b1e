"""Formulas of a decoder in fp64: activations, and which experts a router's scores choose.

Arrays are numpy's, or torch's where derivatives are wanted: what is called here has one name and one meaning in both.

Shape suffixes: S tokens of the sequence, E experts.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.model.model import ModelSpec
from ..ledger.relations import in_bf16

if TYPE_CHECKING:
    from types import ModuleType

Array = Any
"""fp64, of numpy or of torch."""

CLOSE_SCORES = 1e-5
"""Experts whose scores are nearer to each other may be chosen either way; such tokens are not looked at."""

_erf = np.frompyfunc(math.erf, 1, 1)


def library(x: Array) -> ModuleType:
    """The module whose functions take an array: numpy, or torch, which whoever made the array has loaded."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def same_kind(x: Array, values: np.ndarray) -> Array:
    """Values as an array of the library that `x` is of, on its device."""
    return values if isinstance(x, np.ndarray) else library(x).as_tensor(values, device=x.device)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """fp64 values, as they are after rounding to a format."""
    return in_bf16(x) if dtype == "bf16" else x.astype(np.float16 if dtype == "fp16" else np.float32).astype(np.float64)


def router_scores(logits_SE: Array, model: ModelSpec) -> Array:
    """[S, E]: scores of a router's logits."""
    return softmax(logits_SE) if model.router_scores == "softmax" else sigmoid(logits_SE)


def expert_weights(scores_SE: Array, chosen_SE: Array, model: ModelSpec) -> Array:
    """[S, E]: what the results of the chosen experts count."""
    weights_SE = library(scores_SE).where(chosen_SE, scores_SE, 0.0)
    if model.normalized_router_weights:
        weights_SE = weights_SE / weights_SE.sum(-1, keepdims=True)
    return weights_SE * model.router_scaling


def expert_loads(scores_SE: np.ndarray, model: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """[E]: the share of a sequence's choices that scores alone would give each expert, over an even share (DeepSeek-V3,
    arXiv 2412.19437, equation 18); and [S] whether rounding could not have made them others."""
    plain_SE, clear_S = highest(scores_SE, model.experts_per_token)
    return plain_SE.sum(0) * model.num_experts / (len(scores_SE) * model.experts_per_token), clear_S


def router_losses(logits_SE: Array, load_E: Array, model: ModelSpec, *, aux: float, z: float) -> Array:
    """[S]: what a router adds to the loss for each token: a load balance of sequences (DeepSeek-V3, equations 17-20)
    and the square of log sum exp (ST-MoE, arXiv 2202.08906, equation 5)."""
    scores_SE = router_scores(logits_SE, model)
    shares_SE = scores_SE / scores_SE.sum(-1, keepdims=True)
    return aux * (shares_SE * load_E).sum(-1) + z * log_sum(logits_SE) ** 2


def chosen_experts(scores_SE: np.ndarray, model: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Which experts each token takes, [S, E], and [S] whether rounding could not have made it others."""
    clear = np.ones(len(scores_SE), bool)
    if model.num_router_groups:
        members = np.sort(scores_SE.reshape(len(scores_SE), model.num_router_groups, -1), -1)
        best = members[..., -1] if model.router_group_scores == "max" else members[..., -2:].sum(-1)
        groups, clear = highest(best, model.router_groups_per_token)
        scores_SE = np.where(np.repeat(groups, members.shape[-1], -1), scores_SE, -np.inf)
    chosen, also_clear = highest(scores_SE, model.experts_per_token)
    return chosen, clear & also_clear


def highest(scores: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The `number` largest of every row as a mask, and whether they are clearly larger than the others."""
    order = np.argsort(-scores, -1, kind="stable")
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order[:, :number], True, -1)
    if number == scores.shape[1]:
        return mask, np.ones(len(scores), bool)
    last, next_one = (np.take_along_axis(scores, order[:, place, None], -1)[:, 0] for place in (number - 1, number))
    return mask, last - next_one > CLOSE_SCORES * np.abs(last)


def softmax(x: Array) -> Array:
    """Shares over the last dimension."""
    exponentials = library(x).exp(x - library(x).amax(x, -1)[..., None])
    return exponentials / exponentials.sum(-1, keepdims=True)


def log_sum(x: Array) -> Array:
    """log sum exp over the last dimension."""
    largest = library(x).amax(x, -1)
    return library(x).log(library(x).exp(x - largest[..., None]).sum(-1)) + largest


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 0.5 + 0.5 * library(x).tanh(0.5 * x)


def gelu(x: Array) -> Array:
    """x times the normal distribution's share below it."""
    erf = (
        np.asarray(_erf(x / math.sqrt(2)), dtype=np.float64)
        if isinstance(x, np.ndarray)
        else library(x).erf(x / math.sqrt(2))
    )
    return 0.5 * x * (1 + erf)


def gelu_tanh(x: Array) -> Array:
    """Its approximation by a hyperbolic tangent (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return 0.5 * x * (1 + library(x).tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
