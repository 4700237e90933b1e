"""The first cause on real ranks: the part of a sum that is lost, by the names of ranks and samples, and weights
before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.gates import sampled
from shardproof.core.plan.plan import Plan
from shardproof.verify.causes.describe import describe, divergence, where_of
from shardproof.verify.causes.first_cause import run_against
from shardproof.verify.ledger.compare import compare
from shardproof.verify.ledger.ledger import NO_STEP, WEIGHT, Key, RunLedger
from shardproof.verify.mutations.plans import EXPERTS, tiny
from shardproof.verify.run.drop import parse_fault
from shardproof.verify.run.proof_run import ProofJob, one_device, run_ledger


@pytest.fixture(scope="module")
def reference_of() -> Callable[[Plan], RunLedger]:
    """One device's ledger of one step, once for all layouts of a problem."""
    found: dict[Plan, RunLedger] = {}

    def reference(plan: Plan) -> RunLedger:
        one = one_device(plan)
        if one not in found:
            found[one] = run_ledger(ProofJob(one, 1), "memory")
        return found[one]

    return reference


@sampled(
    ("plan", "fault", "phase", "tensor", "words"),
    [
        (
            tiny(dp=3, samples=3),
            "1:layers.0.mlp.down.weight",
            "gradient",
            "layers.0.mlp.down.weight",
            "only the part of dp rank 1 (sample 1)",
        ),
        (tiny(tp=3, samples=3), "1:layers.0.mlp.down", "activation", "layers.0.mlp", "only the part of tp rank 1"),
        (
            tiny(tp=2, samples=3),
            "0:head.output",
            "activation gradient",
            "layers.1.output",
            ("without the part of tp rank 1"),
        ),
        (
            tiny(dp=2, ep=2, model=EXPERTS),
            "1:layers.1.mlp.router.weight",
            "gradient",
            "layers.1.mlp.router.weight",
            "the part of dp rank 0",
        ),
    ],
    ids=["dp3", "tp3-row", "tp2-head", "dp2-router"],
    on_push=2,
)
def test_a_rank_that_keeps_its_own_part_is_named_by_what_it_lacks(
    reference_of: Callable[[Plan], RunLedger], plan: Plan, fault: str, phase: str, tensor: str, words: str
) -> None:
    job = ProofJob(plan, 1, fault=parse_fault(f"drop-reduction:{fault}"))
    run, differences = run_against(reference_of(plan), job, "memory")
    first = divergence(plan, differences[0])
    assert (first["phase"], first["tensor"], first["class"], first["ranks"]) == (
        phase,
        tensor,
        "missing",
        [int(fault[0])],
    )
    assert words in first["words"] and words in str(describe(plan, run, differences)[0])


def test_other_initial_weights_are_found_before_the_first_step(reference_of: Callable[[Plan], RunLedger]) -> None:
    plan = tiny(dp=3, samples=3)
    other = replace(plan, train=replace(plan.train, seed=plan.train.seed + 1))
    first = compare(reference_of(plan), run_ledger(ProofJob(other, 1), "memory"), plan.named_shapes)[0]
    assert (first.key, first.global_ranks) == (Key(NO_STEP, WEIGHT, "embedding.tokens.weight"), (0, 1, 2))
    where = where_of(plan, first.key, first.global_ranks)
    assert str(where) == f"the start of training, ranks 0, 1, 2, 0STEP, weight {first.key.tensor}"
    assert (where.rank, where.action, where.tensor, where.microbatch) == (0, "0STEP", first.key.tensor, None)
