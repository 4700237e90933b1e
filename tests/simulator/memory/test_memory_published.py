"""Peaks against published measurements of Megatron-LM with Transformer Engine, rank by rank."""

from __future__ import annotations

import json

import pytest

from helpers.paths import DATA
from helpers.plans import product_plan
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.simulator.memory.memory import RankMemory, rank_memories

ROWS = json.loads((DATA / "simumax_b200_memory.json").read_text())["rows"]
MIB = 2**20

LLAMA = {"head_dim": 128, "vocab_size": 128256, "max_positions": 4096}
MODELS = {
    "Llama3-70B (12 layers)": ModelSpec(
        name="70b", num_layers=12, hidden_size=8192, ffn_hidden_size=28672, num_heads=64, num_kv_heads=8, **LLAMA
    ),
    "Llama3-405B (4 layers)": ModelSpec(
        name="405b", num_layers=4, hidden_size=16384, ffn_hidden_size=53248, num_heads=128, num_kv_heads=16, **LLAMA
    ),
    "DeepSeek-V2 (4 layers)": ModelSpec(
        name="deepseek-v2",
        num_layers=4,
        hidden_size=5120,
        ffn_hidden_size=12288,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        vocab_size=102400,
        max_positions=4096,
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
    ),
}


def memories(row) -> tuple[RankMemory, ...]:
    degrees = {axis: row[axis] for axis in ("tp", "pp", "dp", "ep")}
    model, chosen = MODELS[row["model"]], {"sequence_parallel": row["tp"] > 1, "zero": 1, "profile": "megatron-te"}
    plan = product_plan(model=model, cluster="dgx-b200", sequence=4096, **degrees, **chosen)
    return rank_memories(plan, schedule_for(plan))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_every_pipeline_rank_of_simumax_b200_is_within_0_2_percent(row):
    measured, per_stage = row["max_allocated_mib"], 8 // row["pp"]
    for stage, memory in enumerate(memories(row)):
        worst = max(measured[stage * per_stage : (stage + 1) * per_stage])
        assert memory.peak_bytes / MIB == pytest.approx(worst, rel=2e-3)


def test_worst_ranks_of_simumax_b200_are_within_0_05_percent_on_average():
    errors = [
        abs(max(memory.peak_bytes for memory in memories(row)) / MIB / max(row["max_allocated_mib"]) - 1)
        for row in ROWS
    ]
    assert len(errors) == 10
    assert sum(errors) / len(errors) < 5e-4


def test_the_first_backward_sets_the_peak_and_the_allocator_reserves_more():
    for memory in memories(ROWS[0]):
        assert memory.peak_action == f"{memory.pp_rank}B0"
        assert memory.reserved_bytes > memory.peak_bytes
