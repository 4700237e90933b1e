"""Recomputation: saved activations are really freed, as many as the memory model says, and no bit changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.plans import plan
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.operators import layer_operators
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Batch, Numerics, ScheduleChoice
from shardproof.simulator.memory.layers import full_recompute, layer_nodes
from shardproof.simulator.memory.tensors import LayerTensors
from shardproof.simulator.stack.profiles import profile_of

MODES = {
    "none": Recompute(),
    "full": Recompute("full"),
    "core_attn": Recompute("selective", modules=("core_attn",)),
    "mlp": Recompute("selective", modules=("mlp",)),
    "norm": Recompute("selective", modules=("norm",)),
    "activation": Recompute("selective", modules=("mlp_act",)),
    "norm-and-activation": Recompute("selective", modules=("norm", "mlp_act")),
    "all-modules": Recompute("selective", modules=("core_attn", "mlp", "norm")),
}


def plan_of(
    model: str,
    num_layers: int,
    recompute: Recompute | None,
    layout: Layout,
    *,
    dropout: float = 0.0,
    dtype: str = "fp32",
) -> Plan:
    return plan(
        layout,
        model=model,
        num_layers=num_layers,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        samples=2 * layout.dp,
        micro=2,
        dtype=dtype,
        recompute=recompute,
    )


def held_by_a_forward(transport, plan: Plan) -> int:
    """Bytes that the only forward of a step keeps."""
    rank = TrainingRank(transport, plan)
    meter, held = rank.meter(), []
    release = meter.release

    def noted(stage: int, microbatch: int) -> None:
        held.append(meter._held[stage, microbatch])
        release(stage, microbatch)

    meter.release = noted
    rank.step(0, meter=meter)
    return held[0]


LAYERS = [
    pytest.param("tiny-gpt", Layout(), {}, id="gpt"),
    pytest.param("tiny-llama", Layout(tp=2), {}, id="llama-tp2"),
    pytest.param("tiny-llama", Layout(tp=2, sequence_parallel=True), {}, id="llama-tp2-sp"),
    pytest.param("tiny-gpt", Layout(tp=2), {"dropout": 0.1}, id="gpt-tp2-dropout"),
    pytest.param("tiny-gpt", Layout(), {"dtype": "bf16"}, id="gpt-bf16"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "layout", "chosen"), LAYERS)
def test_a_layer_keeps_what_the_memory_model_says(model: str, layout: Layout, chosen: dict, mode: str) -> None:
    """The measured difference of three layers and two, within one percent or half a kilobyte: statistics are
    padded to vector registers."""
    world = layout.world_size
    two, three = (
        run_threads(
            MemoryWorld(world, timeout_s=60),
            held_by_a_forward,
            plan_of(model, num_layers, MODES[mode], layout, **chosen),
        )[0]
        for num_layers in (2, 3)
    )
    plan = plan_of(model, 2, MODES[mode], layout, **chosen)
    tensors = LayerTensors(plan, profile_of(plan).memory)
    nodes = layer_nodes(tensors, layer_operators(plan.model, 0))
    predicted = sum(
        node.retained_bytes
        for node in (full_recompute(nodes, tensors.hidden, tensors.retained_input) if mode == "full" else nodes)
    )
    assert three - two == pytest.approx(predicted, rel=0.01, abs=512)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_distributed_input_is_kept_in_equal_parts(tp: int) -> None:
    """Two samples of 24 tokens and 48 features of 4 bytes, less the parts of the others."""
    model, distributed = "tiny-gpt-6h" if tp == 3 else "tiny-gpt", Recompute("full", distribute=True)
    retained = {}
    for recompute in (MODES["full"], distributed):
        held = {
            num_layers: run_threads(
                MemoryWorld(tp, timeout_s=60), held_by_a_forward, plan_of(model, num_layers, recompute, Layout(tp=tp))
            )
            for num_layers in (2, 3)
        }
        retained[recompute] = [three - two for two, three in zip(held[2], held[3], strict=True)]
    whole = retained[MODES["full"]][0]
    assert whole == 4 * 2 * 24 * model_preset(model).hidden_size
    assert sum(retained[distributed]) == whole and set(retained[distributed]) == {whole // tp}
    tensors = LayerTensors(plan := plan_of(model, 2, distributed, Layout(tp=tp)), profile_of(plan).memory)
    nodes = full_recompute(layer_nodes(tensors, layer_operators(plan.model, 0)), tensors.hidden, tensors.retained_input)
    assert sum(node.retained_bytes for node in nodes) == whole // tp


def trained(transport, plan: Plan) -> list[torch.Tensor]:
    rank = TrainingRank(transport, plan)
    for step in range(2):
        rank.step(step)
    return [held.tensor.clone() for held in rank.optimizer.held]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_weights_after_two_steps_are_those_of_kept_activations_bit_for_bit(mode: str) -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    weights = {}
    for name, recompute in {**MODES, "one-layer-a-stage": Recompute("full", num_layers=1)}.items():
        plan = replace(plan_of("tiny-llama", 4, recompute, layout), numerics=Numerics(mode), batch=Batch(4, 2, 24))
        plan = replace(plan, schedule=ScheduleChoice("ZBH1") if name == "full" else plan.schedule)
        weights[name] = run_threads(MemoryWorld(4, timeout_s=60), trained, plan)
    retained = replace(
        plan_of("tiny-llama", 4, Recompute(), Layout(tp=2, pp=2)), numerics=Numerics(mode), batch=Batch(4, 2, 24)
    )
    for name, recompute in (("none-without-sp", Recompute()), ("distributed", Recompute("full", distribute=True))):
        weights[name] = run_threads(MemoryWorld(4, timeout_s=60), trained, replace(retained, recompute=recompute))
    assert_equal(weights.pop("distributed"), weights.pop("none-without-sp"), "distributed")
    for name, ranks in weights.items():
        assert_equal(ranks, weights["none"], name)


def assert_equal(ranks: list[list[torch.Tensor]], others: list[list[torch.Tensor]], name: str) -> None:
    for ours, theirs in zip(ranks, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), name
