"""`shardproof draw` as a user meets it: files in, text or files out, exit codes."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

from shardproof import Plan, Timeline, draw, lower
from shardproof.core.commands.cli import main
from shardproof.core.plan.schedule_of import schedule_for

CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def folder(tmp_path, monkeypatch, full):
    """A folder with a schedule of two ranks and a recorded timeline, to which the command line is moved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.csv").write_text(CSV)
    full.save("run.timeline.json")
    return tmp_path


def test_schedule_csv_is_drawn_with_unit_costs(folder, capsys):
    assert main(["draw", "two.csv", "--width", "50"]) == 0
    out = capsys.readouterr().out
    assert "Predicted: 9 units, bubble 33.3% on every rank" in out
    assert "rank 0 |F0-F1-......B0====...B1====| 33.3%" in out
    assert "rank 1 |...F0-B0====F1-B1====......| 33.3%" in out


def test_recorded_timeline_is_drawn_as_the_function_draws_it(folder, capsys, full):
    assert main(["draw", "run.timeline.json", "--width", "50"]) == 0
    assert capsys.readouterr().out == draw(full, width=50)


def test_no_memory_leaves_the_curves_out(folder, capsys):
    assert main(["draw", "run.timeline.json", "--no-memory"]) == 0
    assert "memory" not in capsys.readouterr().out


PLAN = ["--model", "gpt2", "--cluster", "dgx-h100", "--devices", "6", "--pp", "3", "--tp", "2", "--global-batch", "6"]


def test_plan_is_simulated_and_shows_one_row_per_pipeline_rank(folder, capsys):
    assert main(["draw", *PLAN]) == 0
    out = capsys.readouterr().out
    rows = [line.split("|")[0].strip() for line in out.split("memory")[0].splitlines() if "|" in line]
    assert rows == ["rank 0", "rank 2", "rank 4"]
    assert "S# optimizer step" in out and "memory" in out


def test_predicted_plan_next_to_its_recording_has_the_same_length(folder, capsys):
    assert main(["draw", *PLAN, "-o", "predicted.timeline.json"]) == 0
    capsys.readouterr()
    assert main(["draw", *PLAN, "--compare", "predicted.timeline.json"]) == 0
    assert "1 x the first" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x.svg", "x.png", "x.txt", "x.json", "x.json.gz", "x.timeline.json"])
def test_output_is_chosen_by_the_suffix(folder, capsys, name):
    assert main(["draw", "two.csv", "-o", name]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"written: {name}\n")
    assert {path.name for path in folder.iterdir()} == {"two.csv", "run.timeline.json", name}


def test_json_has_makespan_bubbles_and_peaks(folder, capsys):
    assert main(["draw", "run.timeline.json", "--json", "--compare", "run.timeline.json", "-o", "x.svg"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan_s"] == 9.0 and report["bubble_fraction"] == pytest.approx(1 / 3)
    assert (report["title"], report["source"], report["num_ranks"], report["num_spans"]) == ("tiny", "predicted", 2, 14)
    assert report["per_rank"][0] == {
        "global_rank": 0,
        "busy_s": 6.0,
        "bubble_fraction": pytest.approx(1 / 3),
        "peak_memory_bytes": 3 * 2**30,
    }
    assert report["lanes"][0] == {
        "global_rank": 0,
        "lane": "compute",
        "num_actions": [4, 4],
        "same_order": True,
        "busy_s": [6.0, 6.0],
    }
    assert report["file"] == "x.svg" and report["compare"]["makespan_s"] == 9.0 and (folder / "x.svg").exists()


def test_compare_draws_both(folder, capsys, full):
    slow = Timeline(full.spans, "measured", (), "real")
    slow.save("slow.timeline.json.gz")
    assert main(["draw", "run.timeline.json", "--compare", "slow.timeline.json.gz", "--by", "timeline"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny / real\n") and out.count("rank 1 |") == 3  # two Gantt rows and one memory curve
    assert "Measured: 9 s, bubble 33.3% on every rank, 1 x predicted" in out
    assert main(["draw", "run.timeline.json", "--compare", "slow.timeline.json.gz"]) == 0
    assert "Predicted: 9 s, bubble 33.3% on every rank; measured: 9 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["two.csv", "-o", "x.gif"], "unknown picture suffix '.gif'"),
        (["missing.csv"], "missing.csv: No such file or directory"),
        (["two.csv", "--compare", "run.timeline.json"], "compares only with another CSV"),
        (["two.csv", "--tp", "2"], "--tp: plan options have no effect on two.csv"),
        (["bad.json"], "bad.json: not a recorded timeline"),
        (["bad.csv"], "0Q1"),
        (["two.csv", "-o", "nowhere/x.svg"], "nowhere/x.svg: there is no folder nowhere. Make it"),
        (["two.csv", "--scale", "own"], "--scale own has no effect without --compare"),
        (["two.csv", "--by", "lane"], "--by lane has no effect without --compare"),
        (["two.csv", "--width", "0"], "must lie between 1 and 10,000 characters"),
        (["two.csv", "--width", "99999999"], "must lie between 1 and 10,000 characters"),
        (["two.csv", "--width", "5", "-o", "x.svg"], "must lie between 200 and 20,000 pixels"),
        (
            ["--model", "gpt2", "--tp", "2", "--what", "traffic", "--width", "400", "-o", "x.svg"],
            "must lie between 500 and 20,000 pixels",
        ),
        (["two.csv", "--width", "x"], "'x' is not a whole number"),
        (["-"], "-: standard input is not read. Give the name of a file."),
        ([""], "argument PLAN: it is empty"),
    ],
)
def test_bad_input_is_code_2_with_one_message_and_no_file(folder, capsys, arguments, message):
    (folder / "bad.json").write_text("{}")
    (folder / "bad.csv").write_text("0F0,0Q1\n")
    before = {path.name for path in folder.iterdir()}
    assert _code(["draw", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and "Traceback" not in printed.err
    assert {path.name for path in folder.iterdir()} == before


def _code(arguments):
    """The exit code, which the parser of options raises."""
    try:
        return main(arguments)
    except SystemExit as leave:
        return leave.code


def on_a_terminal(folder, **environment):
    """What `draw two.csv` prints to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardproof", "draw", "two.csv"], cwd=folder, env=variables, stdout=theirs
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux reports the closed other end so
            break
        if not part:
            break
        printed += part
    os.close(ours)
    assert process.wait() == 0
    return printed.decode()


def test_colour_is_for_terminals_and_no_color_turns_it_off(folder):
    assert "\x1b[0;38;5;231;48;5;67m" in on_a_terminal(folder)
    plain = on_a_terminal(folder, NO_COLOR="1")
    assert "\x1b" not in plain and "|F0" in plain
    assert "\x1b" not in on_a_terminal(folder, TERM="dumb")


@pytest.mark.parametrize("source", ["plan", "schedule"])
def test_the_waits_of_a_schedule_are_written_as_graphml(source, tmp_path, capsys):
    plan = Path(__file__).parents[2] / "examples" / "tiny_tp2_pp2_dp2.toml"
    lowered = lower(schedule_for(Plan.from_toml(plan.read_text(encoding="utf-8"))))
    given = tmp_path / "schedule.csv"
    given.write_text(lowered.to_csv(), encoding="utf-8")
    output = tmp_path / "waits.graphml"
    assert main(["draw", str(plan if source == "plan" else given), "-o", str(output), "--json"]) == 0
    graph, expected = networkx.read_graphml(output), lowered.graph()
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"num_actions": len(lowered), "num_waits": expected.number_of_edges(), "file": str(output)}
    assert sorted(data["action"] for _, data in graph.nodes(data=True)) == sorted(map(str, lowered.actions))
    named = {
        (f"rank {a[0]} action {a[1]}", f"rank {b[0]} action {b[1]}", why) for a, b, why in expected.edges(data="why")
    }
    assert set(graph.edges(data="why")) == named


@pytest.mark.parametrize("options", [["--compare", "other.toml"], []])
def test_a_graph_is_of_one_schedule_and_not_of_a_recorded_timeline(options, tmp_path, capsys):
    plan = str(Path(__file__).parents[2] / "examples" / "tiny_tp2_pp2_dp2.toml") if options else "run.timeline.json"
    assert main(["draw", plan, *options, "-o", str(tmp_path / "waits.graphml")]) == 2
    assert "has no place in" in capsys.readouterr().err
    assert not (tmp_path / "waits.graphml").exists()
