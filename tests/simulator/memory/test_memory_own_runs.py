"""Predicted memory of this backend's own runs against what its meter counts
(`backend.pipeline.activations`), to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.gates import sampled
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.parameter_groups import ParameterGroup
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Train
from shardproof.simulator.simulation.simulate import simulate

SIZES = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "head_dim": 16, "vocab_size": 512, "max_positions": 64}
MODELS = {
    "gpt": ModelSpec(
        "gpt",
        ffn_hidden_size=256,
        num_kv_heads=4,
        activation="gelu_tanh",
        norm="layernorm",
        position="learned",
        bias=True,
        **SIZES,
    ),
    "llama": ModelSpec("llama", ffn_hidden_size=192, num_kv_heads=2, **SIZES),
    "falcon": ModelSpec(
        "falcon",
        ffn_hidden_size=256,
        num_kv_heads=2,
        activation="gelu",
        norm="layernorm",
        parallel_block=True,
        **SIZES,
    ),
}
WINDOWS = {"sliding_window": 24, "window_layers": (1, 0)}
MODELS |= {
    "windows": replace(MODELS["llama"], **WINDOWS, rope_local_theta=100.0),
    "capped": replace(MODELS["llama"], **WINDOWS, attention_softcap=2.0, logit_softcap=1.0),
    "sinks": replace(MODELS["llama"], **WINDOWS, attention_sinks=True, rope_layers=(0, 1)),
}
MODELS["bloom"] = replace(MODELS["gpt"], position="alibi", embedding_norm=True)
RUNS = [
    ("bloom", "fast", Layout(tp=2), "1F1B"),
    ("bloom", "exact", Layout(pp=2), "1F1B"),
    ("windows", "fast", Layout(pp=2), "1F1B"),
    ("windows", "exact", Layout(pp=2), "1F1B"),
    ("capped", "fast", Layout(), "1F1B"),
    ("sinks", "fast", Layout(tp=2), "1F1B"),
    ("sinks", "exact", Layout(), "1F1B"),
    ("gpt", "fast", Layout(tp=2), "1F1B"),
    ("gpt", "fast", Layout(pp=2), "GPipe"),
    ("gpt", "exact", Layout(), "1F1B"),
    ("gpt", "exact", Layout(pp=2), "1F1B"),
    ("llama", "fast", Layout(pp=2, vpp=2), "Interleaved1F1B"),
    ("llama", "exact", Layout(tp=2, pp=2), "1F1B"),
    ("falcon", "fast", Layout(tp=2), "1F1B"),
    ("falcon", "exact", Layout(pp=2), "1F1B"),
]


@sampled(("model", "mode", "layout", "schedule"), RUNS, ids=lambda value: getattr(value, "degrees", value), on_push=5)
def test_weights_optimizer_gradients_and_kept_activations_are_exact(model, mode, layout, schedule):
    assert_lasting_is_exact(own_plan(model, mode, layout, schedule))


def own_plan(model: str, mode: str, layout: Layout, schedule: str, **sections) -> Plan:
    return Plan(
        model=MODELS[model],
        cluster=cluster_preset("this-host", layout.world_size),
        layout=layout,
        batch=Batch(8, 1, 64),
        precision=Precision("fp32"),
        numerics=Numerics(mode),
        schedule=ScheduleChoice(schedule),
        train=Train(steps=2),
        **sections,
    )


@sampled(
    ("optimizer", "layout"),
    [
        (Optimizer("sgd"), Layout(pp=2)),
        (Optimizer("sgd", momentum=0.0), Layout(tp=2)),
        (Optimizer("muon"), Layout(tp=2)),
        (Optimizer(groups=(ParameterGroup("layers.[01].mlp.*", learning_rate_multiplier=0.0),)), Layout(pp=2)),
    ],
    ids=["sgd", "sgd-without-momentum", "muon", "groups"],
    on_push=2,
)
def test_so_is_what_other_optimizers_keep(optimizer, layout):
    assert_lasting_is_exact(own_plan("llama", "exact", layout, "1F1B", optimizer=optimizer))


def assert_lasting_is_exact(plan: Plan) -> None:
    from shardproof.backend.trainer import Trainer

    simulation = simulate(plan)
    timeline = Trainer(plan, transport="memory").fit().timeline
    # a split backward lets go of more than this meter sees: tests/backend/ranks/test_own_runs.py has those
    assert timeline is not None
    for rank, memory in zip(simulation.global_ranks, simulation.memory, strict=True):
        measured = max(sample.num_bytes for sample in timeline.memory if sample.global_rank == rank)
        assert memory.lasting_bytes == pytest.approx(measured, abs=512)  # masks of one byte a token


@pytest.mark.parametrize(("layout", "off"), [(Layout(tp=2), 0.08), (Layout(), 0.05)], ids=["tp2", "one"])
def test_the_peak_of_muons_step_is_within_a_few_percent(layout: Layout, off: float) -> None:
    """Of matrices that are larger than what a sequence leaves, so that the peak is in STEP."""
    from shardproof.backend.trainer import Trainer

    wide = replace(MODELS["llama"], num_layers=1, hidden_size=384, ffn_hidden_size=1152, num_heads=4, head_dim=96)
    plan = own_plan("llama", "fast", layout, "1F1B", optimizer=Optimizer("muon"))
    plan = replace(plan, model=wide, batch=Batch(1, 1, 16))
    timeline = Trainer(plan, transport="memory", live_memory=True).fit().timeline
    assert timeline is not None
    for rank, memory in zip(*(getattr(simulate(plan), name) for name in ("global_ranks", "memory")), strict=True):
        measured = max(sample.num_bytes for sample in timeline.memory if sample.global_rank == rank)
        assert memory.peak_bytes == pytest.approx(measured, rel=off)
        assert memory.peak_action.endswith("STEP")
