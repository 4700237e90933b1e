"""How far fast numerics may be from exact ones: a bound for every canonical tensor of a step, from its number
of terms and the format.

A sum of n products in floating point is, in any order, any blocking and with or without fused multiply-adds, the exact
sum of terms each of which is off by a factor 1 + t, |t| <= gamma(n) = n u / (1 - n u), u the unit roundoff (Higham
2002, Accuracy and Stability of Numerical Algorithms, lemma 3.1 and section 3.1); factors along a path multiply to at
most gamma(m + n) (lemma 3.3). So what counts for a tensor is the number of terms on the longest path to it: those of
every product, norm, softmax and sum over tokens that lies before it. Two orders of the same sums are then at most 2
gamma(n) times the sum of magnitudes apart.

Hidden states that are kept in bf16 are rounded once per layer operation. The worst case of a hundred such roundings
says nothing, so for them it is the bound that is left with certainty but for a chance of 4e-8 an element, which
grows like sqrt(n) (Higham & Mary 2019, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
Comput. 41(5), theorem 2.4).

What is dropped: the sum of magnitudes is replaced by the largest value of the tensor, so the layers on a path of n
terms must not magnify an error by more than n over sqrt(n), what roundings really add up to. They do not: a norm keeps
relative errors, residual sums and sums over tokens make them smaller. A step that starts from other weights is not
bounded so: AdamW divides a gradient by its own size, and the smallest elements are rounding alone. Every step is
therefore compared from equal weights and moments, and an update is bounded by its largest size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...core.model.model import ModelSpec
from ...core.model.parameters import Parameter, parameters
from ...core.plan.plan import Plan
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    NO_STEP,
    OPTIMIZER,
    SCALAR,
    WEIGHT,
    Key,
)
from ..ledger.relations import section_of
from .sgd import momentum_of
from .updates import is_frozen, kind_of, rate_and_decay

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half the distance from 1 to the next number: 24, 8 and 11 bits of significand (IEEE 754; bfloat16 keeps 8)."""

CONFIDENCE = 6.0
"""The lambda of Higham & Mary: a bound is left with probability 2 exp(-lambda^2 / 2)."""

ELEMENTWISE = 16
"""Roundings of what a layer computes element by element: rotary angles, the activation, residual sums, scales, dropout.
Functions of the library are right to 1 to 4 units."""

STORED = 6
"""Results of a layer that are stored and belong to no parameter: rotated heads, attention, the activation,
dropout, two residual sums."""


@dataclass(frozen=True)
class Roundings:
    """On the longest path to a tensor: terms that were added up in fp32, and roundings to the
    format of hidden states."""

    terms: int = 0
    stored: int = 0

    def __add__(self, other: Roundings) -> Roundings:
        return Roundings(self.terms + other.terms, self.stored + other.stored)

    def relative_bound(self, dtype: str) -> float:
        """The largest distance of two results, relative to the largest value; infinite where so
        many terms bound nothing."""
        if dtype == "fp32":
            return 2 * gamma(self.terms + self.stored)
        return 2 * ((1 + gamma(self.terms)) * (1 + likely_gamma(self.stored, UNIT_ROUNDOFF[dtype])) - 1)


def gamma(count: int) -> float:
    """The relative error of so many roundings in fp32.

    >>> 5.9e-5 < gamma(1000) < 6.0e-5
    True
    """
    used = count * UNIT_ROUNDOFF["fp32"]
    return used / (1 - used) if used < 1 else math.inf


def likely_gamma(count: int, unit: float) -> float:
    """What so many independent roundings of mean zero stay below, but for a chance that `CONFIDENCE` says."""
    return math.expm1(CONFIDENCE * math.sqrt(count) * unit + count * unit * unit / (1 - unit))


def largest_update(step: int, first: float, second: float) -> float:
    """How many learning rates AdamW moves a weight at most in its step number `step`, counted from 1, with
    betas `first` and `second`.

    The moments are m = (1-b) sum b^i g_i and v = (1-c) sum c^i g_i^2, so |m| <= (1-b) sqrt(sum (b^2/c)^i)
    sqrt(v / (1-c)) by Cauchy and Schwarz; the update divides them by 1-b^t and 1-c^t. (Kingma & Ba 2015,
    section 2.1, round this to 1.)

    >>> largest_update(1, 0.9, 0.95)
    1.0
    """
    ratio = sum((first * first / second) ** i for i in range(step))
    return (1 - first) / (1 - first**step) * math.sqrt(ratio * (1 - second**step) / (1 - second))


LARGEST_ORTHOGONAL = 1.3
"""No element is larger than the largest singular value, which Newton-Schulz iterations leave below this."""


@dataclass(frozen=True)
class StepBounds:
    """The bounds of one step of a plan, from equal weights and moments."""

    plan: Plan

    def of(self, key: Key, largest: Mapping[Key, float]) -> float:
        """The largest distance of any element of a tensor from the reference's, whose largest magnitudes are `largest`,
        by tensor. Weights before the first step are equal."""
        if key.step == NO_STEP:
            return 0.0
        if key.phase in (OPTIMIZER, WEIGHT):
            return self._of_state(key, largest)
        if key.phase == SCALAR and key.tensor == "grad_norm":
            return self._of_norm(key.step, largest)
        return self.roundings(key).relative_bound(self.plan.precision.dtype) * largest[key]

    def roundings(self, key: Key) -> Roundings:
        """The longest path to an activation, its gradient, the gradient of a parameter, or the loss."""
        section = section_of(key.tensor)
        match key.phase:
            case phase if phase == ACTIVATION:
                return self._forward.get(section, self._loss)
            case phase if phase == ACTIVATION_GRADIENT:
                return self._backward.get(section, self._last)
            case phase if phase == GRADIENT:
                batch = self.plan.of_step(key.step).batch
                return self._backward.get(section, self._last) + Roundings(batch.global_size * batch.sequence)
            case _:
                return self._loss

    def _of_norm(self, step: int, largest: Mapping[Key, float]) -> float:
        """The norm of a difference is at least the difference of norms; every element of a gradient adds its bound."""
        gradients = {Key(step, GRADIENT, each.name): each.num_elements for each in parameters(self.plan.model)}
        # a user's own block may have fewer parameters, and frozen ones
        keys = [key for key in gradients if key in largest]
        squares = (gradients[key] * self.of(key, largest) ** 2 for key in keys)
        return math.sqrt(sum(squares)) + gamma(len(keys)) * largest[Key(step, SCALAR, "grad_norm")]

    def _of_state(self, key: Key, largest: Mapping[Key, float]) -> float:
        """The moments take a share of the gradient, which clipping divides by the norm; both runs move a weight
        by one update of AdamW or Muon at most, SGD by a multiple of how far gradients are apart."""
        unit, (first, second) = UNIT_ROUNDOFF["fp32"], self.plan.optimizer.betas
        name = key.tensor if key.phase == WEIGHT else key.tensor.rpartition(".")[0]
        parameter = next((each for each in parameters(self.plan.model) if each.name == name), None)
        if parameter is None:  # an expert's bias, which both runs move by the rate, be it in other directions
            return 2 * self.plan.train.expert_bias_rate + 4 * unit * largest[key]
        if is_frozen(self.plan, parameter):
            return 0.0
        (rate, _), kind = rate_and_decay(self.plan, parameter, key.step), kind_of(self.plan, parameter)
        if kind != "adamw":
            taken = self._of_clipped(Key(key.step, GRADIENT, name), largest)
            if key.phase == WEIGHT and kind == "muon":
                taken = 2 * rate * LARGEST_ORTHOGONAL * math.sqrt(max(parameter.shape[-2:]))
            elif key.phase == WEIGHT:
                taken *= rate * (1 + momentum_of(self.plan.optimizer))
            return taken + 4 * unit * largest[key]
        if key.phase == WEIGHT:
            return 2 * rate * largest_update(key.step + 1, first, second) + 4 * unit * largest[key]
        name, _, moment = key.tensor.rpartition(".")
        gradient = Key(key.step, GRADIENT, name)
        size, change = largest[gradient], self._of_clipped(gradient, largest)
        taken = (1 - first) * change if moment == "exp_avg" else (1 - second) * (2 * size + change) * change
        return taken + 4 * unit * largest[key]

    def _of_clipped(self, gradient: Key, largest: Mapping[Key, float]) -> float:
        """Of a gradient divided by the norm."""
        norm = Key(gradient.step, SCALAR, "grad_norm")
        share = self.of(norm, largest) / largest[norm] if largest[norm] else 0.0
        return self.of(gradient, largest) + largest[gradient] * share

    @cached_property
    def _sections(self) -> list[tuple[str, list[Parameter]]]:
        """Parts of the model with their parameters, in forward order."""
        found: dict[str, list[Parameter]] = {}
        for parameter in parameters(self.plan.model):
            found.setdefault(section_of(parameter.name), []).append(parameter)
        head = found.pop("head", [])
        return [*found.items(), ("head", head)]

    @cached_property
    def _forward(self) -> dict[str, Roundings]:
        total, found = Roundings(), {}
        for section, held in self._sections:
            total = found[section] = total + _terms(self.plan, held, [each.shape[-1] for each in held], section)
        return found

    @cached_property
    def _loss(self) -> Roundings:
        """The longest path to the loss, and to the gradient it starts."""
        model = self.plan.model
        return self._forward["head"] + Roundings(model.hidden_size + model.vocab_size)

    @cached_property
    def _backward(self) -> dict[str, Roundings]:
        total, found = self._loss, {}
        for section, held in reversed(self._sections):
            total = found[section] = total + _terms(
                self.plan, held, [each.shape[-min(2, len(each.shape))] for each in held], section
            )
        return found

    @cached_property
    def _last(self) -> Roundings:
        return self._backward["embedding"]


def _terms(plan: Plan, held: list[Parameter], widths: list[int], section: str) -> Roundings:
    """One pass through a section: every parameter's product or norm, then attention and what is elementwise.
    Tensor-parallel ranks add up parts that are stored, too: two sums a layer."""
    stored = len(held) + STORED + 2 * (plan.layout.tp - 1)
    attention = (
        _attention_terms(plan.model, plan.batch.sequence) if any(".attention." in each.name for each in held) else 0
    )
    head = plan.model.vocab_size if section == "head" else 0
    return Roundings(sum(widths) + attention + head + ELEMENTWISE, stored)


def _attention_terms(model: ModelSpec, sequence: int) -> int:
    """Scores, the softmax, values; the backward has as many products and one more sum over the keys."""
    return 2 * (model.head_dim + model.value_head_dim) + 4 * sequence
