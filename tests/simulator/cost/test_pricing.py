"""Prices of actions: published layer times, what overlaps hide and what they cannot, and lower bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.sections import DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.program import Collective, Product, gradient_elements, held_elements, operations
from shardproof.core.schedule.action import Kind
from shardproof.simulator.compute.compute import product_s
from shardproof.simulator.cost.communication import Place, forget
from shardproof.simulator.cost.pricing import PARTS, Pricing
from shardproof.simulator.engine.attribution import Sort, busy_s, sorts_of
from shardproof.simulator.engine.seconds import COMPONENTS, GRID, Seconds
from shardproof.simulator.network.spreads import Spreads
from shardproof.simulator.search.bounds import lower_bound_s
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.stack.profiles import PROFILES

GPT, LLAMA = model_preset("gpt3-175b"), model_preset("llama3-70b")


def plan(
    layout: Layout, runtime: Runtime, *, model=LLAMA, cluster="dgx-h100", micro=1, microbatches=4, sequence=8192, **more
) -> Plan:
    return product_plan(
        layout,
        model=model,
        cluster=cluster if isinstance(cluster, ClusterSpec) else cluster_preset(cluster, layout.world_size),
        samples=micro * microbatches * layout.dp,
        micro=micro,
        sequence=sequence,
        runtime=runtime,
        **more,
    )


def layer_of(plan: Plan):
    pricing = Pricing(plan)
    (group,) = [group for group in pricing._groups[0] if group.kind == "layer"]
    return pricing._block(group, Place(0, 0))


TABLE_4 = {
    "baseline": (False, "none", 7.7, 11.9),
    "sequence parallelism": (True, "none", 7.2, 11.8),
    "full recomputation": (False, "full", 7.7, 19.5),
    "selective recomputation": (False, "selective", 7.7, 13.2),
    "both": (True, "selective", 7.2, 13.1),
}
"""Korthikanti et al. 2022, table 4: milliseconds of one layer of the 22B model on 8 A100, microbatch 4,
forward and backward."""


@pytest.mark.parametrize("name", TABLE_4)
def test_a_layer_takes_what_korthikanti_measured_within_6_percent(name):
    sequence_parallel, mode, forward_ms, backward_ms = TABLE_4[name]
    size = {
        "num_layers": 1,
        "hidden_size": 6144,
        "ffn_hidden_size": 24576,
        "num_heads": 64,
        "num_kv_heads": 64,
        "head_dim": 96,
    }
    block = layer_of(
        plan(
            Layout(tp=8, sequence_parallel=sequence_parallel),
            Runtime("megatron-2021", tp_comm_overlap=True),
            model=replace(GPT, name="gpt-22b", **size),
            cluster="dgx-a100-80g",
            micro=4,
            sequence=2048,
            precision=Precision("fp16"),
            recompute=Recompute(mode),
        )
    )
    assert block.forward.seconds.total_s * 1e3 == pytest.approx(forward_ms, rel=0.06)
    assert block.backward.seconds.total_s * 1e3 == pytest.approx(backward_ms, rel=0.06)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_without_tensor_parallel_overlap_a_backward_is_its_two_gradients(zero):
    pricing = Pricing(plan(Layout(tp=8, dp=2, zero=zero), Runtime("torchtitan")))
    block = pricing._block(pricing._groups[0][1], Place(0, 0))
    both = block.input_gradient.seconds + block.weight_gradient.seconds
    assert block.backward.seconds.total_s == pytest.approx(both.total_s, rel=1e-12)


def test_overlap_exposes_less_tensor_parallel_communication_and_never_beats_the_products():
    layout = Layout(tp=8, sequence_parallel=True)
    shown = []
    for runtime in (Runtime("torchtitan"), Runtime("megatron-te"), Runtime("megatron-te", tp_comm_overlap=True)):
        block = layer_of(plan(layout, runtime))
        shown.append((block.forward.seconds.tp_comm, block.backward.seconds.tp_comm))
        assert block.forward.seconds.compute > 0 <= block.backward.seconds.tp_comm
    (none_f, none_b), (backward_f, backward_b), (all_f, all_b) = shown
    assert none_f == backward_f > all_f and none_b > backward_b > all_b


def test_our_own_overlap_hides_the_backward_only_and_distributed_inputs_cost_a_gather():
    layout = Layout(tp=8, sequence_parallel=True)
    alone, asked = (layer_of(plan(layout, Runtime(tp_comm_overlap=overlap))) for overlap in (False, True))
    assert asked.forward == alone.forward and asked.backward.seconds.tp_comm < alone.backward.seconds.tp_comm
    retained, spread = (
        layer_of(plan(Layout(tp=8), Runtime(), recompute=Recompute("full", distribute=spread)))
        for spread in (False, True)
    )
    assert spread.forward == retained.forward and spread.weight_gradient == retained.weight_gradient
    assert spread.backward.seconds.total_s > retained.backward.seconds.total_s
    assert spread.input_gradient.seconds.total_s > retained.input_gradient.seconds.total_s


def test_async_tensor_parallelism_of_torch_hides_the_forward_and_leaves_the_backward():
    layout = Layout(tp=8, dp=2, sequence_parallel=True)
    alone, asked = (layer_of(plan(layout, Runtime("torchtitan", tp_comm_overlap=overlap))) for overlap in (False, True))
    assert asked.forward.seconds.tp_comm < 0.5 * alone.forward.seconds.tp_comm
    assert asked.backward.seconds.tp_comm == alone.backward.seconds.tp_comm


def test_fsdp_unpacks_4_bytes_a_gathered_weight_and_packs_6_bytes_a_gradient():
    pricing = Pricing(plan(Layout(dp=16, zero=3), Runtime("torchtitan")))
    without = Pricing(plan(Layout(dp=16, zero=3), Runtime("torchtitan")), shared={})
    without.profile = replace(without.profile, gather_copy_bytes=0.0, reduce_copy_bytes=1e-9, reduce_cast_bytes=0.0)
    rate = pricing.plan.cluster.device_memory_bytes_per_s * pricing.plan.cluster.memory_efficiency
    elements = sum(held_elements(pricing.plan, 0))
    copied = {kind: pricing.seconds(kind, 0).other - without.seconds(kind, 0).other for kind in (Kind.F, Kind.B)}
    assert copied[Kind.F] == pytest.approx(4 * elements / rate, rel=1e-3)
    assert copied[Kind.B] == pytest.approx((4 + 6) * elements / rate, rel=1e-3)


def test_the_first_zero_3_went_tensor_by_tensor_with_two_calls_for_every_rank():
    # Four products of 96 layers and two tables (token and position): 386 tensors, gathered forward, again for what is
    # computed again, again for the backward, and scattered: SC21 (table 2) measures 66.7 s at 768 and at 1,536 devices.
    chosen = plan(
        Layout(dp=1536, zero=3),
        Runtime("deepspeed-zero3"),
        model=GPT,
        cluster="dgx-a100-80g",
        microbatches=1,
        sequence=2048,
        precision=Precision("fp16"),
        recompute=Recompute("full"),
    )
    pricing = Pricing(chosen)
    calls_s = 386 * 2 * 1536 * chosen.cluster.host_dispatch_s
    assert pricing.seconds(Kind.F, 0).dp_comm > calls_s and pricing.seconds(Kind.B, 0).dp_comm > 3 * calls_s
    flat_s = pricing._communication(Kind.UNSHARD, Place(0, 0)).total_s
    # and the latency of 386 rings
    assert pricing.seconds(Kind.F, 0).dp_comm == pytest.approx(calls_s + flat_s, rel=0.15)


def test_tables_are_gathered_first_and_have_nothing_to_hide_behind():
    small = replace(LLAMA, name="one-layer", num_layers=1, vocab_size=512)
    wide = replace(small, vocab_size=131072)
    exposed = []
    for model in (small, wide):
        seconds = Pricing(plan(Layout(dp=64, zero=3), Runtime("torchtitan"), model=model)).seconds(Kind.F, 0)
        exposed.append(seconds.dp_comm)
    assert exposed[1] > 2 * exposed[0]


def test_the_first_or_last_chunk_of_an_overlapped_collective_is_always_exposed():
    """One of tp chunks, and what the products lose while the others overlap with them."""
    layout = Layout(tp=8, sequence_parallel=True)
    none = layer_of(plan(layout, Runtime("torchtitan"))).forward.seconds.tp_comm
    overlapped = layer_of(plan(layout, Runtime("torchtitan", tp_comm_overlap=True))).forward.seconds.tp_comm
    assert none / 8 < overlapped < none / 2


def test_an_action_takes_at_least_what_its_host_needs_unless_a_graph_replays_it():
    small = replace(
        LLAMA, name="small", hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_hidden_size=1024
    )
    cluster = replace(cluster_preset("dgx-h100", 1), host_dispatch_s=50e-6)
    launched, replayed = (
        Pricing(
            plan(Layout(), Runtime("megatron-te", cuda_graphs=graphs), model=small, cluster=cluster, sequence=512)
        ).seconds(Kind.F, 0)
        for graphs in (False, True)
    )
    assert replayed.other == 0 < launched.other and launched.compute == replayed.compute
    kernels = sum(group.count * layer.forward.num_kernels for group, layer in blocks_of(small, cluster))
    assert launched.total_s == pytest.approx(kernels * 50e-6 * PROFILES["megatron-te"].host_calls, rel=1e-6)


def test_a_captured_layer_costs_its_host_two_launches_a_pass_and_one_with_experts_as_many_as_without() -> None:
    small = replace(LLAMA, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_hidden_size=1024)
    moe = replace(small, num_experts=8, experts_per_token=2)
    cluster = replace(cluster_preset("dgx-h100", 1), host_dispatch_s=1e-3)  # the host is what all wait for

    def forward_s(model: ModelSpec, **graphs: Any) -> float:
        runtime = Runtime("megatron-te", **graphs)
        return Pricing(plan(Layout(), runtime, model=model, cluster=cluster, sequence=512)).seconds(Kind.F, 0).total_s

    layers, others = (
        [(group, block) for group, block in blocks_of(small, cluster) if (group.kind == "layer") is is_layer]
        for is_layer in (True, False)
    )
    launches = sum(2 * group.count for group, _ in layers)
    launches += sum(g.count * b.forward.num_kernels for g, b in others) * PROFILES["megatron-te"].host_calls
    by_layer = {"cuda_graphs": True, "cuda_graph_scope": "layer"}
    assert forward_s(small, **by_layer) == pytest.approx(launches * 1e-3, rel=1e-6)
    assert forward_s(moe, **by_layer) == forward_s(moe) > forward_s(moe, cuda_graphs=True)


def blocks_of(model: ModelSpec, cluster: ClusterSpec):
    pricing = Pricing(plan(Layout(), Runtime("megatron-te"), model=model, cluster=cluster, sequence=512))
    return [(group, pricing._block(group, Place(0, 0))) for group in pricing._groups[0]]


def test_gradients_are_reduced_under_the_last_backward_but_for_their_last_bucket():
    layout = Layout(tp=8, dp=16)
    early, late = (
        plan(layout, Runtime("megatron-te"), data_parallel=DataParallel(overlap_grad_reduce=on)) for on in (True, False)
    )
    shown, hidden = (simulate(each).report["time_s"]["dp_comm"] for each in (late, early))
    reduce_s = Pricing(late).seconds(Kind.REDUCE_GRAD, 0).total_s
    sort = Sort(Kind.REDUCE_GRAD, 0, -1, 0)
    lead_s, tail_s = Pricing(early).reduction_overlap(sort)
    backward_s = Pricing(early).seconds(Kind.B, 0).total_s
    assert Pricing(late).reduction_overlap(sort) == (0.0, 0.0)
    assert 0.9 * backward_s < lead_s < backward_s
    assert reduce_s / 82 < tail_s and shown - hidden > 0.5 * reduce_s


def test_weights_are_gathered_under_the_next_forward_but_for_the_first_bucket():
    layout = Layout(tp=8, dp=16, zero=1)
    early, late = (
        plan(layout, Runtime("megatron-te"), data_parallel=DataParallel(overlap_param_gather=on))
        for on in (True, False)
    )
    hidden, shown = (Pricing(each).seconds(Kind.STEP, 0).dp_comm for each in (early, late))
    assert shown / 82 < hidden < shown / 2


def test_a_stack_that_reduces_after_the_pipeline_does_it_in_its_step():
    at_once = Pricing(
        plan(Layout(tp=8, pp=2, dp=4), Runtime("megatron-2021"), cluster="dgx-a100-80g", precision=Precision("fp16"))
    )
    assert at_once.seconds(Kind.REDUCE_GRAD, 0) == Seconds() and at_once.seconds(Kind.STEP, 0).dp_comm > 0


@pytest.mark.parametrize("recompute", [Recompute("full"), Recompute("selective", modules=("mlp",))])
def test_a_compiled_step_repeats_no_product_that_only_the_residual_needs(recompute):
    found = {
        name: layer_of(plan(Layout(), Runtime(name, attention="fused"), recompute=recompute))
        for name in ("xla", "megatron-te")
    }
    model, tokens = LLAMA, 8192
    last = Product("", tokens, model.hidden_size, model.ffn_hidden_size)
    last_s = product_s(cluster_preset("dgx-h100", 1), "bf16", last)
    repeated = {name: block.backward.seconds.recompute for name, block in found.items()}
    assert repeated["megatron-te"] - repeated["xla"] == pytest.approx(last_s, rel=1e-6)


def test_layers_with_and_without_a_window_have_prices_of_their_own():
    model = replace(LLAMA, num_layers=4)

    def seconds(**fields: Any) -> float:
        return simulate(plan(Layout(tp=8), Runtime("torchtitan"), model=replace(model, **fields))).report["step_time_s"]

    everywhere, nowhere = seconds(sliding_window=512), seconds()
    halves = seconds(sliding_window=512, window_layers=(1, 0)), seconds(sliding_window=512, window_layers=(0, 1))
    assert everywhere < halves[0] < nowhere and halves[0] == pytest.approx(halves[1])
    assert halves[0] == pytest.approx((everywhere + nowhere) / 2, rel=1e-6)


def test_unfused_attention_computes_the_whole_square_and_moves_all_scores():
    fused, unfused = (
        layer_of(plan(Layout(tp=8), Runtime("megatron-te", attention=kind, dropout=True)))
        for kind in ("fused", "unfused")
    )
    assert unfused.forward.seconds.compute > 1.5 * fused.forward.seconds.compute
    assert unfused.backward.seconds.compute > 1.2 * fused.backward.seconds.compute


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_fp8_shortens_the_products_and_not_the_rest(part):
    wide, narrow = (
        layer_of(plan(Layout(tp=8), Runtime("megatron-te"), precision=Precision(dtype))) for dtype in ("bf16", "fp8")
    )
    ratio = getattr(narrow, part).seconds.compute / getattr(wide, part).seconds.compute
    assert 0.5 < ratio < 0.9


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_exchange_hides_behind_attention_where_the_stack_overlaps_it(cp):
    hidden, shown = (
        layer_of(plan(Layout(cp=cp), Runtime(name))).forward.seconds.cp_comm for name in ("megatron-te", "shardproof")
    )
    assert 0 <= hidden < shown / 2


def test_neighbours_exchange_heads_inside_a_node_and_keys_go_between_nodes_in_a_part_of_the_bytes():
    """16 context-parallel ranks on two nodes: 8 neighbours each, and pairs of ranks that are 8 apart."""
    model = replace(model_preset("llama3-8b"), num_layers=4)
    one, two = (
        plan(Layout(cp=16, dp=2, cp_inner=inner), Runtime(context_parallel="ring"), model=model, sequence=65536)
        for inner in (1, 8)
    )
    spreads = Spreads(two)
    assert spreads.members("cp_inner", 0, 0).tolist() == list(range(8))
    assert spreads.members("cp_outer", 0, 0).tolist() == [0, 8]
    assert (spreads.spread("cp_inner", 0, 0).num_nodes, spreads.spread("cp_outer", 0, 0).num_nodes) == (1, 2)
    groups = [two.layout.context_groups_of(rank) for rank in (0, 9, 31)]
    assert groups == [
        (list(range(8)), [0, 8]),
        (list(range(8, 16)), [1, 9]),
        (list(range(24, 32)), [23, 31]),
    ]
    assert layer_of(two).forward.seconds.cp_comm < layer_of(one).forward.seconds.cp_comm / 2


@pytest.mark.parametrize("inner", [2, 4])
def test_a_ring_and_a_gather_have_prices_of_their_own(inner):
    """Plans that differ in nothing else share the prices of all else (`Pricing`)."""
    ways = [Runtime(context_parallel=how) for how in ("all_gather", "ring", "all_gather")]
    gather, ring, again = (layer_of(plan(Layout(cp=8, cp_inner=inner), way)).forward.seconds.cp_comm for way in ways)
    assert gather == again != ring


@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.I, Kind.W])
def test_exact_numerics_pay_for_finishing_sequences_after_weight_gradients(kind):
    """Each of 4 ranks sends 3/4 of the stage's gradients in fp32, at least one tree node of them."""
    exact = plan(
        Layout(cp=4, pp=4),
        Runtime(),
        schedule=ScheduleChoice("ZBH1"),
        numerics=Numerics("exact", gradient_token_block=128),
    )
    pricing = Pricing(exact)
    sends = [each for each in operations(exact, kind, 1) if isinstance(each, Collective) and each.layer == ""]
    layers = pricing._stage(Place(1, 1), PARTS[kind]).cp_comm
    finishing_s = pricing.seconds(kind, 1).cp_comm - layers
    assert len(sends) == (kind in (Kind.B, Kind.W))
    for operation in sends:
        assert operation.sent_bytes >= 3 * gradient_elements(exact, 1) and finishing_s > operation.sent_bytes / 4.5e11
    assert sends or finishing_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("runtime", [Runtime("megatron-te"), Runtime(ep_comm_overlap=True)])
def test_an_overlapped_pair_hides_the_exchange_of_tokens(runtime):
    layout = Layout(tp=1, ep=8, dp=16, pp=2, vpp=2)
    model = replace(model_preset("mixtral-8x7b"), num_layers=8)
    moe = plan(layout, runtime, model=model, sequence=4096, schedule=ScheduleChoice("Combined1F1B"))
    pricing = Pricing(moe)
    pair = pricing.price(Sort(Kind.OVERLAP_F_B, 2, 0, 0))
    apart = pricing.seconds(Kind.F, 2) + pricing.seconds(Kind.B, 0)
    assert apart.ep_comm > 0 and pair.ep_comm < apart.ep_comm / 2
    assert pair.total_s >= apart.total_s - apart.ep_comm
    report = simulate(moe).report
    assert sum(report["time_s"].values()) == report["step_time_s"]


def test_our_own_backend_runs_a_pair_in_turns_where_it_is_asked_to_and_no_other_passes():
    model = replace(model_preset("mixtral-8x7b"), num_layers=8)
    layout = Layout(ep=8, dp=16, pp=2, vpp=2)
    plain, asked = (
        Pricing(
            plan(
                layout,
                Runtime(ep_comm_overlap=turns),
                model=model,
                sequence=4096,
                schedule=ScheduleChoice("Combined1F1B"),
            )
        )
        for turns in (None, True)
    )
    pair, apart = Sort(Kind.OVERLAP_F_B, 2, 0, 0), plain.seconds(Kind.F, 2) + plain.seconds(Kind.B, 0)
    assert plain.price(pair) == apart and asked.price(pair).ep_comm < apart.ep_comm / 2
    assert all(asked.seconds(kind, 2) == plain.seconds(kind, 2) for kind in (Kind.F, Kind.B))


def test_reports_of_expert_and_context_parallel_plans_name_their_communication():
    layout = Layout(tp=2, cp=2, ep=8, dp=8, sequence_parallel=True, zero=1)
    model = replace(model_preset("mixtral-8x7b"), num_layers=4)
    times = simulate(plan(layout, Runtime("torchtitan"), model=model, sequence=4096)).report["time_s"]
    assert times["ep_comm"] > 0 and times["tp_comm"] > 0 and times["cp_comm"] >= 0


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["shardproof", "megatron-te", "torchtitan", "megatron-2021"]),
    st.sampled_from(
        [
            Layout(tp=8, dp=4),
            Layout(tp=2, dp=16, zero=1),
            Layout(tp=4, pp=4, dp=2),
            Layout(dp=32, zero=3),
            Layout(tp=8, cp=2, dp=2),
        ]
    ),
    st.sampled_from(["node_link_bytes_per_s", "node_network_bytes_per_s", "device_memory_bytes_per_s"]),
    st.floats(1.01, 8),
    st.booleans(),
)
def test_more_bandwidth_never_slows_a_step(profile, layout, field, factor, asked):
    runtime = Runtime(profile, tp_comm_overlap=asked)
    cluster = cluster_preset("dgx-h100", layout.world_size)
    faster = replace(cluster, **{field: getattr(cluster, field) * factor})
    model = replace(LLAMA, num_layers=8)
    slow_s, fast_s = (
        simulate(plan(layout, runtime, model=model, cluster=each, sequence=2048)).report["step_time_s"]
        for each in (cluster, faster)
    )
    assert fast_s <= slow_s * (1 + 1e-9)


@pytest.mark.parametrize("profile", ["shardproof", "megatron-te", "torchtitan", "megatron-2021"])
def test_prices_lie_on_the_grid_and_are_not_negative(profile):
    pricing = Pricing(plan(Layout(tp=4, pp=2, dp=4, zero=1), Runtime(profile)))
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.REDUCE_GRAD, Kind.STEP):
        seconds = pricing.seconds(kind, 1)
        for name in COMPONENTS:
            value = getattr(seconds, name)
            assert value >= 0 and value * GRID == int(value * GRID)


def test_plans_of_one_family_share_prices_and_another_stack_does_not():
    one = plan(Layout(tp=8, pp=2), Runtime("megatron-te"))
    shared: dict = {}
    first = Pricing(one, shared=shared).seconds(Kind.F, 0)
    retained = {key: dict(value) for key, value in shared.items()}
    assert Pricing(replace(one, schedule=ScheduleChoice("GPipe")), shared=shared).seconds(Kind.F, 0) is first
    assert {key: dict(value) for key, value in shared.items()} == retained
    assert Pricing(replace(one, runtime=Runtime("torchtitan"))).seconds(Kind.F, 0) != first


def test_products_of_one_group_are_launched_by_the_library_and_cost_the_host_less_each():
    model = replace(model_preset("mixtral-8x7b"), num_layers=2)
    together = layer_of(plan(Layout(), Runtime("megatron-te"), model=model, sequence=2048)).forward.num_kernels
    alone = layer_of(plan(Layout(ep=8, dp=8), Runtime("megatron-te"), model=model, sequence=2048)).forward.num_kernels
    # exchanges: how many tokens, dispatch, combine; tokens are put in order once more where a rank has several experts
    exchanges, permutations = 3, 2
    calls = PROFILES["megatron-te"].host_calls
    assert together == pytest.approx(alone - exchanges + permutations + 2 * 7 / calls)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipe", "ZBVZeroBubble"])
def test_sorts_of_action_price_every_action_and_count_every_compute_lane(schedule):
    vpp = {"Interleaved1F1B": 2, "ZBVZeroBubble": 2}.get(schedule, 1)
    chosen = plan(
        Layout(tp=8, pp=4, vpp=vpp, dp=2), Runtime("shardproof"), microbatches=8, schedule=ScheduleChoice(schedule)
    )
    simulation = simulate(chosen)
    graph = simulation.run.graph
    found = sorts_of(graph)
    actions = graph.schedule.actions
    for i in range(0, len(actions), 7):
        action, sort = actions[i], found.sorts[found.of_action[i]]
        assert (sort.kind, sort.stage, sort.pp_rank) == (action.kind, action.stage, graph.rank[i])
        assert sort.pair_stage == (-1 if action.pair_stage is None else action.pair_stage)
    assert found.counts.sum() == graph.is_compute.sum()
    prices = Pricing(chosen).of_graph(found).prices
    spans = simulation.run.end_s - simulation.run.start_s
    for pp_rank in range(4):
        lane = graph.is_compute & (graph.rank == pp_rank)
        assert busy_s(graph, prices)[pp_rank] == pytest.approx(spans[lane].sum(), rel=1e-12)


@pytest.mark.parametrize(("schedule", "vpp"), [("Combined1F1B", 2), ("DualPipeV", 2), ("1F1B", 1)])
def test_no_step_with_experts_beats_its_lower_bound(schedule, vpp):
    model = replace(model_preset("mixtral-8x7b"), num_layers=8)
    chosen = plan(
        Layout(ep=8, dp=16, pp=2, vpp=vpp),
        Runtime("megatron-te"),
        model=model,
        sequence=4096,
        schedule=ScheduleChoice(schedule),
    )
    assert lower_bound_s(chosen, Pricing(chosen)) <= simulate(chosen).report["step_time_s"]


def test_the_optimizer_updates_the_part_of_its_rank_experts_among_fewer_copies():
    model = replace(model_preset("mixtral-8x7b"), num_layers=2)
    chosen = plan(Layout(ep=8, dp=16, zero=1), Runtime("megatron-te"), model=model, sequence=4096)
    held = held_elements(chosen, 0)
    assert Pricing(chosen)._updated_elements(Place(0, 0)) == pytest.approx(held.dense / 16 + held.expert / 2)
    whole = replace(chosen, layout=replace(chosen.layout, zero=0))
    assert Pricing(whole)._updated_elements(Place(0, 0)) == sum(held)


@pytest.mark.parametrize("stack", sorted(PROFILES))
def test_what_was_priced_before_changes_no_price(stack):
    """Plans share prices: a plan priced after its sharded, wider and uneven relatives costs what it costs alone."""
    layouts = [
        Layout(tp=2, pp=2, dp=4, sequence_parallel=sp, zero=zero) for zero in (3, 2, 1, 0) for sp in (True, False)
    ]
    relatives = [plan(layout, Runtime(stack), sequence=2048) for layout in layouts]
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD, Kind.STEP)

    def prices(one: Plan) -> list[Seconds]:
        pricing = Pricing(one)
        return [pricing.seconds(kind, stage) for kind in kinds for stage in range(2)]

    together = [prices(one) for one in relatives]
    for one, found in zip(relatives, together, strict=True):
        forget()
        assert prices(one) == found
