"""Routers on real ranks: losses, noise, capacity and the bias of experts are those of one device, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.train import Train
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.ledger.ledger import NO_STEP
from shardproof.verify.run.proof_run import ProofJob, one_device, run_ledger

SOFTMAX = ModelSpec("moe", 2, 24, 48, 6, 6, 4, 256, 64, num_experts=6, experts_per_token=2, expert_ffn_hidden_size=12)
LIMITED = replace(
    SOFTMAX, normalized_router_weights=False, router_scaling=16.0, num_router_groups=3, router_groups_per_token=2
)
SIGMOID = replace(
    LIMITED,
    router_scores="sigmoid",
    normalized_router_weights=True,
    router_group_scores="top_two",
    router_scaling=2.5,
    expert_bias=True,
    expert_capacity_factor=1.0,
)
BUSY = Train(
    steps=2, learning_rate=1e-2, router_aux_loss=0.1, router_z_loss=0.01, router_jitter=0.1, expert_bias_rate=0.01
)


def tiny(
    model: ModelSpec, layout: Layout, *, micro=1, schedule="1F1B", recompute=None, dtype="fp32", train=BUSY
) -> Plan:
    return plan(
        layout,
        model=model,
        samples=6,
        micro=micro,
        sequence=12,
        dtype=dtype,
        schedule=schedule,
        recompute=recompute,
        gradient_token_block=3,
        reduction_token_block=3,
        clip_grad_norm=0.1,
        train=train,
    )


MOE = Recompute("selective", modules=("moe",))


@sampled(
    "plan",
    [
        pytest.param(tiny(SIGMOID, Layout(tp=2, dp=2), micro=3), id="tp2-dp2-micro3"),
        pytest.param(
            tiny(SIGMOID, Layout(tp=3, sequence_parallel=True), micro=2, recompute=MOE, dtype="bf16"),
            id="tp3-sp-moe-bf16",
        ),
        pytest.param(tiny(SIGMOID, Layout(tp=2, pp=2), recompute=Recompute("full")), id="tp2-pp2-full-recomputation"),
        pytest.param(tiny(SIGMOID, Layout(pp=2, vpp=2), schedule="ZBVZeroBubble"), id="split-backward"),
        pytest.param(tiny(SIGMOID, Layout(pp=2, dp=1), schedule="DualPipe"), id="replicas"),
        pytest.param(tiny(LIMITED, Layout(dp=3), train=replace(BUSY, expert_bias_rate=0.001)), id="limited-dp3"),
        pytest.param(tiny(SIGMOID, Layout(tp=2, cp=2, sequence_parallel=True), micro=2), id="tp2-cp2-sp-micro2"),
        pytest.param(
            tiny(SIGMOID, Layout(dp=3, ep=3), micro=2, train=replace(BUSY, ignore_token=101)), id="ep3-ignored-tokens"
        ),
    ],
    on_push=2,
)
def test_no_bit_differs_with_every_choice_of_a_router(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


def test_the_ledger_holds_biases_that_moved_and_losses_of_routers() -> None:
    ledger = run_ledger(ProofJob(one_device(tiny(SIGMOID, Layout())), 2), "memory")
    biases = [key for key in ledger.pieces if key.tensor.endswith("router.expert_bias")]
    assert {(key.step, key.phase, key.tensor) for key in biases} == {
        (step, "weight", f"layers.{layer}.mlp.router.expert_bias") for step in (NO_STEP, 0, 1) for layer in range(2)
    }
    assert len({ledger.pieces[key][0].digest for key in biases}) > 1
    assert all(0.1 < loss < 1 for loss in ledger.scalars("aux_loss"))
