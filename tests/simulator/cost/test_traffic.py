"""Memory-bound kernels: closed forms of Korthikanti et al. 2022 for the tensors they read and write,
and what a stack fuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.blocks import layer_blocks
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Group, stage_groups
from shardproof.simulator.cost.traffic import Traffic, group_traffic
from shardproof.simulator.stack.profiles import PROFILES

MEGATRON, OLD, EAGER = PROFILES["megatron-te"], PROFILES["megatron-2021"], PROFILES["torchtitan"]


def plan(model: ModelSpec, layout: Layout | None = None, micro: int = 1) -> Plan:
    layout = layout or Layout()
    return product_plan(
        layout, model=model, cluster="dgx-a100-80g", samples=micro * layout.dp, micro=micro, sequence=2048
    )


GPT, LLAMA = model_preset("gpt3-175b"), model_preset("llama3-8b")


def traffic_of(plan: Plan, profile, layer: int):
    return group_traffic(plan, profile, Group((layer_blocks(plan.model)[layer],)))


def total(plan: Plan, profile) -> Traffic:
    return sum(traffic_of(plan, profile, plan.model.num_layers - 1).values(), Traffic())


def test_a_gpt_layer_moves_ten_hidden_states_and_two_mlp_states_forward():
    sbh = 2048 * 12288 * 2
    found = traffic_of(plan(GPT), MEGATRON, 0)
    assert found["norm"].forward_bytes == 2 * 2 * sbh
    assert found["residual"].forward_bytes == 2 * 3 * sbh
    assert found["mlp"].forward_bytes == 2 * 4 * sbh
    assert found["attention"].forward_bytes == 0  # positions are learned, and a fused core is priced with its products


@pytest.mark.parametrize("field", ["qkv_bias", "attention_output_bias"])
def test_a_bias_of_attention_is_read_once_for_its_gradient(field):
    plain, biased = (traffic_of(plan(replace(LLAMA, **{field: on})), MEGATRON, 0)["attention"] for on in (False, True))
    width = 2048 * 2 * {"qkv_bias": 4096 + 2 * 1024, "attention_output_bias": 4096}[field]
    assert biased.backward_bytes - plain.backward_bytes == width
    assert (biased.backward_kernels - plain.backward_kernels, biased.forward_bytes) == (1, plain.forward_bytes)


def test_dropout_adds_one_byte_a_mask_element_and_its_backward():
    sbh = 2048 * 12288
    plain, dropped = (traffic_of(plan(GPT), profile, 0)["residual"] for profile in (MEGATRON, OLD))
    assert dropped.forward_bytes - plain.forward_bytes == 2 * sbh
    assert dropped.backward_bytes - plain.backward_bytes == 2 * 5 * sbh


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallelism_divides_norms_and_residuals_by_tp_and_nothing_else(tp):
    whole, cut = (traffic_of(plan(GPT, Layout(tp=tp, sequence_parallel=on)), OLD, 0) for on in (False, True))
    for name in ("norm", "residual"):
        assert cut[name].forward_bytes == whole[name].forward_bytes / tp
    assert cut["mlp"].forward_bytes == whole["mlp"].forward_bytes


@pytest.mark.parametrize("profile", [MEGATRON, OLD, EAGER], ids=lambda profile: profile.name)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_traffic_grows_with_the_tokens_and_kernels_do_not(profile, model):
    one, four = (total(plan(model, micro=micro), profile) for micro in (1, 4))
    assert four.forward_bytes == pytest.approx(4 * one.forward_bytes) and four.backward_bytes == pytest.approx(
        4 * one.backward_bytes
    )
    assert (four.forward_kernels, four.backward_kernels) == (one.forward_kernels, one.backward_kernels)


def test_an_eager_llama_layer_moves_several_times_what_a_fused_one_does():
    eager, fused = total(plan(LLAMA), EAGER), total(plan(LLAMA), replace(EAGER, fused_elementwise=True))
    assert 2 < eager.forward_bytes / fused.forward_bytes < 5 and 2 < eager.backward_bytes / fused.backward_bytes < 5
    assert eager.forward_kernels > 2 * fused.forward_kernels


def test_context_parallelism_divides_all_traffic():
    whole, cut = total(plan(LLAMA), MEGATRON), total(plan(LLAMA, Layout(cp=4)), MEGATRON)
    assert cut.forward_bytes == whole.forward_bytes / 4 and cut.backward_bytes == whole.backward_bytes / 4


def test_a_moe_layer_permutes_every_copy_of_a_token():
    mixtral = plan(model_preset("mixtral-8x7b"))
    moe = traffic_of(mixtral, MEGATRON, 0)["moe"].forward_bytes
    sbh, copies = 2048 * 4096 * 2, 2
    scores = 4 * 2048 * 8 * 8
    assert moe == 2 * (sbh + copies * sbh) + 4 * copies * sbh + scores


@pytest.mark.parametrize(("sequence_parallel", "gathered"), [(True, 4), (False, 1)])
def test_experts_cut_over_four_ranks_reorder_the_tokens_of_all_four(sequence_parallel, gathered):
    mixtral = plan(model_preset("mixtral-8x7b"), Layout(tp=4, sequence_parallel=sequence_parallel))
    own = 2048 // (4 if sequence_parallel else 1)
    moe = traffic_of(mixtral, MEGATRON, 0)["moe"].forward_bytes
    sbh, copies = own * 4096 * 2, 2
    assert moe == 2 * (sbh + copies * sbh) + 4 * copies * sbh * gathered + 4 * own * 8 * 8


def test_a_squared_relu_in_two_kernels_moves_twice_the_bytes_forward_and_20_for_6_backward():
    nemotron = plan(model_preset("nemotron4-15b"))
    fused, eager = (traffic_of(nemotron, profile, 0)["mlp"] for profile in (MEGATRON, PROFILES["nemo-25.02"]))
    elements = 2048 * nemotron.model.ffn_hidden_size
    assert (fused.forward_bytes, fused.backward_bytes) == (4 * elements, 6 * elements)
    assert (eager.forward_bytes, eager.backward_bytes) == (8 * elements, 20 * elements)
    assert total(plan(LLAMA), PROFILES["nemo-25.02"]) == total(plan(LLAMA), MEGATRON)


def test_a_stage_prices_its_ends_by_tokens_and_local_vocabulary():
    first = plan(GPT, Layout(tp=8))
    kinds = {group.kind: group_traffic(first, MEGATRON, group) for group in stage_groups(first, 0)}
    assert set(kinds) == {"embedding", "layer", "head"}
    logits = 2048 * GPT.vocab_size / 8
    fused, plain = (
        group_traffic(first, profile, stage_groups(first, 0)[-1])["head"].forward_bytes for profile in (MEGATRON, OLD)
    )
    assert plain - fused == pytest.approx((38 - 22) * logits)


def test_biases_of_experts_are_summed_everywhere_and_added_in_steps_by_megatron():
    bare, biased = (
        plan(replace(model_preset("mixtral-8x7b"), bias=bias), Layout(ep=8, dp=8)) for bias in (False, True)
    )
    copies, hidden = 2048 * 2, 4096
    for profile, forward, backward in ((EAGER, 0, 0), (MEGATRON, 28, 40)):
        less, more = (traffic_of(each, profile, 0)["moe"] for each in (bare, biased))
        sums = copies * (2 * 14336 + hidden) * 2
        assert more.forward_bytes - less.forward_bytes == forward * copies * hidden
        assert more.backward_bytes - less.backward_bytes == backward * copies * hidden + sums


def test_megatron_rotates_in_steps_where_yarn_scales_queries_and_keys():
    stretched = replace(LLAMA, rope_scaling="yarn", rope_factor=32.0)
    elements = 2048 * (32 + 8) * 128  # of queries and keys
    plain, scaled = (traffic_of(plan(model), MEGATRON, 0)["attention"] for model in (LLAMA, stretched))
    assert scaled.forward_bytes == 24 * elements and plain.forward_bytes == 2 * 2 * elements
    compiled = PROFILES["xla"]
    assert traffic_of(plan(stretched), compiled, 0) == traffic_of(plan(LLAMA), compiled, 0)
