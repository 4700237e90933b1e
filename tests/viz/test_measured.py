"""`draw` of a profiler's traces: next to the plan whose schedule they are recognised by, with what was measured."""

import json

import pytest

from shardproof.core.commands.cli import main

PLAN = ["--model", "gpt2", "--cluster", "dgx-h100", "--devices", "4", "--pp", "2", "--global-batch", "6"]


def trace(rank, row):
    """A rank of two whose forwards last 100 microseconds and backwards 200, with 50 between, and an all-reduce of 40
    in the last pause."""
    events, now, made = [], 0, {}

    def event(name, length, category="cpu_op", **args):
        nonlocal now
        common = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "args": args}
        events.append({**common, "ts": now, "dur": length})
        now += length

    for action in row:
        if action[0] == "F":
            made[action[1:]] = len(made)
            event("aten::mm", 100, **{"Sequence number": made[action[1:]]})
        else:
            name = "autograd::engine::evaluate_function: MmBackward0"
            event(name, 200, **{"Sequence number": made[action[1:]]})
        event("gloo:send", 10, "user_annotation")
        now += 40
    now -= 45
    event("gloo:all_reduce", 40, "user_annotation")
    event("aten::add", 5)
    event("Optimizer.step#AdamW.step", 20, "user_annotation")
    return json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}})


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Traces of ranks 0 and 2 of four, the first of each pipeline rank."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "0.json").write_text(trace(0, ["F0", "F1", "B0", "F2", "B1", "B2"]))
    (tmp_path / "traces" / "2.json").write_text(trace(2, ["F0", "B0", "F1", "B1", "F2", "B2"]))
    return tmp_path


def test_traces_lie_under_the_plan_that_they_are_recognised_by(traces, capsys):
    assert main(["draw", *PLAN, "--compare", "traces", "--by", "timeline", "--width", "90"]) == 0
    out = capsys.readouterr().out
    assert "rank 2 |" in out.split("Measured")[1]
    rows = [line.split() for line in out.splitlines() if line.startswith("  ") and "|" not in line]
    table = {row[0]: row[1:] for row in rows if row[0] in ("measured", "step", "bubble", "exposed", "MFU")}
    assert table["measured"] == ["predicted"] and len(table["MFU"]) == 2
    step_us = 3 * 100 + 3 * 200 + 5 * 50 + 5 + 40 + 5 + 20
    assert table["step"][:2] == [f"{step_us / 1000:.4g}", "ms"]


def test_measures_are_in_the_json_and_the_prediction_s_utilization_scales_with_the_step(traces, capsys):
    assert main(["draw", *PLAN, "--compare", "traces", "--json", "-o", "x.html"]) == 0
    report = json.loads(capsys.readouterr().out)
    measured, predicted = report["measured"], report["measured"]["predicted"]
    step_s = 1220e-6
    assert measured["step_time_s"] == pytest.approx(step_s) and measured["bubble_fraction"] == pytest.approx(300 / 1220)
    assert measured["exposed_fraction"] == pytest.approx(40 / 1220)
    assert measured["collectives_s"] == {"0": pytest.approx(40e-6), "2": pytest.approx(40e-6)}
    assert predicted["step_time_s"] == report["makespan_s"]
    assert measured["mfu"] * step_s == pytest.approx(predicted["mfu"] * predicted["step_time_s"])


PLAN_FILE = """[model]
preset = "gpt2"
[cluster]
preset = "dgx-h100"
num_devices = 4
[layout]
pp = 2
[batch]
global = 6
sequence = 1024
"""


def test_traces_may_come_first(traces, capsys):
    (traces / "plan.toml").write_text(PLAN_FILE)
    assert main(["draw", "traces", "--compare", "plan.toml", "--by", "timeline", "-o", "x.timeline.json"]) == 0
    spans = json.loads((traces / "x.timeline.json").read_text())["spans"]
    own = [action for rank, action in zip(spans["global_rank"], spans["action"], strict=True) if rank == 2]
    assert [action for action in own if "SEND" not in action] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1STEP"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["traces"], "ranks send messages. Give --compare PLAN"),
        ([*PLAN[:-1], "8", "--compare", "traces"], "FFBFBB, of which no 8 in a row are those of the plan's schedule"),
        (
            [*PLAN[:5], "2", "--pp", "2", "--global-batch", "3", "--compare", "traces"],
            "rank 2 is outside the world of 2",
        ),
    ],
)
def test_what_is_not_recognised_is_exit_code_2(traces, capsys, arguments, message):
    assert main(["draw", *arguments]) == 2
    assert message in capsys.readouterr().err
