"""A proof evaluates held-out data between its first two steps, and sees what that leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.gates import sampled
from helpers.modules import modular, module
from shardproof.core.plan.plan import ModularPlan, Plan
from shardproof.core.plan.sections import ScheduleChoice
from shardproof.verify.causes.describe import describe
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.ledger.compare import Difference, Values
from shardproof.verify.ledger.ledger import BROUGHT, GATHERED, HELD_OUT, Key, Piece, RunLedger
from shardproof.verify.ledger.relations import Relation
from shardproof.verify.mutations.mutants_evaluation import MUTANTS
from shardproof.verify.mutations.plans import EXPERTS, tiny
from shardproof.verify.mutations.run import judge_mutants
from shardproof.verify.run.proof_run import ProofJob, run_ledger

WEIGHTS_IN_PARTS = ScheduleChoice(max_active_stages=1)
JOINED = modular(module("encoder", tp=2, pp=2), module("decoder", ["encoder"], dp=3), samples=3, schedule="GPipe")


@sampled(
    ("plan", "last"),
    [
        pytest.param(
            replace(tiny(dp=3, zero=3, samples=5), schedule=WEIGHTS_IN_PARTS), "layers.1.output", id="zero3-dp3"
        ),
        pytest.param(tiny(tp=2, pp=2, vpp=2, schedule="Interleaved1F1B", model=EXPERTS), "layers.3.output", id="vpp2"),
        pytest.param(JOINED, "decoder.layers.0.output", id="modules"),
    ],
    on_push=1,
)
def test_held_out_losses_and_hidden_states_are_compared_too(plan: Plan | ModularPlan, last: str) -> None:
    found = run_ledger(ProofJob(plan, 2), "memory").pieces
    held_out = {key.sample for key in found if (key.step, key.phase, key.tensor) == (0, HELD_OUT, last)}
    assert held_out == set(range(plan.batch.global_size))
    assert [key.step for key in found if key.tensor == "validation_loss"] == [0]
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.report["tensors_compared"] == sum(
        key.phase not in (BROUGHT, GATHERED) for key in found
    )


def test_a_stage_that_stays_in_eval_mode_is_found() -> None:
    (verdict,) = judge_mutants([mutant for mutant in MUTANTS if mutant.id == "XX31"]).verdicts
    assert verdict.located


def test_a_held_out_activation_is_reported_like_one_of_training() -> None:
    plan, key = tiny(tp=3), Key(0, HELD_OUT, "layers.0.mlp", 2)
    difference = Difference(
        key, "differs", (1,), Values(1, 8, 2, (0, 0), 1.0, 2.0), Relation("doubled", "twice", 1.0, 1.0)
    )
    pieces = {key: tuple(Piece(rank, (2, 4), ((0, 2), (0, 4)), ()) for rank in (0, 1, 2))}
    (finding,) = describe(plan, RunLedger(pieces), [difference])
    assert finding.where == "step 1, rank 1, 0F2, held-out activation layers.0.mlp of sample 2"
    assert finding.hint == (
        "Replicas on ranks 0, 2 are right: look at the tensor-parallel reduction of layers.0.mlp on rank 1."
    )
