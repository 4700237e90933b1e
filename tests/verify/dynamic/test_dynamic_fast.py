"""Plans in fast numerics: every tensor of the real run is within the derived bound of exact numerics,
and a lost sum is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.base.digest import full_region
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.sections import Batch, Numerics
from shardproof.verify.dynamic.proof import prove, run_fast
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    GRADIENT,
    NO_STEP,
    OPTIMIZER,
    SCALAR,
    WEIGHT,
    Key,
    Piece,
    RunLedger,
)
from shardproof.verify.ledger.stored import store_values
from shardproof.verify.ledger.summary import summarize
from shardproof.verify.matrix.problems import CAPPED, PROBLEMS, SINKS, Tokens
from shardproof.verify.mutations import parse_fault
from shardproof.verify.run.fast_run import check_fast
from shardproof.verify.run.proof_run import ProofJob, one_device, run_ledger

# Clipping is active, and the learning rate large enough that a second step from other weights would be far away.
fast_plan = partial(plan, samples=4, schedule="1F1B", mode="fast", clip_grad_norm=0.1, learning_rate=1e-2)


PLANS = {
    "tp3-sp": fast_plan(Layout(tp=3, sequence_parallel=True), model="tiny-gpt-6h"),
    "tp4-gqa-swiglu": fast_plan(Layout(tp=4), model="tiny-llama"),
    "capped-tp2": fast_plan(Layout(tp=2), model=replace(model_preset("tiny-llama"), **CAPPED)),
    "sinks-tp2": fast_plan(Layout(tp=2), model=replace(model_preset("tiny-llama"), **SINKS)),
    "dp3-micro2-dropout": fast_plan(Layout(dp=3), samples=6, micro=2, hidden_dropout=0.1, tied_embeddings=False),
}


@sampled("name", PLANS, on_push=1)
def test_two_steps_use_less_than_a_fiftieth_of_the_bound_in_fp32(name: str) -> None:
    proof = prove(PLANS[name], transport="memory", steps=2)
    assert proof.ok and proof.report["bits_different"] == 0
    fast = proof.report["fast"]
    assert fast["tensors"] == proof.report["tensors_compared"] and fast["tensors_outside"] == 0
    assert 0 < fast["nearest"]["share"] < 0.02
    assert f"Fast numerics, {fast['tensors']} tensors: all within the bound derived from their terms" in proof.text()
    assert fast["classes_scaled"] == 0 and len(fast["classes"]) > 20
    assert f"None of {len(fast['classes'])} classes has a common factor" in proof.text()
    for each in fast["classes"]:
        assert each["interval"][0] < 1 < each["interval"][1] and each["coefficient"] == pytest.approx(
            sum(each["interval"]) / 2
        )


def test_bf16_is_held_to_a_wider_bound() -> None:
    proof = prove(fast_plan(Layout(tp=2, sequence_parallel=True), dtype="bf16"), transport="memory", steps=2)
    assert proof.ok and 0.005 < proof.report["fast"]["nearest"]["share"] < 0.3


def test_an_exact_plan_has_nothing_to_hold() -> None:
    exact = replace(
        PLANS["tp4-gqa-swiglu"], numerics=Numerics("exact", gradient_token_block=8, reduction_token_block=4)
    )
    assert prove(exact, transport="memory", steps=1).report["fast"] is None


@pytest.mark.parametrize(
    ("fault", "phase", "tensor", "step"),
    [
        ("drop-reduction:1:layers.1.mlp.down", ACTIVATION, "layers.1.mlp", 0),
        ("drop-reduction:2:layers.0.mlp.norm.weight", GRADIENT, "layers.0.mlp.norm.weight", 0),
    ],
)
def test_a_dropped_reduction_leaves_the_bound_far_behind_and_the_first_tensor_is_named(
    fault: str, phase: str, tensor: str, step: int
) -> None:
    plan = fast_plan(Layout(tp=2, dp=2))
    one = one_device(replace(plan, numerics=replace(plan.numerics, mode="exact")))
    keys = frozenset(run_ledger(ProofJob(one, 1), "memory").pieces)
    check = run_fast(ProofJob(plan, 1, keys, fault=parse_fault(fault)), "memory")
    first = check.wrong[0]
    assert (first.phase, first.tensor, first.step) == (phase, tensor, step)
    assert check.distances[first].share > 100 and check.distances[first].global_rank == parse_fault(fault).global_rank


def ledger(values: dict[Key, np.ndarray], folder: Any, rank: int = 0) -> RunLedger:
    """Captured tensors, whole on one rank."""
    pieces = {}
    for key, array in values.items():
        retained = store_values(folder / f"{rank}.values", array)
        pieces[key] = (Piece(rank, array.shape, full_region(array.shape), summarize(array), retained),)
    return RunLedger(pieces)


def test_the_tensor_that_leaves_its_bound_is_found_among_those_that_do_not(tmp_path: Any) -> None:
    plan = fast_plan(Layout())
    hidden, loss = np.linspace(-1, 1, 24 * 32, dtype=np.float32).reshape(24, 32), np.asarray(2.5)
    keys = [Key(0, ACTIVATION, "layers.0.output", 0), Key(0, ACTIVATION, "layers.1.output", 0), Key(0, SCALAR, "loss")]
    reference = dict(zip(keys, (hidden, hidden, loss), strict=True))
    nudged = {**reference, keys[0]: hidden * np.float32(1 + 2**-20), keys[1]: hidden.copy()}
    nudged[keys[1]][3, 7] += 1e-3
    check = check_fast(plan, ledger(reference, tmp_path), ledger(nudged, tmp_path, rank=1))
    assert check.wrong == (keys[1],)
    far = check.distances[keys[1]]
    assert far.distance == pytest.approx(1e-3, rel=1e-3) and far.share > 1 and check.nearest == far
    assert 0 < check.distances[keys[0]].share < 1 and check.distances[keys[2]].share == 0


def test_a_tensor_that_is_not_finite_leaves_every_bound(tmp_path: Any) -> None:
    key, values = Key(0, ACTIVATION, "layers.0.output", 0), np.ones((2, 3), dtype=np.float32)
    wrong = values.copy()
    wrong[1, 1] = np.nan
    check = check_fast(fast_plan(Layout()), ledger({key: values}, tmp_path), ledger({key: wrong}, tmp_path, rank=1))
    assert check.wrong == (key,) and check.distances[key].share == np.inf and check.report["nearest"]["share"] is None


def test_every_phase_of_a_step_has_a_bound() -> None:
    plan = fast_plan(Layout(tp=2))
    one = one_device(replace(plan, numerics=replace(plan.numerics, mode="exact")))
    keys = frozenset(run_ledger(ProofJob(one, 1), "memory").pieces)
    check = run_fast(ProofJob(plan, 1, keys), "memory")
    assert {key.phase for key in check.distances} >= {ACTIVATION, GRADIENT, OPTIMIZER, WEIGHT, SCALAR}
    assert all(0 < each.bound < np.inf for key, each in check.distances.items() if key.step > NO_STEP)
    assert all(each.bound == each.distance == 0 for key, each in check.distances.items() if key.step == NO_STEP)


def test_experts_whose_scores_are_nearly_equal_are_no_findings() -> None:
    """With routers that choose for themselves, tensors of this run left their bounds: rounding
    sent a token elsewhere."""
    plan = PROBLEMS["mla-experts"].plan(Layout(tp=2, cp=2, zero=1), Tokens(24, 1, 1), Batch(6, 1, 24))
    plan = replace(plan, numerics=replace(plan.numerics, mode="fast"), train=replace(plan.train, seed=2))
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.report["fast"]["nearest"]["share"] < 0.5, proof.text()
