"""Experts that are not equally busy: tokens per expert as a distribution, and what the busiest rank of a group
makes all others wait for.

In each layer experts expect shares of the tokens that are Dirichlet distributed, with equal parameters; the tokens of a
microbatch are then drawn from them (multinomial). The relative standard deviation c of the expected tokens fixes the
parameter: for E experts c^2 = (E - 1) / (E a + 1). What is published is often the largest load over the mean, less one
(MaxVio: Wang et al. 2024, arXiv 2408.15664, table 2: 0.04 with bias-based balancing, 0.72 with an auxiliary loss, of
the whole batch); `max_violation` gives it. Tokens are drawn one by one; that a token's experts are different ones
narrows the counts a little and is not modelled. Expert layers end with an exchange among the ranks of an ep group, so
all of them take as long as the rank with the most tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.plan.plan import Plan
from ...core.program import Collective, Op, Operation, Operations, Product
from .traffic import Traffic

EXPERT_AXES = ("ep", "etp")
"""Axes whose collectives carry tokens to experts and back."""


LEAST_IMBALANCE = 1e-6
"""Below this experts expect equal shares: no number of tokens would show the difference."""


@dataclass(frozen=True, eq=False)
class Loads:
    """Drawn loads. `of_layers` is [draws, MoE layers]: tokens of the busiest rank of an ep group over those of the
    average one, after drops; `dropped_share` and `max_violation` are means over all of them."""

    of_layers: np.ndarray
    dropped_share: float
    max_violation: float


def joined(draws: Sequence[Loads]) -> Loads:
    """Several draws as one."""
    means = [float(np.mean([getattr(loads, name) for loads in draws])) for name in ("dropped_share", "max_violation")]
    return Loads(np.concatenate([loads.of_layers for loads in draws]), *means)


def draw_loads(plan: Plan, num_layers: int, rng: np.random.Generator) -> Loads:
    """One draw of the load of `num_layers` MoE layers. Consecutive experts lie on one rank (Megatron-Core).

    A capacity of the model's own, which it has per sequence, is taken of all tokens that a group sends
    at a time: a few more pass.
    """
    model, variation = plan.model, plan.variation
    assert variation.expert_imbalance is not None
    tokens = _group_tokens(plan) * model.experts_per_token
    fair, dropped = tokens / model.num_experts, 0.0
    counts = draw_counts(rng, num_layers, model.num_experts, tokens, variation.expert_imbalance)
    violation = float((counts.max(axis=1, initial=0.0) / fair - 1).mean()) if num_layers else 0.0
    capacities = [each for each in (variation.expert_capacity, model.expert_capacity_factor) if each is not None]
    if capacities and num_layers:
        within = np.minimum(counts, min(capacities) * fair)
        dropped, counts = float((counts - within).sum() / (tokens * num_layers)), within
    ranks = counts.reshape(num_layers, plan.layout.ep, model.num_experts // plan.layout.ep).sum(axis=2)
    return Loads(ranks.max(axis=1)[None] * plan.layout.ep / tokens, dropped, violation)


def draw_counts(rng: np.random.Generator, rows: int, num_experts: int, tokens: int, imbalance: float) -> np.ndarray:
    """[rows, experts] copies of tokens that each expert is sent."""
    if imbalance > LEAST_IMBALANCE:
        shape = dirichlet_parameter(num_experts, imbalance)
        expected = rng.standard_gamma(shape, size=(rows, num_experts))
        # parameters far below one leave all weights at zero in rare rows: then one expert has all tokens
        empty = expected.sum(axis=1) == 0
        expected[empty, rng.integers(num_experts, size=int(empty.sum()))] = 1.0
        expected /= expected.sum(axis=1, keepdims=True)
    else:
        expected = np.full((rows, num_experts), 1 / num_experts)
    return rng.multinomial(tokens, expected).astype(np.float64)


def dirichlet_parameter(num_experts: int, imbalance: float) -> float:
    """The parameter of a symmetric Dirichlet distribution whose shares have a relative standard
    deviation of `imbalance`.

    >>> round(dirichlet_parameter(8, 0.5), 3)
    3.375
    """
    return ((num_experts - 1) / imbalance**2 - 1) / num_experts


def _group_tokens(plan: Plan) -> int:
    """Tokens that the ranks of one ep group route together in one microbatch."""
    layout, batch = plan.layout, plan.batch
    tokens = batch.micro_size * batch.sequence // layout.cp
    own = tokens // layout.tp if layout.sequence_parallel else tokens
    gathered = layout.expert_tp if layout.sequence_parallel or layout.tp == 1 else 1
    return own * gathered * layout.ep


def loaded_work(works: tuple[Op, ...], load: float) -> tuple[Op, ...]:
    """The work of a rank whose experts are sent `load` times the average number of tokens."""
    if load == 1:
        return works

    def of(found: Operations, *, weight: bool = False) -> Operations:
        return tuple(_loaded(operation, load, weight=weight) for operation in found)

    return tuple(
        replace(
            work,
            forward=of(work.forward),
            input_gradient=of(work.input_gradient),
            weight_gradient=of(work.weight_gradient, weight=True),
            recomputed=of(work.recomputed),
        )
        for work in works
    )


def loaded_traffic(pieces: Mapping[str, Traffic], load: float) -> Mapping[str, Traffic]:
    """The memory-bound work of that rank: the experts' activation grows with their tokens."""
    return (
        {name: piece.times(load) if name == "moe_act" else piece for name, piece in pieces.items()}
        if load != 1
        else pieces
    )


def _loaded(operation: Operation, load: float, *, weight: bool) -> Operation:
    match operation:
        case Product(grouped=True):
            axis = "k" if weight else "m"
            return replace(operation, **{axis: max(1, round(getattr(operation, axis) * load))})
        case Collective() if operation.axis in EXPERT_AXES:
            return replace(operation, sent_bytes=round(operation.sent_bytes * load))
    return operation
