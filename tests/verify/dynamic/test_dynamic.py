"""The dynamic proof on real ranks: no bit differs whatever the layout, and a dropped reduction is found and located.

The runs over gloo are those of the issue; variations that only change arithmetic run as threads over
the in-memory transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch
from shardproof.verify.causes.describe import describe
from shardproof.verify.dynamic.proof import Proof, prove
from shardproof.verify.ledger.compare import Difference
from shardproof.verify.ledger.ledger import ACTIVATION, WEIGHT, Key, RunLedger
from shardproof.verify.mutations import parse_fault

STEPS = 3


def tiny(
    layout: Layout,
    *,
    global_size: int,
    micro_size: int = 1,
    model: str = "tiny-gpt",
    schedule: str = "1F1B",
    **fields: Any,
) -> Plan:
    """A small model with biases, learned positions and clipping that is active from the first step."""
    return plan(
        layout,
        model=model,
        **fields,
        samples=global_size,
        micro=micro_size,
        schedule=schedule,
        clip_grad_norm=0.1,
        steps=STEPS,
        learning_rate=0.01,
    )


PLANS: Mapping[str, Plan] = {
    "tp2-pp2-dp2-1f1b": tiny(Layout(tp=2, pp=2, dp=2), global_size=8),
    "tp4": tiny(Layout(tp=4), global_size=4, tied_embeddings=False),
    "pp4-m8-gpipe": tiny(Layout(pp=4), global_size=8, schedule="GPipe"),
    "pp4-m8-1f1b": tiny(Layout(pp=4), global_size=8),
    "pp2-vpp2-interleaved": tiny(Layout(pp=2, vpp=2), global_size=8, schedule="Interleaved1F1B"),
    "dp3": tiny(Layout(dp=3), global_size=9),
    "tp3-6-heads": tiny(Layout(tp=3), global_size=4, model="tiny-gpt-6h"),
}

OVER: Mapping[str, Literal["gloo", "shm"]] = {
    **dict.fromkeys(("tp2-pp2-dp2-1f1b", "pp2-vpp2-interleaved", "dp3"), "gloo"),
    **dict.fromkeys(("tp4", "pp4-m8-1f1b", "tp3-6-heads"), "shm"),
}
"""How ranks talk that are no threads of one process."""


def assert_equal_bits(proof: Proof) -> None:
    assert proof.findings == ()
    report = proof.report
    assert report["ok"] and report["bits_different"] == 0 and report["first_divergence"] is None
    assert len(report["losses"]) == report["steps"] and report["losses"][-1] < report["losses"][0]
    assert report["tensors_compared"] > 100 * report["steps"]


@sampled("name", PLANS, on_push=2)
def test_no_bit_differs_from_one_device_after_3_steps(name: str) -> None:
    assert_equal_bits(prove(PLANS[name], steps=STEPS, transport=OVER.get(name, "memory")))


@sampled(
    "plan",
    [
        tiny(Layout(tp=2, pp=2), global_size=6, model="tiny-llama"),
        tiny(Layout(tp=2, pp=2), global_size=6, model="tiny-llama", tied_embeddings=True),
        tiny(Layout(tp=3, dp=2), global_size=6, model="tiny-gpt-6h", tied_embeddings=True, vocab_size=259),
        tiny(Layout(tp=6), global_size=2, model="tiny-gpt-6h"),
        tiny(Layout(dp=5), global_size=10, micro_size=2),
        tiny(Layout(pp=3, dp=2), global_size=10, micro_size=1),
    ],
    ids=["llama-untied", "llama-tied", "tp3-dp2-uneven-vocabulary", "tp6", "dp5-micro2", "pp3-dp2-m5"],
    on_push=2,
)
def test_no_bit_differs_over_memory(plan: Plan) -> None:
    assert_equal_bits(prove(plan, transport="memory", steps=2))


def test_microbatches_of_1_2_and_3_samples_have_one_fingerprint() -> None:
    plans = [tiny(Layout(pp=2), global_size=6, micro_size=size) for size in (1, 2, 3)]
    proofs = [prove(plan, transport="memory", steps=2) for plan in plans]
    for proof in proofs:
        assert_equal_bits(proof)
    assert len({proof.report["fingerprint"] for proof in proofs}) == 1


def test_gpt3_on_1024_devices_is_proved_as_its_twin_and_says_so() -> None:
    layout = Layout(tp=8, pp=8, dp=16, sequence_parallel=True, zero=1)
    whole = Plan(model_preset("gpt3-175b"), cluster_preset("dgx-a100-80g", 1024), layout, Batch(1536, 1, 2048))
    proof = prove(whole, transport="memory", steps=1)
    assert proof.ok and proof.report["world_size"] == 8
    assert any("tp 8 -> 2" in change for change in proof.report["twin"])


@sampled(
    ("fault", "phase", "tensor", "action"),
    [
        ("drop-reduction:3:layers.1.mlp.down", "activation", "layers.1.mlp", "1F0"),
        ("drop-reduction:2:layers.1.mlp.up", "activation gradient", "layers.1.mlp.norm", "1B0"),
        ("drop-reduction:0:layers.0.attention.output", "activation", "layers.0.attention", "0F0"),
        ("drop-reduction:1:layers.0.attention.qkv", "activation gradient", "layers.0.attention.norm", "0B0"),
    ],
    on_push=2,
)
def test_a_dropped_tensor_parallel_reduction_names_rank_action_and_block(
    fault: str, phase: str, tensor: str, action: str
) -> None:
    plan = tiny(Layout(tp=2, pp=2), global_size=4)
    proof = prove(plan, transport="memory", steps=1, fault=parse_fault(fault))
    first = proof.report["first_divergence"]
    assert not proof.ok and proof.report["bits_different"] > 0
    assert first["ranks"] == [int(fault.split(":")[1])]
    assert first["phase"] == phase and first["tensor"] == tensor and first["action"] == action
    assert 0 < first["elements_different"] <= first["num_elements"] and first["step"] == 1


@sampled("rank", [0, 2], on_push=1)
def test_a_dropped_gradient_reduction_over_dp3_names_rank_and_parameter(rank: int) -> None:
    tensor = "layers.1.attention.qkv.weight"
    proof = prove(tiny(Layout(dp=3), global_size=6), steps=1, fault=parse_fault(f"drop-reduction:{rank}:{tensor}"))
    first = proof.report["first_divergence"]
    assert (first["ranks"], first["tensor"], first["phase"], first["action"]) == (
        [rank],
        tensor,
        "gradient",
        "0REDUCE_GRAD",
    )
    assert proof.findings[0].rule == "bits-differ" and "data-parallel" in proof.findings[0].hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop-reduction", "drop-reduction:RANK:TENSOR"),
        ("drop-reduktion:0:head", "did you mean 'drop-reduction'"),
        ("drop-reduction:x:layers.0.mlp.down", "rank 'x'"),
    ],
)
def test_a_fault_that_cannot_be_read_says_how_to_write_one(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_fault(text)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("drop-reduction:4:layers.0.mlp.down", "rank 4 .* 4 ranks"),
        ("drop-reduction:0:layers.0.mlp.dwn", "did you mean 'layers.0.mlp.down'"),
        ("drop-reduction:3:layers.0.mlp.down", "rank 3 does not hold layers.0.mlp.down"),
        ("drop-reduction:0:layers.0.mlp.down.weight", "dp=1"),
    ],
)
def test_a_fault_that_the_run_cannot_have_is_refused(fault: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        prove(tiny(Layout(tp=2, pp=2), global_size=4), transport="memory", steps=1, fault=parse_fault(fault))


@pytest.mark.parametrize(
    ("difference", "rule", "word"),
    [
        (Difference(Key(1, ACTIVATION, "layers.0.mlp", 3), "differs", ()), "run-dependent", "depends on time"),
        (Difference(Key(1, WEIGHT, "head.norm.weight"), "missing", ()), "tensor-missing", "no rank of the run"),
        (
            Difference(Key(1, WEIGHT, "head.norm.weight"), "incomplete", (2, 3)),
            "tensor-incomplete",
            "ranks 2, 3, 1STEP",
        ),
    ],
)
def test_other_differences_have_words_of_their_own(difference: Difference, rule: str, word: str) -> None:
    (finding,) = describe(tiny(Layout(tp=2, pp=2), global_size=4), RunLedger({}), [difference])
    assert finding.rule == rule and finding.where.startswith("step 2") and word in str(finding)
