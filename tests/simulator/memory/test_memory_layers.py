"""What layers keep, against sums written out tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.simulator.memory.memory import rank_memories
from shardproof.simulator.memory.sizes import layer_activation_bytes

S, H, HEADS, E = 4096, 5120, 128, 2
DEEPSEEK = ModelSpec(
    name="deepseek-v2",
    num_layers=4,
    hidden_size=H,
    ffn_hidden_size=12288,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=192,
    vocab_size=102400,
    max_positions=S,
    num_experts=160,
    experts_per_token=6,
    num_shared_experts=2,
    expert_ffn_hidden_size=1536,
    first_dense_layers=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
HIDDEN = S * H * E
STATISTICS = 4 * S
LATENTS = S * E * (1536 + 1536 + 512 + 64 + 512)
"""Low-rank queries and keys with their normalised forms; the rotary part of the keys lies besides the latent one."""
OPERANDS = S * HEADS * E * (192 + 192 + 128)
"""Queries, keys and values."""
ATTENTION = 2 * HIDDEN + STATISTICS + LATENTS + 2 * STATISTICS + OPERANDS + S * HEADS * 128 * E + 4 * S * HEADS
ROUTED = -(-S * 6 // 160) * 160
TABLES = S * 160 * (4 + 4 + 1 + 1 + 1 + 2) + 4 * S * (2 * 160 + 1)
EXPERTS = ROUTED * E * (H + 2 * 1536 + 1536)
SHARED = S * E * (2 * 3072 + 3072)


def plan(recompute: Recompute | None = None, *, ep: int = 8, dtype: str = "bf16") -> Plan:
    return product_plan(
        model=DEEPSEEK,
        cluster="dgx-b200",
        samples=32,
        sequence=S,
        profile="megatron-te",
        recompute=recompute,
        dtype=dtype,
        dp=8,
        ep=ep,
        zero=1,
    )


def test_a_latent_attention_layer_keeps_latents_and_whole_heads():
    assert layer_activation_bytes(plan()) == ATTENTION + 2 * HIDDEN + STATISTICS + S * 12288 * 3 * E


def test_an_expert_layer_keeps_tables_permuted_tokens_and_both_kinds_of_experts():
    assert layer_activation_bytes(plan(), layer=1) == ATTENTION + 2 * HIDDEN + STATISTICS + TABLES + EXPERTS + SHARED


def test_balanced_experts_keep_as_much_whatever_the_expert_parallelism():
    assert layer_activation_bytes(plan(ep=2), layer=1) == layer_activation_bytes(plan(ep=8), layer=1)


@pytest.mark.parametrize(
    ("modules", "dense", "moe"),
    [
        (("core_attn",), 4 * S * HEADS, 4 * S * HEADS),
        (("norm",), HIDDEN, 2 * HIDDEN),
        (("mlp",), HIDDEN + S * 12288 * 3 * E, 0),
        (("moe_act",), 0, ROUTED * 1536 * E),
        (("shared_experts",), 0, SHARED),
        (("moe",), 0, TABLES + EXPERTS + SHARED),
        (("mla_up_proj",), OPERANDS + S * E * (1536 + 512), OPERANDS + S * E * (1536 + 512)),
        (("core_attn", "moe_act"), 4 * S * HEADS, 4 * S * HEADS + ROUTED * 1536 * E),
    ],
)
def test_recomputed_modules_give_up_their_tensors(modules, dense, moe):
    selective = plan(Recompute("selective", modules=modules))
    assert layer_activation_bytes(plan()) - layer_activation_bytes(selective) == dense
    assert layer_activation_bytes(plan(), layer=1) - layer_activation_bytes(selective, layer=1) == moe


def test_full_recomputation_keeps_inputs_and_peaks_with_one_layer_whole():
    none, full = (rank_memories(chosen, schedule_for(chosen))[0] for chosen in (plan(), plan(Recompute("full"))))
    logits = S * (-(-102400 // 128) * 128) * E
    head = 2 * HIDDEN + STATISTICS + logits
    assert full.activations_bytes == 8 * S + 4 * HIDDEN + head
    assert full.peak_bytes < none.peak_bytes
    assert full.working_bytes > layer_activation_bytes(plan(), layer=1) - HIDDEN - head


def test_only_the_first_layers_of_a_stage_are_recomputed_where_a_limit_is_given():
    retained = [
        rank_memories(chosen, schedule_for(chosen))[0].activations_bytes
        for chosen in (plan(), plan(Recompute("full", num_layers=1)))
    ]
    assert retained[0] - retained[1] == layer_activation_bytes(plan()) - HIDDEN


def test_experts_are_cut_over_expert_parallelism_and_their_optimizer_over_expert_copies():
    elements = 160 * 3 * H * 1536 * 3
    eight, two = (rank_memories(chosen, schedule_for(chosen))[0] for chosen in (plan(ep=8), plan(ep=2)))
    assert two.weights_bytes - eight.weights_bytes == 2 * elements * 3 // 8
    assert two.gradients_bytes - eight.gradients_bytes == 4 * elements * 3 // 8
    assert two.optimizer_bytes == eight.optimizer_bytes  # 12 bytes over ep * expert_dp = 8 parts either way


def test_operands_of_products_are_kept_in_fp8():
    dense = layer_activation_bytes(plan()) - layer_activation_bytes(plan(dtype="fp8"))
    # inputs of down, up and MLP products; the core's output stays in 16 bits
    assert dense == S * (H + 1536 + 512 + H + 12288)


def test_a_table_is_padded_to_128_rows_a_rank():
    odd = replace(plan(), model=replace(DEEPSEEK, vocab_size=102401))
    one, padded = (rank_memories(chosen, schedule_for(chosen))[0] for chosen in (plan(), odd))
    assert padded.weights_bytes - one.weights_bytes == 2 * 2 * 128 * H
