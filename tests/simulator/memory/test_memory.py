"""Memory against closed forms of the papers and against the program's own counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.paths import EXAMPLES
from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import ModularPlan, Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import gradient_elements, stage_elements
from shardproof.core.schedule import build
from shardproof.simulator.memory.layers import head_nodes
from shardproof.simulator.memory.memory import COMPONENTS, peak_in_flight, rank_memories
from shardproof.simulator.memory.reserved import reserved_bytes
from shardproof.simulator.memory.sizes import layer_activation_bytes
from shardproof.simulator.memory.tensors import LayerTensors
from shardproof.simulator.search.fit import fit
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.stack.memory_profile import ALLOCATOR_FACTOR
from shardproof.simulator.stack.profiles import profile_of


def gpt3(layout: Layout, *, recompute="none", micro=1, dtype="bf16", global_size=64, schedule="1F1B") -> Plan:
    return product_plan(
        layout,
        model="gpt3-175b",
        cluster="dgx-a100-80g",
        samples=global_size,
        micro=micro,
        sequence=2048,
        dtype=dtype,
        recompute=recompute,
        schedule=schedule,
    )


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 8), (5, 12), (8, 3), (6, 6)])
def test_1f1b_holds_p_minus_stage_microbatches_and_gpipe_all(p, m):
    assert peak_in_flight(build("1F1B", pp=p, num_microbatches=m)) == [min(m, p - stage) for stage in range(p)]
    assert peak_in_flight(build("GPipe", pp=p, num_microbatches=m)) == [m] * p


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (3, 3, 9), (5, 2, 10)])
def test_interleaved_holds_its_warmup_and_one(p, v, m):
    # Narayanan et al. 2021 (Megatron-LM schedules): 2(p - r - 1) + (v - 1)p forwards of warm-up, then
    # one forward per backward.
    expected = [min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
    assert peak_in_flight(build("Interleaved1F1B", pp=p, vpp=v, num_microbatches=m)) == expected


STATISTICS = 4 * 2 * 2 * 2048
"""fp32 mean and deviation of every token in both norms of a layer, which the papers neglect."""


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 8])
def test_our_selective_layer_is_korthikanti_without_dropout_masks(tp):
    # Table 2: sbh(10 + 24/t) without, 34sbh/t with sequence parallelism; two masks of one byte each fall away, both
    # uncut by tp alone. The output product keeps a copy of the attention's output with the heads side by side, so
    # the core's own is given up.
    sbh = 2048 * 12288
    uncut = gpt3(Layout(tp=tp, sequence_parallel=False), recompute="selective")
    assert layer_activation_bytes(uncut) == sbh * 8 + 24 * sbh // tp + STATISTICS
    if 2048 % tp == 0:
        cut = gpt3(Layout(tp=tp, sequence_parallel=tp > 1), recompute="selective")
        assert layer_activation_bytes(cut) == 32 * sbh // tp + STATISTICS // tp


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_megatron_2021_layer_is_table_2_of_korthikanti(tp):
    s, h, a, b = 2048, 12288, 96, 2
    sbh, scores = s * b * h, 5 * a * s * s * b
    norms = STATISTICS * b

    def layer(mode, sequence_parallel):
        plan = gpt3(Layout(tp=tp, sequence_parallel=sequence_parallel), recompute=mode, micro=b, dtype="fp16")
        return layer_activation_bytes(replace(plan, runtime=Runtime("megatron-2021")))

    assert layer("none", False) == sbh * 10 + 24 * sbh // tp + scores // tp + norms
    assert layer("selective", False) == sbh * 10 + 24 * sbh // tp + norms
    assert layer("full", False) == 2 * sbh
    if tp > 1:
        assert layer("none", True) == (34 * sbh + scores + norms) // tp
        assert layer("selective", True) == (34 * sbh + norms) // tp


def test_full_keeps_the_input_and_none_adds_the_cores_output_and_one_number_per_query():
    sbh = 2048 * 12288
    assert layer_activation_bytes(gpt3(Layout(tp=8), recompute="full")) == 2 * sbh
    assert layer_activation_bytes(gpt3(Layout(tp=8, sequence_parallel=True), recompute="full")) == 2 * sbh // 8
    none, selective = (layer_activation_bytes(gpt3(Layout(tp=8), recompute=mode)) for mode in ("none", "selective"))
    assert none - selective == 4 * 2048 * 96 // 8 + 2 * sbh // 8


@pytest.mark.parametrize(("dtype", "fixed", "cut"), [("fp32", 8, 8), ("bf16", 6, 12), ("fp16", 6, 12)])
def test_bytes_per_parameter_are_those_of_the_distributed_optimizer(dtype, fixed, cut):
    # Megatron-LM docs, dist_optimizer.md: 6 + 12/d for bf16 weights with fp32 gradients, 8 + 8/d for fp32.
    plan = gpt3(Layout(tp=8, pp=4, dp=2, zero=1), dtype=dtype)
    memory = rank_memories(plan, schedule_for(plan))[1]
    elements = stage_elements(plan, 1)
    assert memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes == elements * (fixed + cut // 2)


@pytest.mark.parametrize("pp", [1, 4, 8])
def test_element_counts_are_the_programs(pp):
    plan = gpt3(Layout(tp=6, pp=pp))
    for memory in rank_memories(plan, schedule_for(plan)):
        assert memory.weights_bytes == 2 * stage_elements(plan, memory.pp_rank)
        assert memory.gradients_bytes == 4 * gradient_elements(plan, memory.pp_rank)


def test_each_zero_stage_cuts_one_more_component():
    components = []
    for zero in range(4):
        plan = gpt3(Layout(tp=8, pp=4, dp=4, zero=zero))
        components.append(rank_memories(plan, schedule_for(plan))[0].components())
    for name, since in (("optimizer", 1), ("gradients", 2)):
        assert [4 * c[name] == components[0][name] for c in components] == [zero >= since for zero in range(4)]
    assert [c["weights"] == components[0]["weights"] for c in components] == [True, True, True, False]
    assert components[3]["weights"] == 0  # a rank's part of them rests in fp32, which counts as optimizer state


def test_worst_rank_of_1f1b_is_the_first_stage_and_per_rank_list_is_complete():
    plan = gpt3(Layout(tp=8, pp=6, order="dp-pp-tp"))
    report = fit(plan).report
    assert [entry["global_rank"] for entry in report["per_rank"]] == [0, 1, 2, 3, 4, 5]
    assert report["peak_memory_rank"] == 0
    assert report["peak_memory_bytes"] == max(entry["peak_memory_bytes"] for entry in report["per_rank"])
    assert sum(report["memory_bytes"].values()) == report["peak_memory_bytes"]


def test_fit_is_decided_by_the_device_memory():
    plan = gpt3(Layout(tp=8, pp=8, sequence_parallel=True))
    report = fit(plan).report
    least = math.ceil(report["peak_memory_bytes"] * ALLOCATOR_FACTOR) + report["reserved_bytes"]
    for device, fits in ((least, True), (least - 2, False)):
        assert fit(replace(plan, cluster=replace(plan.cluster, device_memory_bytes=float(device)))).fits is fits


def test_memory_over_time_peaks_where_the_report_says():
    simulation = simulate(gpt3(Layout(tp=8, pp=3)))
    for memory, rank in zip(simulation.memory, simulation.global_ranks, strict=True):
        samples = [sample for sample in simulation.timeline.memory if sample.global_rank == rank]
        assert max(sample.num_bytes for sample in samples) == memory.peak_bytes
        assert samples[-1].num_bytes == samples[0].num_bytes == memory.static_bytes
        assert [sample.time_s for sample in samples] == sorted(sample.time_s for sample in samples)


SAMPLED = {
    "zero 3": product_plan(Layout(dp=4, zero=3), model="gpt2", cluster="dgx-h100"),
    "pairs": product_plan(Layout(pp=2, vpp=2), model="gpt2", cluster="dgx-h100", schedule="Combined1F1B"),
    "split": product_plan(Layout(pp=4), model="gpt2", cluster="dgx-h100", schedule="ZBH1", microbatches=8),
    "modules": ModularPlan.from_toml((EXAMPLES / "encoder_decoder.toml").read_text()),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_components_over_time_add_up_and_are_those_of_the_peak(case):
    step = simulate(SAMPLED[case])
    parts, samples = step.sample_components, step.memory_samples
    assert (parts >= 0).all() and parts.sum(axis=1).tolist() == [each.num_bytes for each in samples]
    for rank, memory in zip(step.global_ranks, step.memory, strict=True):
        own = parts[[i for i, each in enumerate(samples) if each.global_rank == rank]]
        at = int(own.sum(axis=1).argmax())
        assert own[at].sum() == memory.peak_bytes
        held = dict(zip(COMPONENTS, own[at].tolist(), strict=True))
        assert (held["weights"], held["optimizer"]) == (memory.weights_bytes, memory.optimizer_bytes)
        # a peak's activations are those that forwards left; over time what runs has its own among them
        activations, buffers = memory.activations_bytes, memory.buffers_bytes
        assert held["activations"] + held["buffers"] + held["gradients"] == (
            activations + buffers + memory.gradients_bytes
        )


def test_vpp_raises_the_peak_by_the_factor_of_korthikanti():
    # Section 4.2.3: interleaving holds 1 + (p - 1)/(p v) times the activations of the first stage.
    one = peak_in_flight(build("1F1B", pp=4, num_microbatches=16))[0]
    three = peak_in_flight(build("Interleaved1F1B", pp=4, vpp=3, num_microbatches=16))[0] / 3
    assert three / one == pytest.approx(1 + 3 / 12)


def stack(profile: str, layout: Layout, **more) -> Plan:
    return product_plan(
        layout, model="llama3-8b", cluster="dgx-h100", samples=layout.dp, sequence=8192, profile=profile, **more
    )


def heaviest(plan: Plan):
    return max(rank_memories(plan, schedule_for(plan)), key=lambda rank: rank.peak_bytes)


def test_nanotron_holds_gradients_in_bf16_besides_their_fp32_sums():
    memory = heaviest(stack("nanotron", Layout(tp=8)))
    assert memory.gradients_bytes == pytest.approx(6 / 2 * memory.weights_bytes, rel=1e-3)


@pytest.mark.parametrize(("tp", "held"), [(1, 2), (8, 4)])
def test_loss_over_logits_cut_by_torch_holds_two_fp32_tensors_more(tp, held):
    chosen = stack("torchtitan", Layout(tp=tp, sequence_parallel=tp > 1))
    (loss,) = [node for node in head_nodes(LayerTensors(chosen, profile_of(chosen).memory)) if node.name == "head.loss"]
    logits = 8192 * 128256 // tp
    assert loss.backward_bytes == (4 * held - 2) * logits


@pytest.mark.parametrize(("zero", "less"), [(0, 0), (1, 10_300_000_000)])
def test_deepspeed_with_zero_leaves_10_gb_less_of_a_device_than_megatron(zero, less):
    layout = Layout(tp=8, pp=4, dp=2, zero=zero)
    plans = [
        replace(gpt3(layout, dtype="fp16"), runtime=Runtime(name)) for name in ("megatron-deepspeed", "megatron-2022")
    ]
    deepspeed, megatron = map(heaviest, plans)
    assert deepspeed.reserved_bytes == megatron.reserved_bytes
    assert deepspeed.device_bytes - megatron.device_bytes == less
    assert megatron.context_bytes == reserved_bytes(plans[1])
