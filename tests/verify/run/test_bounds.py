"""The derived bounds: their closed forms, and that no order of a real sum leaves them while a lost term does."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    OPTIMIZER,
    SCALAR,
    WEIGHT,
    Key,
)
from shardproof.verify.ledger.relations import section_of
from shardproof.verify.run.bounds import (
    CONFIDENCE,
    UNIT_ROUNDOFF,
    Roundings,
    StepBounds,
    gamma,
    largest_update,
    likely_gamma,
)

GPT = ModelSpec(
    "gpt",
    2,
    48,
    96,
    6,
    6,
    8,
    101,
    64,
    activation="gelu",
    norm="layernorm",
    position="learned",
    tied_embeddings=True,
    bias=True,
)
UNIT = UNIT_ROUNDOFF["fp32"]


def plan_of(dtype: str = "fp32", tp: int = 1, model: ModelSpec = GPT) -> Plan:
    return product_plan(model=model, samples=4, sequence=16, dtype=dtype, tp=tp)


@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_a_dot_product_in_any_order_stays_within_gamma_of_the_sum_of_magnitudes(count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.standard_normal((2, count)).astype(np.float32)
    exact = sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, y, strict=True)), Fraction())
    magnitudes = sum(abs(Fraction(float(a)) * Fraction(float(b))) for a, b in zip(x, y, strict=True))
    for order in (np.arange(count), np.arange(count)[::-1], generator.permutation(count)):
        total = np.float32(0.0)
        for product in x[order] * y[order]:
            total += product
        assert abs(Fraction(float(total)) - exact) <= Fraction(gamma(count)) * magnitudes


def test_gamma_is_n_u_over_1_minus_n_u_and_infinite_where_that_says_nothing() -> None:
    assert gamma(1 << 12) == pytest.approx(2.0**-12 / (1 - 2.0**-12))
    assert gamma(1 << 24) == math.inf


def test_roundings_of_a_chance_grow_with_the_square_root() -> None:
    assert likely_gamma(400, 2.0**-8) == pytest.approx(math.expm1(CONFIDENCE * 20 / 256), rel=0.05)


def test_bf16_adds_what_is_stored_to_what_is_added_up() -> None:
    path = Roundings(1000, 9)
    assert path.relative_bound("fp32") == 2 * gamma(1009)
    assert path.relative_bound("bf16") > 2 * likely_gamma(9, 2.0**-8) > 100 * path.relative_bound("fp32")


@pytest.mark.parametrize(("first", "second"), [(0.9, 0.95), (0.9, 0.999), (0.5, 0.2)])
def test_no_gradients_move_a_weight_by_more_than_the_largest_update(first: float, second: float) -> None:
    generator, worst = np.random.default_rng(0), 0.0
    for _ in range(2000):
        m = v = 0.0
        for step, gradient in enumerate(generator.standard_normal(4) * 10.0 ** generator.integers(-3, 3, 4), start=1):
            m, v = first * m + (1 - first) * gradient, second * v + (1 - second) * gradient**2
            share = abs(m) / (1 - first**step) / math.sqrt(v / (1 - second**step)) / largest_update(step, first, second)
            assert share <= 1 + 1e-12
            worst = max(worst, share)
    assert worst > 0.9


def test_paths_get_longer_forward_then_backward_and_a_gradient_adds_the_tokens_of_the_batch() -> None:
    bounds = StepBounds(plan_of())
    names = ["embedding.output", "layers.0.mlp", "layers.1.output", "head.losses"]
    forward = [bounds.roundings(Key(0, ACTIVATION, name, 0)).terms for name in names]
    backward = [bounds.roundings(Key(0, ACTIVATION_GRADIENT, name, 0)).terms for name in reversed(names)]
    assert forward + backward == sorted(forward + backward) and len({*forward, *backward}) == 8
    last = bounds.roundings(Key(0, GRADIENT, "layers.1.mlp.down.weight"))
    assert last.terms == bounds.roundings(Key(0, ACTIVATION_GRADIENT, "layers.1.mlp", 0)).terms + 4 * 16
    assert bounds.roundings(Key(0, ACTIVATION, "a.part.of.a.user", 0)) == bounds.roundings(Key(0, SCALAR, "loss"))


def test_a_layers_forward_counts_the_inputs_of_every_product() -> None:
    one, two = (StepBounds(plan_of(model=replace(GPT, ffn_hidden_size=ffn))) for ffn in (96, 192))
    key = Key(0, ACTIVATION, "layers.1.output", 0)
    # the down-projection's terms, and the bias of the up one
    assert two.roundings(key).terms - one.roundings(key).terms == 2 * (96 + 96)


def test_more_ranks_store_more_partial_sums_but_add_up_no_more_terms() -> None:
    key = Key(0, GRADIENT, "layers.0.mlp.up.weight")
    one, four = (StepBounds(plan_of("bf16", tp=tp)).roundings(key) for tp in (1, 3))
    assert one.terms == four.terms and one.stored < four.stored


def test_state_is_bounded_by_the_gradients_bound_the_norm_and_the_learning_rate() -> None:
    plan = plan_of()
    bounds, name = StepBounds(plan), "layers.0.mlp.up.weight"
    largest = {Key(0, GRADIENT, each.name): 0.5 for each in parameters(GPT)} | {Key(0, SCALAR, "grad_norm"): 3.0}
    largest |= {Key(0, OPTIMIZER, f"{name}.{moment}"): 0.0 for moment in ("exp_avg", "exp_avg_sq")} | {
        Key(0, WEIGHT, name): 2.0
    }
    gradient, norm = (bounds.of(key, largest) for key in (Key(0, GRADIENT, name), Key(0, SCALAR, "grad_norm")))
    change = gradient + 0.5 * norm / 3.0
    assert norm > math.sqrt(48 * 96) * gradient
    assert bounds.of(Key(0, OPTIMIZER, f"{name}.exp_avg"), largest) == pytest.approx(0.1 * change)
    assert bounds.of(Key(0, OPTIMIZER, f"{name}.exp_avg_sq"), largest) == pytest.approx(0.05 * (1.0 + change) * change)
    assert bounds.of(Key(0, WEIGHT, name), largest) == pytest.approx(2 * plan.train.learning_rate + 8 * UNIT)


def test_sections_are_layers_or_first_words() -> None:
    assert [
        section_of(name) for name in ("layers.12.mlp.up.weight", "head.losses", "loss", "mtp.0.projection.weight")
    ] == ["layers.12", "head", "loss", "mtp.0"]
