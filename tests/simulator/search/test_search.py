"""`search` against simulating everything."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from helpers.gates import sampled
from shardproof.core.base.errors import PlanError
from shardproof.core.base.units import format_s
from shardproof.core.commands.options import SearchSpace
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.stages import balanced_stages
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, ScheduleChoice
from shardproof.core.plan.stacks import STACKS
from shardproof.core.plan.train import Train
from shardproof.core.schedule import CATALOG
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.memory.sizes import _sizes, _tapes_of, stage_sizes
from shardproof.simulator.search.bounds import WHOLE_BACKWARDS, chain_bounds_s, lower_bound_s
from shardproof.simulator.search.fit import fit
from shardproof.simulator.search.memory_floor import ALL_IN_FLIGHT, FILLED_IN_FLIGHT, MemoryFloors
from shardproof.simulator.search.progress import progress_text
from shardproof.simulator.search.question import NEAR, SLOWEST_OF_FRONT, Progress, Question
from shardproof.simulator.search.search import NUM_RANKED, _memories, search
from shardproof.simulator.search.simplicity import complexity, plainer_first
from shardproof.simulator.search.space import Tally, families
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.stack.profiles import PROFILES

BATCH = Batch(24, 1, 4096)
MODEL = replace(model_preset("llama3-8b"), num_layers=6)
MIXTRAL = replace(model_preset("mixtral-8x7b"), num_layers=2)
TWELVE, EXPERTS = replace(MODEL, num_layers=12), replace(MIXTRAL, num_layers=12)
BUILT_FAST = tuple(name for name in CATALOG if name != "ZBAuto")


def space(devices=6, memory=80e9, model=MODEL, batch=BATCH, profile="shardproof", **pinned) -> SearchSpace:
    cluster = replace(cluster_preset("dgx-h100", devices), devices_per_node=devices, device_memory_bytes=memory)
    return SearchSpace(model, cluster, batch, runtime=Runtime(profile), pinned=pinned)


def test_a_search_keeps_what_the_loss_takes():
    train = Train(packed=True, z_loss=0.1)
    given = replace(space(), train=train)
    found = search(given)
    assert {plan.train for plan in found.plans} == {train}
    assert [simulate(plan).report["peak_memory_bytes"] for plan in found.plans] == [
        each["peak_memory_bytes"] for each in found.report["candidates"]
    ]


def layouts(devices: int, cps: tuple[int, ...], eps: tuple[int, ...]) -> Iterator[Layout]:
    """Every layout there is of so many devices, legal or not for a model."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    etps = (None, 1) if len(eps) > 1 else (None,)
    for tp, cp, pp, vpp, ep, etp, split, zero in itertools.product(
        divisors, cps, divisors, range(1, 9), eps, etps, (False, True), range(4)
    ):
        dp, rest = divmod(devices, tp * cp * pp)
        if rest or (pp == 1 and vpp > 1) or (dp * cp == 1 and zero) or (tp == 1 and (split or etp is not None)):
            continue
        try:
            yield Layout(tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, sequence_parallel=split, zero=zero)
        except PlanError:
            continue


def everything(
    given: SearchSpace, micros=(1,), cps=(1,), eps=(1,), modes=("none", "selective", "full")
) -> list[tuple[float, Plan]]:
    """Every legal plan that fits, simulated without bounds, fastest first."""
    found = []
    for layout, micro, mode in itertools.product(layouts(given.cluster.num_devices, cps, eps), micros, modes):
        names = [
            name
            for name in PROFILES[given.runtime.profile].schedules
            if CATALOG[name].nearest_vpp(layout.vpp) == layout.vpp
        ]
        for name in names if layout.pp > 1 else ["1F1B"]:
            if given.model.num_layers % layout.num_stages:
                layout = replace(layout, stages=balanced_stages(given.model.num_layers, layout.num_stages))
            nouns = {entry: getattr(given, entry) for entry in ("model", "cluster", "runtime", "optimizer")}
            batch, choice = replace(given.batch, micro_size=micro), ScheduleChoice(name)
            recompute = (
                Recompute(mode, modules=("norm",))
                if (mode, given.runtime.profile) == ("selective", "torchtitan")
                else Recompute(mode)
            )
            try:
                plan = Plan(layout=layout, batch=batch, recompute=recompute, schedule=choice, **nouns)
            except PlanError:
                continue
            if fit(plan).fits:
                found.append((simulate(plan).report["step_time_s"], plan))
    return sorted(found, key=lambda entry: entry[0])


def check_ranking(given: SearchSpace, expected: list[tuple[float, Plan]]) -> None:
    result = search(given)
    assert len(expected) > 30
    steps_s = [candidate["step_time_s"] for candidate in result.report["candidates"]]
    assert sorted(steps_s) == [time_s for time_s, _ in expected[:NUM_RANKED]]
    assert [simulate(plan).report["step_time_s"] for plan in result.plans] == steps_s
    assert all(later >= before / (1 + NEAR) for before, later in itertools.pairwise(steps_s))
    assert result.report["simulated"] < len(expected) / 2
    assert result.report["evaluated"] == len(result.report["candidates"]) + sum(result.report["rejected"].values())


@pytest.mark.parametrize(
    ("memory", "profile"), [(80e9, "shardproof"), (40e9, "shardproof"), (80e9, "megatron-te"), (44e9, "torchtitan")]
)
def test_ranking_of_four_devices_is_that_of_simulating_everything(memory, profile):
    given = space(4, memory, replace(MODEL, num_layers=4), Batch(16, 1, 4096), profile, **{"batch.micro": 1})
    check_ranking(given, everything(given))


def test_ranking_of_six_ranks_and_five_microbatch_sizes_is_that_of_simulating_everything():
    given = space(6, 80e9, MODEL, Batch(48, 1, 2048), "megatron-2021", **{"recompute.mode": "none", "layout.tp": 1})
    found = everything(given, micros=(1, 2, 4, 8, 16), modes=("none",))
    check_ranking(given, [(time_s, plan) for time_s, plan in found if plan.layout.tp == 1])


def test_long_sequences_are_cut_and_the_ranking_is_that_of_simulating_everything():
    given = space(4, 80e9, replace(MODEL, num_layers=4), Batch(4, 1, 16384), **{"batch.micro": 1})
    check_ranking(given, everything(given, cps=(1, 2, 4)))
    (best, *_) = search(space(8, 80e9, MODEL, Batch(1, 1, 131072))).plans
    assert best.layout.cp > 1


@pytest.mark.parametrize("profile", ["shardproof", "megatron-te"])
def test_experts_are_spread_in_every_legal_way_and_the_ranking_is_that_of_simulating_everything(profile):
    given = space(4, 80e9, MIXTRAL, Batch(16, 1, 4096), profile, **{"batch.micro": 1})
    check_ranking(given, everything(given, eps=(1, 2, 4, 8)))
    assert {plan.layout.ep for plan in search(given).plans} - {1}


def test_without_clipping_the_ranking_is_that_of_simulating_everything():
    pinned = {"batch.micro": 1, "recompute.mode": "none", "layout.tp": 1}
    given = replace(
        space(4, 80e9, replace(MODEL, num_layers=4), Batch(8, 1, 4096), **pinned), optimizer=Optimizer(clip_grad_norm=0)
    )
    check_ranking(given, [(s, plan) for s, plan in everything(given, modes=("none",)) if plan.layout.tp == 1])


@sampled("profile", ["shardproof", "megatron-te", "torchtitan", "megatron-2021"], on_push=2)
@pytest.mark.parametrize("name", BUILT_FAST)
def test_no_run_beats_its_bounds_and_memory_needs_few_microbatches(name, profile):
    vpps = [vpp for vpp in (1, 2, 3) if CATALOG[name].nearest_vpp(vpp) == vpp]
    for vpp, micros, zero, model in itertools.product(vpps, (1, 2, 5, 8, 24), (1, 3), (TWELVE, EXPERTS)):
        if CATALOG[name].condition(2, micros):
            continue
        layout = Layout(pp=2, vpp=vpp, dp=2, ep=2 if model.is_moe else 1, zero=zero)
        cluster = replace(cluster_preset("dgx-h100", 4), devices_per_node=4)
        plan = Plan(model, cluster, layout, Batch(2 * micros, 1, 4096), Runtime(profile), schedule=ScheduleChoice(name))
        simulation, pricing = simulate(plan), Pricing(plan)
        (cheap_s,) = chain_bounds_s(plan, [name], pricing)
        assert cheap_s <= lower_bound_s(plan, pricing) <= simulation.report["step_time_s"]
        assert MemoryFloors().bytes_of(plan) <= simulation.report["peak_memory_bytes"]
        assert _memories(plan) == simulation.memory


def test_schedules_are_known_by_what_bounds_need():
    assert set(CATALOG) >= WHOLE_BACKWARDS | ALL_IN_FLIGHT | FILLED_IN_FLIGHT
    assert {name for stack in PROFILES.values() for name in stack.schedules} == set(BUILT_FAST)


def test_bounds_are_the_makespan_itself_for_1f1b_on_one_node_without_messages():
    plan = Plan(MODEL, space(1).cluster, Layout(), Batch(8, 1, 4096))
    assert lower_bound_s(plan, Pricing(plan)) == simulate(plan).report["step_time_s"]


def test_exact_numerics_hold_sums_that_few_microbatches_do_not_show():
    model = replace(model_preset("tiny-gpt"), num_layers=2)
    plan = Plan(model, cluster_preset("this-host", 2), Layout(pp=2), Batch(13, 1, 64), numerics=Numerics("exact"))
    assert _memories(plan) == simulate(plan).memory


def test_report_has_the_keys_of_the_interface_and_best_plan_round_trips():
    result = search(space())
    assert list(result.report) == ["candidates", "evaluated", "simulated", "rejected", "elapsed_s"]
    best = result.report["candidates"][0]
    assert list(best) == ["layout", "batch", "recompute", "schedule", "step_time_s", "mfu", "peak_memory_bytes"]
    again = Plan.from_toml(result.plans[0].to_toml())
    assert again == result.plans[0]
    assert simulate(again).report["step_time_s"] == best["step_time_s"]


def test_pinned_values_are_kept():
    pinned = {
        "layout.tp": 2,
        "layout.zero": 1,
        "batch.micro": 2,
        "recompute.mode": "full",
        "layout.sequence_parallel": True,
    }
    result = search(space(**pinned))
    assert result.report["candidates"]
    for candidate in result.report["candidates"]:
        layout = candidate["layout"]
        assert (layout["tp"], layout["zero"], layout["sequence_parallel"]) == (2, 1, True)
        assert (candidate["batch"]["micro"], candidate["recompute"]) == (2, "full")


def test_nothing_fits_into_a_gigabyte_and_the_report_says_why():
    result = search(space(memory=1e9))
    assert result.plans == () and result.report["candidates"] == []
    assert result.report["rejected"]["out-of-memory"] > 50
    assert result.report["simulated"] == 0


def test_a_plan_stands_for_the_space_around_it():
    given = space()
    plan = Plan(given.model, given.cluster, Layout(tp=2, dp=3), given.batch)
    assert search(plan).plans == search(given).plans


def test_layouts_whose_steps_are_too_long_to_simulate_are_rejected_and_the_others_looked_at():
    tally = Tally()
    found = list(families(space(4, model=replace(MODEL, num_layers=4), batch=Batch(200_000, 1, 4096)), tally))
    assert tally.rejected["actions-are-bounded"] > 0 and found
    assert all(each.plan.num_microbatches * each.plan.layout.num_stages * 6 <= 1_000_000 for each in found)


def test_a_schedule_file_cannot_be_pinned():
    with pytest.raises(PlanError, match="--schedule NAME"):
        search(space(**{"schedule.file": "x.csv"}))


def test_modules_that_the_model_does_not_have_cannot_be_recomputed():
    with pytest.raises(PlanError, match="no experts"):
        search(space(**{"recompute.mode": "selective", "recompute.modules": ["moe"]}))


def test_a_shard_group_that_does_not_divide_the_copies_leaves_them_whole():
    result = search(replace(space(devices=6), data_parallel=DataParallel(shard=2)))
    assert result.report["rejected"]["shards-divide"] > 0
    assert {(plan.layout.dp * plan.layout.cp) % 2 for plan in result.plans if plan.layout.zero} == {0}


def test_a_pinned_context_parallelism_and_recomputed_modules_are_kept():
    pinned = {"layout.cp": 2, "layout.pp": 1, "layout.zero": 1, "batch.micro": 1, "recompute.mode": "selective"}
    result = search(space(devices=4, **pinned, **{"recompute.modules": ["core_attn", "mlp"]}))
    assert result.plans
    assert {(plan.layout.cp, plan.recompute.modules) for plan in result.plans} == {(2, ("core_attn", "mlp"))}


@pytest.mark.parametrize(("profile", "modules"), [("torchtitan", ("norm",)), ("megatron-te", ("core_attn",))])
def test_by_operations_the_attention_core_is_kept_unless_named(profile, modules):
    given = space(2, 80e9, MODEL, Batch(4, 1, 2048), profile, **{"recompute.mode": "selective", "layout.pp": 1})
    plan = search(given).plans[0]
    assert plan.recompute.modules == modules
    assert Plan.from_toml(plan.to_toml()) == plan


def test_every_stack_has_schedules_to_try():
    assert set(PROFILES) == set(STACKS)
    assert all(stack.schedules for stack in PROFILES.values())


def kindred(profile: str) -> list[Plan]:
    """Plans that share a model, cluster and stack with others of them, and differ in much of what a search tries."""
    found = []
    for model, (tp, cp, dp), ep, etp, zero, recompute in itertools.product(
        (TWELVE, EXPERTS), ((2, 1, 8), (1, 2, 8)), (1, 4, 8), (None, 1), (0, 1, 2, 3), ("none", "selective", "full")
    ):
        if (model is TWELVE and (ep > 1 or etp)) or (tp == 1 and etp) or (zero % 2 and recompute == "selective"):
            continue
        layout = Layout(tp=tp, cp=cp, pp=2, dp=dp, ep=ep, etp=etp, zero=zero, sequence_parallel=tp > 1)
        sharding = DataParallel(shard=8 if zero and ep == 1 else None)
        nouns = {"recompute": Recompute(recompute), "data_parallel": sharding}
        found.append(Plan(model, cluster_preset("dgx-h100", 32), layout, Batch(16, 1, 4096), Runtime(profile), **nouns))
    return found


@pytest.mark.parametrize("profile", ["shardproof", "megatron-te"])
def test_what_plans_of_other_degrees_copies_and_zero_share_is_their_own(profile):
    shared, floors = defaultdict(dict), defaultdict(MemoryFloors)
    for plan in kindred(profile):
        name = plan.model.name
        ours, alone = Pricing(plan, shared=shared[name]), Pricing(plan, shared={})
        for kind, stage in itertools.product((Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD, Kind.STEP), (0, 1)):
            assert ours.seconds(kind, stage) == alone.seconds(kind, stage)
        assert floors[name].bytes_of(plan) == MemoryFloors().bytes_of(plan)


def test_stages_that_hold_the_same_cost_what_their_own_place_makes_them():
    cluster, sharding = (
        replace(cluster_preset("dgx-h100", 12), devices_per_node=4),
        DataParallel(overlap_param_gather=True),
    )
    layout, batch = Layout(cp=3, pp=4, zero=1), Batch(8, 1, 6144)
    plan = Plan(TWELVE, cluster, layout, batch, Runtime("megatron-te"), data_parallel=sharding)
    together = Pricing(plan, shared={})
    for kind in (Kind.F, Kind.STEP):
        found = [together.seconds(kind, stage) for stage in range(4)]
        assert found == [Pricing(plan, shared={}).seconds(kind, stage) for stage in range(4)]
        assert len({each.cp_comm + each.dp_comm for each in found}) > 1


def test_tapes_shared_by_plans_of_other_degrees_copies_and_zero_are_their_own():
    plans = [plan for profile in PROFILES for plan in kindred(profile)[::9]]
    shared = [stage_sizes(plan) for plan in plans]
    for plan, sizes in zip(plans, shared, strict=True):
        _tapes_of.cache_clear()
        _sizes.cache_clear()
        assert stage_sizes(replace(plan)) == sizes


SMALL = {"batch.micro": 1, "recompute.mode": "none"}


def small() -> SearchSpace:
    return space(4, 80e9, replace(MODEL, num_layers=4), Batch(8, 1, 4096), "megatron-te", **SMALL)


def test_the_least_memory_is_that_of_looking_at_everything():
    found = sorted(max(m.peak_bytes for m in _memories(plan)) for _, plan in everything(small(), modes=("none",)))
    result = search(small(), Question("memory", top=6))
    assert [each["peak_memory_bytes"] for each in result.report["candidates"]] == found[:6]
    assert result.report["evaluated"] == 6 + sum(result.report["rejected"].values())


def test_the_front_is_that_of_simulating_everything():
    points = []
    for step_s, plan in everything(small(), modes=("none",)):
        points.append((step_s, max(m.peak_bytes for m in _memories(plan)), complexity(plan)[0]))
    points = [point for point in points if point[0] <= points[0][0] * SLOWEST_OF_FRONT]
    front = {
        point
        for point in points
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in points if other != point)
    }
    result = search(small(), Question(pareto=True))
    rows = zip(result.report["candidates"], result.plans, strict=True)
    assert {(row["step_time_s"], row["peak_memory_bytes"], complexity(plan)[0]) for row, plan in rows} == front
    assert len(front) >= 3
    assert result.report["evaluated"] == len(result.plans) + sum(result.report["rejected"].values())


def test_money_and_energy_are_reckoned_where_prices_are_known():
    with pytest.raises(PlanError, match=r"cluster\.device_watts"):
        search(small(), Question("energy"))
    given = replace(small(), cluster=replace(small().cluster, device_watts=700.0, device_price_per_hour=2.0))
    best = search(given, Question("money")).report["candidates"][0]
    assert best["step_price"] == pytest.approx(best["step_time_s"] * 4 * 2 / 3600)
    assert best["step_energy_j"] == pytest.approx(best["step_time_s"] * 4 * 700)


def test_parts_decide_the_whole_space_together():
    whole, parts = search(small()), [search(small(), Question(part=(n, 3))) for n in (1, 2, 3)]
    assert sum(part.report["evaluated"] for part in parts) == whole.report["evaluated"]
    best = sorted(each["step_time_s"] for part in parts for each in part.report["candidates"])
    assert best[:NUM_RANKED] == sorted(each["step_time_s"] for each in whole.report["candidates"])


def test_a_plan_above_a_memory_limit_is_no_answer():
    heaviest = max(each["peak_memory_bytes"] for each in search(small()).report["candidates"])
    limited = search(small(), Question(most_bytes=heaviest - 1)).report["candidates"]
    assert limited and all(each["peak_memory_bytes"] < heaviest for each in limited)


def test_of_near_equal_layouts_the_plainest_comes_first():
    plans = [replace(Plan(MODEL, space(4).cluster, Layout(tp=tp, dp=4 // tp), BATCH)) for tp in (4, 2, 1)]
    ranked = plainer_first(list(zip((1.0, 1.004, 1.006), plans, (None,) * 3, strict=True)))
    assert [plan.layout.tp for _, plan, _ in ranked] == [2, 4, 1]  # 1.006 is not near 1.0


@settings(max_examples=5, deadline=None, derandomize=True)
@drawn(
    num_layers=st.integers(2, 5),
    memory=st.sampled_from([6e9, 12e9, 80e9]),
    batch=st.sampled_from([Batch(4, 1, 4096), Batch(6, 1, 2048), Batch(8, 1, 1024)]),
    profile=st.sampled_from(["shardproof", "megatron-te", "torchtitan", "megatron-2021"]),
    model=st.sampled_from([replace(MODEL, vocab_size=4096), replace(MIXTRAL, vocab_size=4096)]),
    tp=st.sampled_from([1, 2]),
)
def test_any_small_space_is_decided_as_by_simulating_everything(num_layers, memory, batch, profile, model, tp):
    held = {"batch.micro": 1, "recompute.mode": "none", "layout.tp": tp, "layout.cp": 1}
    given = space(2, memory, replace(model, num_layers=num_layers), batch, profile, **held)
    eps = (1, 2, 4, 8) if model.is_moe else (1,)
    found = [step_s for step_s, plan in everything(given, eps=eps, modes=("none",)) if plan.layout.tp == tp]
    result = search(given)
    assert sorted(each["step_time_s"] for each in result.report["candidates"]) == found[:NUM_RANKED]
    assert result.report["evaluated"] == len(result.plans) + sum(result.report["rejected"].values())


def test_progress_has_a_bound_that_only_grows_and_ends_above_the_last_row():
    seen: list[Progress] = []
    result = search(small(), Question(watch=seen.append))
    bounds = [each.bound_s for each in seen]
    assert bounds == sorted(bounds) and seen[0].best_s is None
    assert seen[-1].best_s == min(each["step_time_s"] for each in result.report["candidates"])
    assert progress_text(seen[-1]).endswith(f"best so far {format_s(seen[-1].best_s)}")
