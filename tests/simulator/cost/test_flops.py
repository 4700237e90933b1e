"""FLOPs of a step against published formulas and figures, and against the products of the program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.program import Product, operations
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.flops import layer_flops_per_token, step_flops

MODEL = ModelSpec("m", 4, 64, 128, 8, 8, 24, 96, 64, activation="gelu")
EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "num_shared_experts": 1,
    "expert_ffn_hidden_size": 16,
    "first_dense_layers": 1,
}
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}


def plan_of(model, *, samples=8, sequence=32, recompute=None, **layout) -> Plan:
    return product_plan(model=model, samples=samples, sequence=sequence, recompute=recompute, **layout)


@pytest.mark.parametrize(
    ("name", "mode"), [("gpt3-175b", "none"), ("gpt3-175b", "selective"), ("megatron-22b", "full")]
)
def test_gpt_steps_are_those_of_korthikanti_and_narayanan(name, mode):
    """Korthikanti et al. 2022, appendix A: 72BLsh^2(1 + s/6h + V/12hL) needed; Narayanan et al. 2021, equation 3: with
    full recomputation 96BLsh^2(1 + s/6h + V/16Lh). Selective recomputation repeats the core once, a third of its
    72BLsh^2(s/6h) (the s/3h of Korthikanti et al. counts three more forwards of it)."""
    model = model_preset(name)
    b, l, s, h, v = 8, model.num_layers, 2048, model.hidden_size, model.vocab_size  # noqa: E741 - the papers' letters
    found = step_flops(plan_of(model, sequence=s, recompute=Recompute(mode)))
    assert found.model == pytest.approx(72 * b * l * s * h**2 * (1 + s / (6 * h) + v / (12 * h * l)), rel=1e-12)
    hardware = {
        "none": 72 * b * l * s * h**2 * (1 + s / (6 * h) + v / (12 * h * l)),
        "selective": 72 * b * l * s * h**2 * (1 + s / (6 * h) * 4 / 3 + v / (12 * h * l)),
        "full": 96 * b * l * s * h**2 * (1 + s / (6 * h) + v / (16 * h * l)),
    }[mode]
    assert found.hardware == pytest.approx(hardware, rel=1e-12)
    assert found.model - found.model_causal == pytest.approx(6 * b * l * s * s * h, rel=1e-12)


def test_windows_are_counted_layer_by_layer():
    """Three of four layers see 8 keys, and of the pairs of a query and a key the band below the diagonal."""
    s, w, width = 32, 8, 2 * 8 * (24 + 24)
    whole = step_flops(plan_of(MODEL))
    some = step_flops(plan_of(replace(MODEL, sliding_window=w, window_layers=(1, 1, 1, 0))))
    assert whole.model - some.model == 3 * 8 * s * width * 3 * (s - w)
    band = w * s - w * w / 2
    assert whole.model_causal - some.model_causal == 3 * 8 * width * 3 * (s * s / 2 - band)
    assert some.hardware == some.model


@pytest.mark.parametrize(("name", "gflops"), [("deepseek-v2", 155), ("deepseek-v3", 250), ("llama3.1-405b", 2448)])
def test_training_cost_per_token_is_what_deepseek_publishes(name, gflops):
    """Zhao et al. 2025, Insights into DeepSeek-V3 (arXiv 2505.09343), table 2: causal attention, sequences of 4,096."""
    model = replace(model_preset(name), num_mtp_layers=0)
    assert step_flops(plan_of(model, samples=1, sequence=4096)).model_causal / 4096 / 1e9 == pytest.approx(
        gflops, rel=0.011
    )


@pytest.mark.parametrize(
    ("name", "active_billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("deepseek-v2", 21),
        ("deepseek-v3", 37),
    ],
)
def test_a_token_meets_the_active_parameters_that_are_published(name, active_billions):
    """Model cards: matrices of the layers that a token meets, and the token table and output head."""
    model = model_preset(name)
    layers = sum(layer_flops_per_token(model, layer) for layer in range(model.num_layers)) / 2
    tables = 2 * model.vocab_size * model.hidden_size
    assert (layers + tables) / 1e9 == pytest.approx(active_billions, rel=0.025)


@pytest.mark.parametrize(
    "recompute",
    [
        Recompute(),
        Recompute("selective"),
        Recompute("selective", modules=("mlp", "core_attn")),
        Recompute("selective", modules=("moe", "mla_up_proj")),
        Recompute("selective", modules=("shared_experts", "moe_act")),
        Recompute("full"),
        Recompute("full", 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"pp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 4, "etp": 1, "sequence_parallel": True},
        {"pp": 4, "tp": 4, "sequence_parallel": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("q_lora_rank", [40, 0])
def test_the_products_of_all_ranks_are_the_hardware_flops_of_the_step(recompute, layout, q_lora_rank):
    latent = {**LATENT, "q_lora_rank": q_lora_rank}
    plan = plan_of(
        replace(MODEL, activation="swiglu", **EXPERTS, **latent, num_mtp_layers=1), recompute=recompute, **layout
    )
    degrees = plan.layout
    total = sum(
        operation.flops
        for kind in (Kind.F, Kind.B)
        for stage in range(degrees.pp)
        for tp_rank in range(degrees.tp)
        for operation in operations(plan, kind, stage, tp_rank)
        if isinstance(operation, Product)
    )
    assert total * plan.num_microbatches * degrees.dp * degrees.cp == step_flops(plan).hardware
