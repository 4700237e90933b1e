"""The regression of fast numerics on exact ones: closed forms, what rounding does that is no factor, and a factor in
every class of parameter of the matrix's models, on real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gates import sampled
from shardproof.backend.numerics.fast import FastNumerics
from shardproof.core.base.digest import full_region
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics
from shardproof.verify.causes.describe import fast_findings, fast_words
from shardproof.verify.dynamic import proof as dynamic
from shardproof.verify.dynamic.proof import run_fast
from shardproof.verify.ledger.ledger import (
    ACTIVATION_GRADIENT,
    GRADIENT,
    NO_STEP,
    Key,
    Piece,
    RunLedger,
)
from shardproof.verify.ledger.stored import store_values
from shardproof.verify.ledger.summary import summarize
from shardproof.verify.matrix.layouts import stages
from shardproof.verify.matrix.problems import PROBLEMS, TOKENS
from shardproof.verify.mutations.patches import Broken, Patches
from shardproof.verify.run.bounds import ELEMENTWISE, gamma
from shardproof.verify.run.fast_run import states, whole_values
from shardproof.verify.run.proof_run import ProofJob, one_device, run_ledger
from shardproof.verify.run.regression import CERTAINTY, Coefficient, Values, coefficients, group_of

MODEL = ModelSpec("gqa", 3, 32, 50, 12, 6, 4, 259, 16)
"""Two query heads share a key and a value, and the MLP is gated."""

DOWN = "layers.{}.mlp.down.weight"
FACTORS = {"fp32": 1.0001, "bf16": 1.02}


def scaled(found: Iterable[Coefficient]) -> set[str]:
    return {each.group for each in found if each.share > 1}


def noisy(
    *, factor: float = 1.0, noise: float = 5e-3, name: str = DOWN, shape: tuple[int, ...] = (32, 50), seed: int = 0
) -> list[Values]:
    """A parameter of three layers in three steps, with independent errors."""
    generator, found = np.random.default_rng(seed), []
    for step in range(3):
        for layer in range(3):
            exact = generator.standard_normal(shape).astype(np.float32)
            error = noise * generator.standard_normal(shape)
            found.append(
                (Key(step, GRADIENT, name.format(layer)), exact, (factor * (exact + error)).astype(np.float32))
            )
    return found


# Closed forms


def test_the_interval_of_four_tensors_that_are_off_by_a_hundredth_across_themselves() -> None:
    exact, across = np.zeros(64), np.zeros(64)
    exact[0], across[1] = 1.0, 0.01
    values = [(Key(step, GRADIENT, "head.norm.weight"), exact, 1.5 * (exact + across)) for step in range(4)]
    (found,) = coefficients(MODEL, values)
    assert (found.phase, found.group, found.num_observations) == (GRADIENT, "head.norm.weight", 4)
    assert found.factor == pytest.approx(1.5)
    square = 0.01**2 * 64 / 63
    assert found.half_width == pytest.approx(CERTAINTY * math.sqrt(square / 4) + square + gamma(ELEMENTWISE))


def test_noise_has_no_factor_and_a_factor_of_two_hundredths_is_found() -> None:
    (right,), (wrong,) = coefficients(MODEL, noisy()), coefficients(MODEL, noisy(factor=1.02))
    assert right.share < 0.2 and right.group == "layers.*.mlp.down.weight" and right.num_observations == 9
    assert wrong.share > 2 and wrong.factor == pytest.approx(1.02, abs=1e-3)
    assert wrong.half_width == pytest.approx(right.half_width, rel=1e-4)
    assert wrong.report["interval"] == [wrong.factor - wrong.half_width, wrong.factor + wrong.half_width]


# What is no common factor


def test_a_tensor_that_one_token_scales_widens_nothing_and_moves_nothing() -> None:
    values = noisy()
    key, exact, found = values[4]
    (pooled,) = coefficients(MODEL, [*values[:4], (key, exact, found * np.float32(1.04)), *values[5:]])
    assert pooled.share < 0.2 and pooled.half_width == pytest.approx(
        coefficients(MODEL, noisy())[0].half_width, rel=0.1
    )


def test_gradients_of_one_step_that_follow_from_scaled_gradients_of_activations_have_a_wide_interval() -> None:
    values = [each for each in noisy(factor=1.02) if each[0].step == 0]
    assert scaled(coefficients(MODEL, values)) == {"layers.*.mlp.down.weight"}
    upstream = noisy(factor=1.02, noise=1e-3, name="layers.{}.output", seed=1)
    caused = [
        (Key(key.step, ACTIVATION_GRADIENT, key.tensor, sample=0), *pair) for key, *pair in upstream if key.step == 0
    ]
    assert scaled(coefficients(MODEL, [*caused, *values])) == {"layers.*.output"}


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_gradient_that_is_rounding_alone_says_nothing(size: float) -> None:
    values = [
        (key, exact, other * np.float32(size))
        for (key, exact, _), (_, other, _) in zip(noisy(), noisy(seed=1), strict=True)
    ]
    (found,) = coefficients(MODEL, values)
    assert found.share < 1 and found.half_width > 1


def test_what_is_zero_in_either_numerics_is_left_to_the_bound() -> None:
    zero = np.zeros((32, 50), np.float32)
    assert coefficients(MODEL, [(key, zero, found) for key, _, found in noisy()]) == ()
    assert coefficients(MODEL, [(key, exact, zero) for key, exact, _ in noisy()]) == ()
    assert coefficients(MODEL, [(key, exact, exact * np.nan) for key, exact, _ in noisy()]) == ()
    assert coefficients(MODEL, [(key._replace(step=NO_STEP), *pair) for key, *pair in noisy()]) == ()


# Rows that are for something else


@pytest.mark.parametrize(
    ("kind", "rows"), [("queries", slice(0, 8)), ("keys", slice(8, 12)), ("values", slice(12, 16))]
)
def test_queries_keys_and_values_are_classes_of_their_own(kind: str, rows: slice) -> None:
    values = noisy(name="layers.{}.attention.qkv.weight", shape=(96, 32))
    for _, _, found in values:
        found.reshape(6, 16, 32)[:, rows] *= 1.02
    assert scaled(coefficients(MODEL, values)) == {f"layers.*.attention.qkv.weight ({kind})"}


@pytest.mark.parametrize(("kind", "first"), [("gates", 0), ("units", 1)])
def test_gates_and_units_of_experts_are_classes_of_their_own(kind: str, first: int) -> None:
    values = noisy(name="layers.{}.mlp.experts.up.weight", shape=(4, 48, 32))
    for _, _, found in values:
        found[:, first::2] *= 1.02
    everything = coefficients(MODEL, values)
    assert scaled(everything) == {f"layers.*.mlp.experts.up.weight ({kind})"}
    assert {each.num_observations for each in everything} == {36}


@pytest.mark.parametrize(("is_tied", "observations"), [(False, 9 * 259), (True, 9)])
def test_rows_of_a_table_that_only_looks_up_have_tokens_of_their_own(is_tied: bool, observations: int) -> None:
    values = noisy(name="embedding.tokens.weight", shape=(259, 32))
    (found,) = coefficients(replace(MODEL, tied_embeddings=is_tied), values)
    assert found.num_observations == observations


def test_of_replicas_the_one_that_is_farthest_from_the_reference_counts(tmp_path: Path) -> None:
    expected, pieces = {}, {}
    for key, exact, found in noisy():
        expected[key] = exact
        copies = [found, found * np.float32(1.02), found]
        pieces[key] = tuple(
            Piece(
                rank,
                copy.shape,
                full_region(copy.shape),
                summarize(copy),
                store_values(tmp_path / f"{rank}.values", copy),
            )
            for rank, copy in enumerate(copies)
        )
    assert scaled(coefficients(MODEL, whole_values(expected, RunLedger(pieces)))) == {"layers.*.mlp.down.weight"}


# Real runs

LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=3),
    Layout(pp=2, tp=2, stages=stages(2)),
    Layout(tp=2, dp=2, zero=1),
)
"""All of which cut sums that are rounded to the format of hidden states. Each problem has the next one."""


def fast_plan(name: str, layout: Layout, **choices: Any) -> Plan:
    """A problem of the matrix in fast numerics."""
    tokens = TOKENS[2]
    plan = PROBLEMS[name].plan(layout, tokens, Batch(6, 1, tokens.sequence), **choices)
    return replace(plan, numerics=Numerics("fast", gradient_token_block=4, reduction_token_block=2))


def captured(plan: Plan, steps: int) -> frozenset[Key]:
    """Every tensor of a run of so many steps."""
    exact = one_device(replace(plan, numerics=replace(plan.numerics, mode="exact")))
    return frozenset(run_ledger(ProofJob(exact, steps), "memory").pieces)


def fast_values(plan: Plan, folder: Path, steps: int) -> list[Values]:
    """What a right run in fast numerics computes of gradients, and exact ones."""
    exact, keys = one_device(replace(plan, numerics=replace(plan.numerics, mode="exact"))), captured(plan, steps)
    for name in ("one", "many"):
        (folder / name).mkdir()
    reference = run_ledger(ProofJob(exact, steps, keys, folder=folder / "one"), "memory")
    run = run_ledger(ProofJob(plan, steps, keys, folder=folder / "many", start=states(reference)), "memory")
    wanted = {key: pieces for key, pieces in reference.pieces.items() if key.phase in (GRADIENT, ACTIVATION_GRADIENT)}
    return list(whole_values({key: pieces[0].load() for key, pieces in wanted.items()}, run))


def is_rounding(group: str) -> bool:
    """A bias of keys changes all scores of a query equally: without rotary positions its gradient is zero, with
    them it is nearly so."""
    return group.endswith("qkv.bias (keys)")


@sampled("name", PROBLEMS, on_push=3)
def test_a_small_factor_is_found_in_every_class_of_parameter(name: str, tmp_path: Path) -> None:
    plan = fast_plan(name, LAYOUTS[list(PROBLEMS).index(name) % len(LAYOUTS)])
    values = fast_values(plan, tmp_path, steps=3 if plan.model.is_moe else 1)  # experts have few tokens of a step each
    right = coefficients(plan.model, values)
    assert scaled(right) == set() and max(each.share for each in right) < 0.5
    upstream = [each for each in values if each[0].phase == ACTIVATION_GRADIENT]
    for group in {group_of(each.name): None for each in parameters(plan.model)}:
        own = [
            (key, e, f * np.float32(FACTORS[plan.precision.dtype]))
            for key, e, f in values
            if group_of(key.tensor) == group
        ]
        kinds = {each.group: each for each in coefficients(plan.model, [*upstream, *own]) if each.phase == GRADIENT}
        assert kinds and all(each.share > 1 or is_rounding(kind) for kind, each in kinds.items()), kinds


def broken_run(plan: Plan, breaks: Callable[[Patches], None], steps: int = 3) -> Any:
    return run_fast(ProofJob(plan, steps, captured(plan, steps), wraps_rank=Broken(breaks)), "memory")


def scales_sums_over_tokens(patches: Patches) -> None:
    """Gradients of norms are 2% too large, and of biases, where there are some."""
    patches.replace(FastNumerics, "token_sums", lambda original: lambda self, *args: original(self, *args) * 1.02)


def scales_experts(patches: Patches) -> None:
    """Sums over the copies of experts are a ten-thousandth too large."""

    def reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduced(self: Any, *args: Any) -> Any:
            return {name: total * 1.0001 for name, total in original(self, *args).items()}

        return reduced

    patches.replace(FastNumerics, "reduce_experts", reduce)


def scales_the_token_table(patches: Patches) -> None:
    """Sums of rows of the token table are a ten-thousandth too large."""
    patches.replace(
        FastNumerics,
        "embedding_gradient",
        lambda original: lambda self, ids, gradient, num_rows: original(self, ids, gradient * 1.0001, num_rows),
    )


@sampled(
    ("name", "layout", "breaks", "groups", "factor"),
    [
        (
            "gqa-layernorm",
            Layout(tp=2),
            scales_sums_over_tokens,
            # a parallel block has no norm of its MLP, and norms here have no bias
            {f"{norm}.weight" for norm in ("layers.*.attention.norm", "head.norm")},
            1.02,
        ),
        (
            "mixtral",
            Layout(dp=2),
            scales_experts,
            {f"layers.*.mlp.experts.{part}" for part in ("up.weight (gates)", "up.weight (units)", "down.weight")},
            1.0001,
        ),
        ("llama", Layout(tp=2), scales_the_token_table, {"embedding.tokens.weight"}, 1.0001),
    ],
    on_push=1,
)
def test_a_backend_that_scales_gradients_is_within_the_bound_and_its_classes_are_named(
    name: str, layout: Layout, breaks: Callable[[Patches], None], groups: set[str], factor: float
) -> None:
    plan = fast_plan(name, layout)
    check = broken_run(plan, breaks)
    assert check.wrong == ()
    assert {each.group for each in check.scaled} == groups and {each.phase for each in check.scaled} == {GRADIENT}
    assert all(each.factor == pytest.approx(factor, rel=(factor - 1) / 5) for each in check.scaled)
    finding, *_ = fast_findings(plan, check)
    assert (finding.rule, finding.severity) == ("common-factor", "error")
    assert any(finding.where == f"gradient {group}" for group in groups) and finding.what.startswith("scaled by 1.0")
    assert check.report["classes_scaled"] == len(groups) and check.report["classes"][0]["class"] in groups
    assert f"HAVE A COMMON FACTOR: {len(groups)} of {len(check.coefficients)} classes" in fast_words(check.report)


def test_a_proof_of_a_plan_whose_fast_gradients_are_scaled_fails_and_says_by_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Broken(scales_the_token_table)
    monkeypatch.setattr(
        dynamic, "run_fast", lambda job, transport: run_fast(replace(job, wraps_rank=broken), transport)
    )
    proof = dynamic.prove(fast_plan("llama", Layout(tp=2)), transport="memory", steps=1)
    assert proof.report["bits_different"] == 0 and proof.report["fast"]["tensors_outside"] == 0
    assert not proof.ok and [finding.rule for finding in proof.findings] == ["common-factor"]
    assert "common-factor at gradient embedding.tokens.weight: scaled by 1.00010" in proof.text()
