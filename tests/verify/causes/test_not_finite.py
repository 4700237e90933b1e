"""A sharded run whose numbers are not finite, where one device's are: the first tensor that differs is named, and
not the learning rate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.gates import sampled
from shardproof.backend.model.block import TransformerBlock
from shardproof.backend.numerics.exact import ExactNumerics
from shardproof.core.base.errors import RankFailure
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Numerics
from shardproof.verify.causes.describe import describe, divergence
from shardproof.verify.causes.first_cause import run_against
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.mutations.patches import Broken, Patches, on_ranks
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run.proof_run import ProofJob, one_device, run_ledger

DOWN = "layers.0.mlp.down.weight"


def with_an_infinite_gradient(patches: Patches) -> None:
    """Rank 1 has an infinite element in what a reduction leaves it, and no other rank has."""
    here = on_ranks(1)

    def make(plain):
        def reduced(self, gradients, *given):
            sums = plain(self, gradients, *given)
            if here() and (name := next((each for each in sums if each.startswith(DOWN)), None)) is not None:
                sums[name].view(-1)[0] = float("inf")
            return sums

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", make)


def with_growing_sums(patches: Patches) -> None:
    """Whatever rank 1 gets out of a sum over tensor-parallel ranks is 10^38 times too large, twice."""
    here = on_ranks(1)

    def make(plain):
        return lambda self, *given: plain(self, *given) * (1e38 if here() else 1) * (1e38 if here() else 1)

    patches.replace(ExactNumerics, "finish_contract", make)


def first_of(plan: Plan, breaks, transport="memory") -> tuple[dict, str]:
    """The first divergence and its finding, of two steps."""
    reference = run_ledger(ProofJob(one_device(plan), 2), "memory")
    run, differences = run_against(reference, ProofJob(plan, 2, wraps_rank=Broken(breaks), stall_s=60), transport)
    first = divergence(plan, differences[0])
    json.dumps(first, allow_nan=False)
    return first, str(describe(plan, run, differences)[0])


@sampled(
    ("degrees", "transport"),
    [({"dp": 2}, "memory"), ({"dp": 2}, "gloo"), ({"tp": 2, "dp": 2}, "memory"), ({"pp": 2, "tp": 2}, "memory")],
    ids=["dp2", "dp2-gloo", "tp2dp2", "pp2tp2"],
    on_push=2,
)
def test_an_infinite_gradient_of_one_rank_is_the_first_difference_whatever_others_have(degrees, transport):
    """With data parallelism the norms of copies differ: the others take the step, and the run goes
    on in step with them."""
    first, finding = first_of(tiny(**degrees), with_an_infinite_gradient, transport)
    assert (first["phase"], first["tensor"], first["step"], first["ranks"]) == ("gradient", DOWN, 1, [1])
    assert first["class"] == "not finite"
    assert finding.startswith(f"error: bits-differ at step 1, rank 1, 0REDUCE_GRAD, gradient {DOWN}: not finite")
    assert "learning_rate" not in finding


@sampled(
    "degrees", [{"tp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "dtype": "bf16"}], ids=["tp2", "zero1", "bf16"], on_push=1
)
def test_values_that_overflow_in_a_sum_are_named_where_they_first_do(degrees):
    first, finding = first_of(tiny(**degrees), with_growing_sums)
    assert (first["phase"], first["tensor"], first["step"], first["ranks"]) == (
        "activation",
        "layers.0.attention",
        1,
        [1],
    )
    assert first["class"] == "not finite" and "learning_rate" not in finding


class Growing(TransformerBlock):
    """A layer whose output one tensor-parallel rank makes infinite, in fast numerics or in all."""

    in_fast_alone = False

    def __init__(self, context, layer):
        super().__init__(context, layer)
        wrong = context._layers.tp.rank == 1 and (context._layers.numerics.mode == "fast" or not self.in_fast_alone)
        self.factor = 1e38 if wrong else 1.0

    def forward(self, x):
        return super().forward(x) * self.factor * self.factor


class GrowingInFast(Growing):
    """The same in fast numerics alone."""

    in_fast_alone = True


def test_a_proof_ends_with_findings_and_not_with_advice_about_the_learning_rate():
    proof = prove(tiny(tp=2), block=Growing, transport="memory", steps=2)
    assert not proof.ok and proof.findings[0].rule == "bits-differ" and "rank 1" in proof.findings[0].where
    assert "learning_rate" not in proof.text() and json.dumps(proof.report, allow_nan=False)


def test_fast_numerics_that_are_not_finite_leave_the_bound():
    plan = replace(tiny(tp=2), numerics=Numerics("fast"))
    proof = prove(plan, block=GrowingInFast, transport="memory", steps=2)
    assert [finding.rule for finding in proof.findings[:1]] == ["bound-left"], proof.text()
    assert proof.report["bits_different"] == 0 and json.dumps(proof.report, allow_nan=False)


def test_where_one_device_is_not_finite_either_the_remedy_is_the_learning_rate():
    with pytest.raises(RankFailure, match=r"no finite numbers.*Lower train\.learning_rate=1e\+30"):
        prove(tiny(tp=2, train={"learning_rate": 1e30}), transport="memory")
