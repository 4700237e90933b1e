"""Recorded durations in the place of prices: a step fed back gives itself, and the same durations
another schedule's step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.base.errors import PlanError, TimelineError
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.variation import Variation
from shardproof.core.plan.plan import Plan
from shardproof.core.schedule import CATALOG, build
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.timeline import Span, Timeline
from shardproof.simulator.engine.engine import run_schedule
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.step.step import Simulation


def plan_of(layout: Layout, schedule: str = "1F1B", *, microbatches: int = 6) -> Plan:
    return product_plan(
        layout,
        model="tiny-llama",
        num_layers=layout.pp * layout.vpp,
        samples=microbatches * layout.dp,
        sequence=64,
        dtype="fp32",
        schedule=schedule,
    )


def named(name: str, pp: int) -> Plan:
    entry = CATALOG[name]
    microbatches = 2 * pp if entry.problem(pp=pp, num_microbatches=6, vpp=entry.nearest_vpp(1)) else 6
    return plan_of(Layout(pp=pp, vpp=entry.nearest_vpp(1)), name, microbatches=microbatches)


def times(simulation: Simulation) -> list[tuple[float, float]]:
    return list(zip(simulation.run.start_s.tolist(), simulation.run.end_s.tolist(), strict=True))


@pytest.mark.parametrize("name", CATALOG)
def test_a_step_whose_durations_are_fed_back_is_the_same_step(name):
    plan = named(name, 4 if name.startswith("DualPipe") else 3)
    first = simulate(plan)
    again = simulate(plan, durations=[first.timeline])
    assert times(again) == times(first)
    assert again.report["memory_bytes"] == first.report["memory_bytes"]
    assert sum(again.report["time_s"].values()) == pytest.approx(again.report["step_time_s"], rel=1e-12)
    assert again.report["provenance"]["durations"]["kind"] == "measured"


DURATIONS = {
    "forward_s": (3e-3, 5e-3, 4e-3),
    "backward_input_s": 6e-3,
    "backward_weight_s": (2e-3, 1e-3, 2e-3),
    "send_s": 1e-3,
}
"""F, I and W by stage, and messages."""


STEP_S = 4e-3


def recorded(name: str, *, microbatches: int = 6) -> Timeline:
    """A step of a schedule over three ranks, one stage each, as if it had been recorded: all ranks step together."""
    schedule = build(name, pp=3, num_microbatches=microbatches)
    ran = run_schedule(schedule, **DURATIONS, sends="rendezvous", reduce_s=2e-3, step_s=STEP_S)
    step = {"start_s": ran.makespan_s - STEP_S, "end_s": ran.makespan_s}
    return Timeline.from_spans(
        [replace(span, **step) if span.action.kind is Kind.STEP else span for span in ran.spans], "measured", title=name
    )


@pytest.mark.parametrize(
    ("before", "after"), [("1F1B", "GPipe"), ("ZBH1", "1F1B"), ("ZBH1", "GPipe"), ("GPipe", "1F1B")]
)
def test_durations_of_one_schedule_predict_another(before, after):
    plan = plan_of(Layout(pp=3), after)
    assert simulate(plan, durations=[recorded(before)]).report["step_time_s"] == pytest.approx(
        recorded(after).makespan_s, rel=1e-9
    )


def test_whole_backwards_are_split_as_they_are_priced():
    plan = plan_of(Layout(pp=3), "ZBH1")
    simulation = simulate(plan, durations=[recorded("1F1B")])
    spans = simulation.timeline.select(1)
    halves = {kind: sum(span.duration_s for span in spans if span.action.kind.name == kind) for kind in "IW"}
    whole = sum(span.duration_s for span in spans if span.action.kind.name == "B")
    assert sum(halves.values()) + whole == pytest.approx(6 * 7e-3)
    assert halves["W"] > 0


def slowed(timeline: Timeline, factor: float) -> Timeline:
    return Timeline.from_spans(
        [replace(span, start_s=factor * span.start_s, end_s=factor * span.end_s) for span in timeline.spans], "measured"
    )


def test_of_several_recorded_steps_the_one_in_the_middle_counts():
    steps = [slowed(recorded("1F1B"), factor) for factor in (3, 1, 1.5)]
    report = simulate(plan_of(Layout(pp=3), "GPipe"), durations=steps).report
    expected = recorded("GPipe").makespan_s
    assert report["step_time_s"] == pytest.approx(1.5 * expected)
    assert report["recorded_step_time_s"] == pytest.approx([3 * expected, expected, 1.5 * expected])


def spans(global_rank: int, *ends: tuple[str, str, float]) -> list[Span]:
    """Lane, action and end of each, every one starting when the one before on its lane ends."""
    free: dict[str, float] = {}
    found = []
    for lane, token, end_s in ends:
        found.append(Span(global_rank, lane, Action.from_str(token), free.get(lane, 0.0), end_s))
        free[lane] = end_s
    return found


def test_ranks_of_a_tensor_parallel_group_count_as_one_that_ends_with_its_last():
    first = spans(
        0, ("compute", "0F0", 2.0), ("compute", "0B0", 5.0), ("dp", "0REDUCE_GRAD", 5.5), ("compute", "0STEP", 6.0)
    )
    second = spans(
        1, ("compute", "0F0", 3.0), ("compute", "0B0", 4.5), ("dp", "0REDUCE_GRAD", 6.0), ("compute", "0STEP", 7.0)
    )
    simulation = simulate(
        plan_of(Layout(tp=2), microbatches=1), durations=[Timeline.from_spans([*first, *second], "measured")]
    )
    lasting = {str(span.action): span.duration_s for span in simulation.timeline.spans}
    assert lasting == pytest.approx({"0F0": 3.0, "0B0": 2.0, "0REDUCE_GRAD": 1.0, "0STEP": 1.0})


def test_replicas_reduce_when_the_slower_one_is_ready_and_step_together():
    fast = spans(
        0, ("compute", "0F0", 1.0), ("compute", "0B0", 2.0), ("dp", "0REDUCE_GRAD", 8.5), ("compute", "0STEP", 9.5)
    )
    slow = spans(
        1, ("compute", "0F0", 3.0), ("compute", "0B0", 8.0), ("dp", "0REDUCE_GRAD", 8.4), ("compute", "0STEP", 9.0)
    )
    plan = plan_of(Layout(dp=2), microbatches=1)
    simulation = simulate(plan, durations=[Timeline.from_spans([*fast, *slow], "measured")])
    assert simulation.dp_rank == 1 and simulation.global_ranks == (1,)
    lasting = {str(span.action): span.duration_s for span in simulation.timeline.spans}
    assert lasting == pytest.approx({"0F0": 3.0, "0B0": 5.0, "0REDUCE_GRAD": 0.5, "0STEP": 1.0})
    assert simulation.report["step_time_s"] == pytest.approx(9.5)


def without(timeline: Timeline, token: str) -> Timeline:
    return Timeline.from_spans([span for span in timeline.spans if str(span.action) != token], "measured")


def test_what_does_not_fit_the_plan_is_refused_with_what_to_do():
    whole = recorded("1F1B")
    for plan, timeline, message in (
        (plan_of(Layout(pp=6)), whole, r"has 3 ranks, the plan tp\*cp\*dp\*pp = 6 .*Record a step of this layout"),
        (plan_of(Layout(pp=3, vpp=2), "Interleaved1F1B"), whole, "has 3 stages, the plan 6.*same pp and vpp"),
        (
            plan_of(Layout(pp=3)),
            without(whole, "2RECV_F4"),
            ("has no 2RECV_F4 on pipeline rank 2, so it is no whole step"),
        ),
    ):
        with pytest.raises(TimelineError, match=message):
            simulate(plan, durations=[timeline])
    with pytest.raises(PlanError, match="varies prices"):
        simulate(replace(plan_of(Layout(pp=3)), variation=Variation(jitter=0.1)), durations=[whole])


def test_simulate_and_draw_take_recorded_durations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recorded("1F1B").save("run.timeline.json.gz")
    plan = [
        "--model",
        "tiny-llama",
        "--cluster",
        "this-host",
        "--pp",
        "3",
        "--dp",
        "1",
        "--global-batch",
        "6",
        "--sequence",
        "64",
    ]
    plan += ["--set", "model.num_layers=3", "--durations", "run.timeline.json.gz"]
    assert main(["simulate", *plan]) == 0
    reported = capsys.readouterr().out
    assert "Durations measured (1F1B), split by cause" in reported and "its own actions lasting longer" not in reported
    assert main(["draw", *plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == pytest.approx(recorded("1F1B").makespan_s)
    assert main(["simulate", *plan, "--sensitivity"]) == 2
    assert "recorded durations do not depend on" in capsys.readouterr().err
    assert main(["draw", "run.timeline.json.gz", "--durations", "run.timeline.json.gz"]) == 2
    assert "--durations: plan options have no effect" in capsys.readouterr().err
