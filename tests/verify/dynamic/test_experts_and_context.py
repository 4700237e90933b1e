"""Plans with experts, latent attention, context parallelism and hybrid sharding: static rules hold, and the
proof says what it lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Batch, Precision
from shardproof.core.schedule import lower
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.schedule.calls import Calls
from shardproof.verify.schedule.check import check
from shardproof.verify.schedule.facts import Facts
from shardproof.verify.schedule.plan_facts import gradient_axes, message_formats, plan_calls
from shardproof.verify.symbolic.symbolic import SCOPE_RULE, prove

RETAINED = Recompute()


def plan_of(
    model: str = "tiny-moe",
    schedule: str = "1F1B",
    *,
    recompute: Recompute | None = RETAINED,
    shard=None,
    mode="fast",
    **degrees,
) -> Plan:
    layout = Layout(**degrees)
    return plan(
        layout,
        model=model_preset(model),
        cluster="dgx-h100" if layout.world_size % 8 == 0 else "this-host",
        samples=4 * layout.dp,
        sequence=64,
        recompute=recompute,
        schedule=schedule,
        shard=shard,
        mode=mode,
        gradient_token_block=16,
        reduction_token_block=16,
        dtype="bf16",
    )


def calls_of(plan: Plan) -> Calls:
    return plan_calls(plan, lower(schedule_for(plan)))


def test_groups_of_8_ranks_with_tp2_cp2_dp2_and_experts_over_4_of_them() -> None:
    """Dense rank = tp + 2 cp + 4 dp; expert rank = ep + 4 edp."""
    calls = calls_of(plan_of(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True))
    expected = {
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "cp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "dp": [(0, 2, 4, 6), (1, 3, 5, 7)],
        "ep": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "etp": [(rank,) for rank in range(8)],
        "edp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "model": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }
    assert {axis: calls.groups(axis) for axis in expected} == expected


def test_hybrid_sharding_splits_4_copies_into_pairs_and_adds_over_equal_places() -> None:
    calls = calls_of(plan_of("tiny-llama", dp=4, zero=1, shard=2))
    assert calls.groups("dp_shard") == [(0, 1), (2, 3)]
    assert calls.groups("dp_replicate") == [(0, 2), (1, 3)]


def test_both_copies_of_a_dualpipe_stage_join_their_experts_of_equal_place() -> None:
    """Two pipeline ranks of two samples each: rank = dp + 2 pp, and expert parallelism takes the place of dp."""
    calls = calls_of(plan_of(schedule="DualPipe", pp=2, dp=2, ep=2))
    assert calls.groups("replica", 0) == [(0, 2, 1, 3)]
    assert calls.groups("expert_replica", 0) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"dp": 2}, {"dp", "edp"}),
        ({"dp": 2, "ep": 2}, {"dp"}),
        ({"cp": 2}, {"dp", "edp"}),
        ({"cp": 2, "dp": 2, "ep": 2}, {"dp", "edp"}),
        ({"tp": 2}, set()),
        ({"tp": 2, "etp": 1, "sequence_parallel": True}, {"tp", "edp"}),
        ({"tp": 2, "sequence_parallel": True}, {"tp"}),
        ({"model": "qwen3-8b", "tp": 2}, {"tp"}),
        ({"dp": 4, "ep": 2, "zero": 2, "shard": 2}, {"dp_replicate", "edp_replicate"}),
    ],
)
def test_gradients_are_added_over_the_axes_that_hold_other_tokens(degrees, expected) -> None:
    assert gradient_axes(plan_of(**degrees), 0) == expected


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-deepseek"])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("ep", "etp"), [(1, None), (2, None), (4, 1)])
def test_every_static_rule_holds_for_experts_with_context_and_sequence_parallelism(model, zero, ep, etp) -> None:
    plan = plan_of(model, tp=2, cp=2, dp=2, pp=2, ep=ep, etp=etp, zero=zero, sequence_parallel=True)
    schedule = lower(schedule_for(plan))
    assert check(schedule, plan=plan) == []
    assert message_formats(plan).outputs[0] == "bf16[1,16,64]"


def test_a_forgotten_sum_of_expert_gradients_is_found() -> None:
    plan = plan_of(dp=4, ep=2)
    schedule, calls = lower(schedule_for(plan)), calls_of(plan)
    broken = replace(calls, lists=tuple(tuple(call for call in each if call.axis != "edp") for each in calls.lists))
    found = check(schedule, facts=Facts(collectives=broken))
    assert {finding.rule for finding in found} == {"gradient-axes"}
    assert "over edp 0 times instead of once" in found[0].what


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (plan_of("tiny-llama", cp=2, dp=3, zero=1, shard=3, mode="exact"), ["the cp=2 parts of a sequence apart"]),
    ],
    ids=["hybrid"],
)
def test_the_symbolic_proof_says_what_it_does_not_know_instead_of_proving_less(plan, named) -> None:
    proof = prove(plan, schedule_for(plan))
    assert proof.ok and not proof.same_mathematics and proof.num_values == 0
    assert [finding.rule for finding in proof.findings] == [SCOPE_RULE]
    assert all(name in proof.line for name in named)


@pytest.mark.parametrize(
    "recompute",
    [
        Recompute("full", 1),
        Recompute("full", 0),
        Recompute("full", layers=(1,)),
        Recompute("selective", modules=("mlp", "norm")),
    ],
    ids=str,
)
@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_partial_recomputation_is_the_same_mathematics(recompute, degrees) -> None:
    plan = plan_of("tiny-llama", recompute=recompute, **degrees)
    proof = prove(plan, schedule_for(plan))
    assert proof.same_mathematics and proof.num_values > 0


def test_the_twin_of_deepseek_keeps_experts_latent_attention_and_multi_token_prediction() -> None:
    layout = Layout(tp=2, cp=2, dp=8, pp=4, ep=8, etp=1, sequence_parallel=True, stages="Et*15|t*15|t*15|t*16mL")
    cluster = cluster_preset("dgx-h100", layout.world_size)
    runtime = Runtime("megatron-te", tp_comm_overlap=True)
    whole = Plan(model_preset("deepseek-v3"), cluster, layout, Batch(64, 1, 4096), runtime, Precision("fp8"))
    small, changes = twin(whole)
    assert small.model.is_moe and small.model.is_mla and small.model.num_mtp_layers == 1
    assert (small.layout.tp, small.layout.etp) == (2, 1)
    said = " ".join(changes)
    for words in ("num_experts 256 -> ", "kv_lora_rank 512 -> 10", "qk_rope_head_dim 64 -> 4"):
        assert words in said, words
