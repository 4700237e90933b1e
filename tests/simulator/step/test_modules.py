"""`simulate` of several modules: two halves of a model cost what its two stages do, and branches
overlap with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.modules import modular, module
from helpers.paths import EXAMPLES
from shardproof import ModularPlan, Plan, simulate
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.machine.variation import Variation
from shardproof.core.plan.schedule_of import modular_schedule
from shardproof.core.schedule.action import Kind
from shardproof.simulator.engine.engine import execute
from shardproof.simulator.engine.graph import build_graph
from shardproof.simulator.engine.joined_graph import joined_graph
from shardproof.simulator.network.bridge_bytes import bridge_bytes
from shardproof.simulator.search.fit import fit

EXAMPLE = EXAMPLES / "encoder_decoder.toml"

HEAD = """\
[cluster]
preset = "dgx-h100"
num_devices = 4
[batch]
global = 8
sequence = 2048
"""
MODULES = "".join(
    f'[[modules]]\nname = "{name}"\nranks = "{ranks}"\n[modules.model]\npreset = "llama3-8b"\nnum_layers = '
    "2\n[modules.layout]\ntp = 2\n"
    for name, ranks in (("a", "0-1"), ("b", "2-3"))
)


def test_two_halves_of_a_model_take_the_time_and_the_memory_of_its_two_stages() -> None:
    whole = simulate(Plan.from_toml(f'{HEAD}[model]\npreset = "llama3-8b"\nnum_layers = 4\n[layout]\ntp = 2\npp = 2\n'))
    halves = simulate(ModularPlan.from_toml(HEAD + MODULES))
    assert halves.memory == whole.memory
    same = (
        "num_parameters",
        "num_devices",
        "bubble_rank",
        "critical_rank",
        "peak_memory_rank",
        "peak_memory_action",
        "memory_bytes",
    )
    assert {key: halves.report[key] for key in same} == {key: whole.report[key] for key in same}
    # a bridge has a communicator of its own
    assert halves.report["step_time_s"] == pytest.approx(whole.report["step_time_s"], rel=1e-4)
    assert halves.report["mfu"] == pytest.approx(whole.report["mfu"], rel=1e-4)
    assert {k: v for k, v in halves.report["time_s"].items() if k != "pp_comm"} == pytest.approx(
        {k: v for k, v in whole.report["time_s"].items() if k != "pp_comm"}
    )
    assert [span.action for span in halves.timeline.spans] == [span.action for span in whole.timeline.spans]
    assert sorted(halves.timeline.memory, key=str)[-1].num_bytes == sorted(whole.timeline.memory, key=str)[-1].num_bytes


def test_on_a_line_the_waits_of_joined_stages_are_those_of_every_schedule() -> None:
    schedule = modular_schedule(ModularPlan.from_toml(HEAD + MODULES), 5)
    durations = np.random.default_rng(0).random(len(schedule))
    one, other = (execute(graph, durations) for graph in (build_graph(schedule), joined_graph(schedule)))
    assert np.array_equal(one.start_s, other.start_s) and np.array_equal(one.end_s, other.end_s)


def test_a_joined_stage_waits_for_the_slower_branch_and_gives_its_gradient_to_both() -> None:
    plan = modular(module("slow", pp=2), module("fast"), module("last", ["slow", "fast"]), samples=3)
    schedule = modular_schedule(plan, 3)
    seconds = {Kind.F: 1.0, Kind.B: 2.0, Kind.SEND_F: 0.25, Kind.SEND_B: 0.25}
    durations = np.array([seconds.get(action.kind, 0.0) for action in schedule.actions])
    run = execute(joined_graph(schedule), durations)
    start = {str(action): float(time) for action, time in zip(schedule.actions, run.start_s, strict=True)}
    # behind the two forwards and messages of `slow`
    assert start["1F0"] == 1.25 and start["2F0"] == 0.0 and start["3F0"] == 2.5
    assert start["3B0"] == 3.5 and start["1B0"] == start["2B0"] == 5.75


def test_bytes_over_a_bridge_are_every_rank_s_share_of_the_hidden_states() -> None:
    plan = modular(
        module("a", tp=4), module("b", ["a"], tp=2, dp=3, sequence_parallel=True), samples=6, schedule="GPipe"
    )
    forward, backward = (bridge_bytes(plan, *plan.parts, backward=backward) for backward in (False, True))
    whole = 6 * 24 * plan.parts[0].model.hidden_size * 4
    assert sum(forward.values()) == whole and sum(backward.values()) == 4 * whole  # every replica takes the gradient
    assert {sender for sender, _ in forward} == {0, 1, 2, 3} and {receiver for _, receiver in forward} == set(
        range(4, 10)
    )
    assert plan.replaced(lambda each: each) == plan and simulate(plan).report["modules"][0]["bridge_bytes"] == whole


def test_simulate_and_draw_take_a_file_of_modules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", str(EXAMPLE), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_devices"] == 6 and [each["ranks"] for each in report["modules"]] == [[0, 3], [4, 5]]
    assert sum(report["time_s"].values()) == pytest.approx(report["step_time_s"], rel=1e-12)
    assert main(["simulate", str(EXAMPLE)]) == 0
    assert "encoder tp4 -> decoder tp2; 1F1B, 6 x 64 tokens in microbatches of 1" in capsys.readouterr().out
    assert main(["draw", str(EXAMPLE), "-o", str(tmp_path / "modules.svg")]) == 0
    assert "rank 4" in (tmp_path / "modules.svg").read_text()


def test_modules_fit_where_their_heaviest_rank_does() -> None:
    plan = modular(module("a", tp=2, pp=2), module("b", ["a"], tp=3), samples=2)
    simulation, fitting = simulate(plan), fit(plan)
    assert fitting.fits and fitting.findings == ()
    rows, report = fitting.report["per_rank"], simulation.report
    assert [row["global_rank"] for row in rows] == list(simulation.global_ranks) == [0, 2, 4]
    assert [row["peak_memory_bytes"] for row in rows] == [memory.peak_bytes for memory in simulation.memory]
    assert max(row["peak_memory_bytes"] for row in rows) == report["peak_memory_bytes"]
    small = fit(replace(plan, cluster=replace(plan.cluster, device_memory_bytes=report["peak_memory_bytes"] - 1)))
    assert not small.fits and small.remedies == []
    (finding,) = small.findings
    assert f"rank {report['peak_memory_rank']}" in finding.where and "more ranks for that module" in finding.hint
    with pytest.raises(PlanError, match=r"\[variation\] is not simulated with \[\[modules\]\] yet"):
        fit(replace(plan, variation=Variation(jitter=0.1)))


def test_what_modules_are_not_simulated_with_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    plan = modular(module("a"), module("b", ["a"]), samples=2)
    with pytest.raises(PlanError, match=r"\[variation\] is not simulated with \[\[modules\]\] yet"):
        simulate(replace(plan, variation=Variation(jitter=0.1)))
    many = [module(f"m{number}") for number in range(4)]
    with pytest.raises(PlanError, match="4 inputs, and simulate joins at most 3"):
        simulate(modular(*many, module("last", [each["name"] for each in many]), samples=2))
    assert main(["simulate", str(EXAMPLE), "--sensitivity"]) == 2
    assert "--sensitivity is about one model, and this plan has" in capsys.readouterr().err
