"""Keys that a search frees on demand, against simulating everything and every cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.commands.options import SHARED_WITH_PLANS, SearchSpace
from shardproof.core.layout.stages import layers_written
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.communicators import Communicators
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch, DataParallel
from shardproof.core.plan.train import Checkpoint
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.search.fit import fit
from shardproof.simulator.search.freed import KEYS, OVERLAPS, free_values, spaces_of
from shardproof.simulator.search.min_max import Work, min_max_cut, min_max_stages, work_of
from shardproof.simulator.search.question import SLOWEST_OF_FRONT, Question
from shardproof.simulator.search.search import search
from shardproof.simulator.search.simplicity import complexity
from shardproof.simulator.search.space import Tally, cuts, families, variants
from shardproof.simulator.simulation.simulate import simulate

MODEL = replace(model_preset("llama3-8b"), num_layers=4)
EXPERTS = replace(model_preset("mixtral-8x7b"), num_layers=4)
ALL = Question(top=200)
OPTIONS = (
    *("--model", "llama3-8b", "--set", "model.num_layers=4", "--cluster", "dgx-h100", "--devices", "8"),
    *("--global-batch", "8", "--sequence", "2048"),
)


def space(model=MODEL, profile="megatron-te", **pinned) -> SearchSpace:
    cluster = replace(cluster_preset("dgx-h100", 4), devices_per_node=2)
    return SearchSpace(model, cluster, Batch(8, 1, 2048), runtime=Runtime(profile), pinned={"batch.micro": 1, **pinned})


def freed(given: SearchSpace, *texts: str) -> SearchSpace:
    return replace(given, free=free_values(texts, given, given.pinned.keys()))


def plans_of(given: SearchSpace) -> list[Plan]:
    """All plans of a space, free keys and all."""
    return [
        plan
        for each in spaces_of(given)
        for family in families(each, Tally())
        for same in cuts(family)
        for cut in same
        for plan in variants(cut)
    ]


def with_key(plan: Plan, key: str, value: object) -> Plan | None:
    """The plan with another value of a key; None where it breaks a rule."""
    section, _, name = key.partition(".")
    try:
        return replace(plan, **{section: replace(getattr(plan, section), **{name: value})})
    except PlanError:
        return None


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("precision.dtype", space(**{"layout.zero": 1, "recompute.mode": "none"})),
        ("layout.order", space(EXPERTS, **{"layout.zero": 1, "recompute.mode": "none"})),
        ("data_parallel.shard", space(**{"recompute.mode": "none", "layout.pp": 1})),
        ("data_parallel.overlap_param_gather", space(**{"recompute.mode": "none", "layout.tp": 1})),
        ("runtime.p2p_overlap", space(**{"layout.zero": 0, "recompute.mode": "none"})),
        ("runtime.tp_comm_overlap", space(profile="shardproof", **{"layout.zero": 0, "recompute.mode": "none"})),
        ("runtime.ep_comm_overlap", space(EXPERTS, **{"layout.zero": 1, "recompute.mode": "none"})),
    ],
)
def test_a_freed_key_is_searched_as_by_simulating_every_value_in_every_plan(key, given):
    """Every plan of the space with every value of the key that is legal, none with a step that others have not too."""
    tried = freed(given, key)
    values = tried.free[key]
    assert len(values) > 1
    steps_s = set()
    for plan, value in itertools.product(plans_of(given), values):
        changed = with_key(plan, key, value)
        if changed is not None and fit(changed).fits:
            steps_s.add(simulate(changed).report["step_time_s"])
    found = search(tried, Question(top=20)).report
    ranked_s = sorted({each["step_time_s"] for each in found["candidates"]})
    assert ranked_s == sorted(steps_s)[: len(ranked_s)]
    assert found["free"] == {key: list(values)}
    assert {each["free"][key] for each in found["candidates"]} <= set(values)


@pytest.fixture(scope="module")
def dtypes_and_gathers() -> tuple[SearchSpace, list[tuple[float, int, int]]]:
    """A space with two free keys, and of all its plans that fit the step, the worst rank's bytes, and the things to set
    up."""
    given = space(**{"recompute.mode": "none", "layout.sequence_parallel": False, "layout.pp": 1})
    keys = ("precision.dtype", "data_parallel.overlap_param_gather")
    tried = freed(given, *keys)
    assert all(len(tried.free[key]) > 1 for key in keys)
    points = []
    for plan, *values in itertools.product(plans_of(given), *(tried.free[key] for key in keys)):
        for key, value in zip(keys, values, strict=True):
            plan = plan and with_key(plan, key, value)
        if plan is not None and (found := fit(plan)).fits:
            peak = max(row["peak_memory_bytes"] for row in found.report["per_rank"])
            points.append((simulate(plan).report["step_time_s"], peak, complexity(plan)[0]))
    return tried, points


def test_the_front_with_freed_keys_is_that_of_simulating_everything(dtypes_and_gathers):
    tried, points = dtypes_and_gathers
    near = {point for point in points if point[0] <= min(points)[0] * SLOWEST_OF_FRONT}
    front = {
        point
        for point in near
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in near if other != point)
    }
    result = search(tried, Question(pareto=True))
    rows = zip(result.report["candidates"], result.plans, strict=True)
    assert {(row["step_time_s"], row["peak_memory_bytes"], complexity(plan)[0]) for row, plan in rows} == front
    assert len(front) >= 3 and len({plan.precision.dtype for plan in result.plans}) == 2


def test_the_least_memory_with_freed_keys_is_that_of_simulating_everything(dtypes_and_gathers):
    tried, points = dtypes_and_gathers
    found = search(tried, Question("memory", top=8))
    rows = [(row["peak_memory_bytes"], row["step_time_s"]) for row in found.report["candidates"]]
    assert rows[0] == min((peak, step_s) for step_s, peak, _ in points)
    distinct = sorted({(peak, step_s) for step_s, peak, _ in points})
    assert sorted(set(rows)) == distinct[: len(set(rows))]
    assert {plan.precision.dtype for plan in found.plans} <= {*tried.free["precision.dtype"]}


def test_no_plan_is_looked_at_twice_and_every_value_that_means_something_once():
    given = freed(space(EXPERTS), "overlap", "order", "shard", "dtype")
    assert set(OVERLAPS) & given.free.keys() and len(list(spaces_of(given))) > 50
    plans = plans_of(replace(given, pinned={**given.pinned, "recompute.mode": "none", "layout.tp": 1}))
    assert len(set(plans)) == len(plans) > 100
    assert all(plan.layout.zero or plan.data_parallel.overlap_param_gather is None for plan in plans)
    assert {plan.data_parallel.shard for plan in plans} == {None, 2}
    assert all(plan.runtime.ep_comm_overlap is None or plan.layout.ep > 1 for plan in plans)


def compositions(number: int, parts: int):
    """Every way to cut so many layers into stages of one at least."""
    for ends in itertools.combinations(range(1, number), parts - 1):
        yield [end - first for first, end in itertools.pairwise((0, *ends, number))]


def busiest(work: Work, counts, owners) -> float:
    ends, total = [0, *itertools.accumulate(counts)], dict.fromkeys(owners, 0.0)
    for stage, owner in enumerate(owners):
        total[owner] += sum(work.layers[ends[stage] : ends[stage + 1]])
        total[owner] += work.before * (stage == 0) + work.after * (stage == len(counts) - 1)
    return max(total.values())


@pytest.mark.parametrize("owners", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1), (0, 1, 2, 0, 1, 2)])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.1, 1.6), (2.3, 0.4), (0.2, 5.0)])
def test_the_busiest_rank_has_no_less_in_any_other_cut(owners, before, after):
    for number in (6, 8, 11):
        work = Work((1.0,) * number, before, after)
        found = min_max_cut(work, owners)
        assert sum(found) == number and min(found) >= 1
        least = min(busiest(work, counts, owners) for counts in compositions(number, len(owners)))
        assert busiest(work, found, owners) == pytest.approx(least)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.1, 1.6), (2.3, 4.0)])
def test_stages_of_unequal_layers_are_cut_so_that_the_longest_is_least(stages, before, after):
    for layers in ((1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0), (2.0, 1.0) * 4, (5.0, 1.0, 1.0, 1.0, 1.0)):
        work, owners = Work(layers, before, after), tuple(range(stages))
        found = min_max_cut(work, owners)
        assert sum(found) == len(layers) and min(found) >= 1
        least = min(busiest(work, counts, owners) for counts in compositions(len(layers), stages))
        assert busiest(work, found, owners) == pytest.approx(least)


def test_fewer_layers_than_stages_have_no_cut():
    assert min_max_cut(Work((1.0,) * 3, 0.0, 0.0), (0, 1, 2, 3)) is None


def test_a_freed_cut_of_layers_adds_that_by_min_max_and_is_ranked_with_the_usual_ones():
    given = space(replace(MODEL, num_layers=8, vocab_size=400_000), **{"recompute.mode": "none", "layout.pp": 4})
    usual, both = search(given, ALL), search(freed(given, "stages"), ALL)
    assert both.report["evaluated"] > usual.report["evaluated"]
    assert both.report["candidates"][0]["step_time_s"] < usual.report["candidates"][0]["step_time_s"]
    best = both.plans[0]
    work = work_of(best, Pricing(best))
    assert best.layout.stages == min_max_stages(work, best.placement)
    assert layers_written(best.layout.stages)[-1] == 1  # a head that takes as long as three layers
    steps_s = {each["step_time_s"] for each in both.report["candidates"]}
    assert {each["step_time_s"] for each in usual.report["candidates"]} <= steps_s


def test_a_search_keeps_checkpoints_and_communicators():
    plan = Plan.from_toml(
        '[model]\npreset = "llama3-8b"\nnum_layers = 2\n[cluster]\npreset = "dgx-h100"\nnum_devices = 2\n'
        '[layout]\ntp = 2\n[batch]\nglobal = 2\nmicro = 1\nsequence = 2048\n[checkpoint]\nfolder = "saved"\nevery = 5\n'
        '[communicators]\nhigh_priority = ["pp"]\n'
    )
    assert {"checkpoint", "communicators"} <= set(SHARED_WITH_PLANS)
    found = search(plan, Question(top=3)).plans
    assert {each.checkpoint for each in found} == {Checkpoint(folder="saved", every=5)} == {plan.checkpoint}
    assert {each.communicators for each in found} == {Communicators(high_priority=("pp",))} == {plan.communicators}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour", "is nothing that a search frees. Use dtype, overlap_grad_reduce"),
        ("dtype=fp7", "precision.dtype: dtype = 'fp7' is not one of"),
        ("stages=EttL", "takes no values"),
        ("shard=0", "at least 1"),
        ("order", "layout.order is fixed by another option"),
    ],
)
def test_what_cannot_be_freed_is_refused_in_a_sentence(text, said):
    with pytest.raises(PlanError, match=said):
        freed(space(**{"layout.order": "tp-cp-ep-dp-pp"}), text)


def test_the_command_says_what_was_searched_too_and_has_a_column_for_it(capsys):
    options = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--global-batch",
        "8",
        "--sequence",
        "2048",
        "--top",
        "12",
    ]
    assert main(["plan", *options, "--free", "dtype=bf16,fp8", "--free", "shard", "--fix", "pp=1"]) == 0
    printed = capsys.readouterr().out
    assert "searched too: precision.dtype (bf16, fp8; not the same bits)" in printed
    assert "searched too: data_parallel.shard (-, 2, 4)" in printed
    header = next(line for line in printed.splitlines() if "MFU" in line)
    assert header.split()[-2:] == ["dtype", "peak"] or header.split()[-3:] == ["dtype", "shard", "peak"]


def test_parts_of_a_search_with_a_free_key_merge_to_the_whole(capsys, tmp_path):
    options = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--global-batch",
        "8",
        "--sequence",
        "2048",
        "--free",
        "dtype",
    ]
    files = []
    for part in ("1/2", "2/2"):
        assert main(["plan", *options, "--part", part, "--json"]) == 0
        files.append(tmp_path / f"{part[0]}.json")
        files[-1].write_text(capsys.readouterr().out)
    assert main(["plan", *options, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["plan", "--merge", *map(str, files), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"] == whole["candidates"]


def test_every_free_key_is_a_key_of_a_plan_and_none_is_free_unasked():
    assert DataParallel().shard is None
    assert not space().free and all(KEYS[key].key == key for key in KEYS)
    assert [each.free for each in spaces_of(space())] == [{}]
