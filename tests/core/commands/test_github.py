"""Annotations of GitHub Actions: the form of the lines, and the lines of plans that they name."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof import Finding, Layout, Plan
from shardproof.core.base.errors import PlanError, Problem, ScheduleError
from shardproof.core.base.findings import Location
from shardproof.core.commands.cli import main
from shardproof.core.commands.github import annotation, error_annotations, line_of, location_of_key
from shardproof.core.imports.given import Reading
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.toml import read_values
from shardproof.core.schedule.csv import rows_from_csv

PLAN = """
[model]
preset = "gpt3-175b"

[cluster]
preset = "dgx-a100-80g"
num_devices = 64

[layout]
tp = 1
pp = 8
dp = 8

[batch]
global = 64
micro = 1
sequence = 2048
"""


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """Level, properties and text as the runner reads them (actions/toolkit, `issueCommand`, the other way round)."""
    found = re.fullmatch(r"::(\w+) ([^\n]*?)::([^\n]*)", line)
    assert found is not None, line
    level, properties, text = found.groups()

    def plain(value: str) -> str:
        for code, letter in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            value = value.replace(code, letter)
        return value

    return (
        level,
        {name: plain(value) for name, _, value in (each.partition("=") for each in properties.split(","))},
        plain(text),
    )


def test_any_text_comes_back_from_one_line() -> None:
    finding = Finding("a-rule", "error", "rank 3, 1F4", "100% wrong,\r\n::error::of 50%25", "Look: here, there.")
    level, properties, text = parsed(annotation(finding, Location("a,b:c%.toml", 7)))
    assert level == "error" and properties == {"file": "a,b:c%.toml", "line": "7", "title": "shardproof: a-rule"}
    assert text == f"{finding.where}: {finding.what}\n{finding.hint}"


@pytest.mark.parametrize(("severity", "level"), [("error", "error"), ("warning", "warning"), ("info", "notice")])
def test_severities_are_the_levels_of_github(severity: str, level: str) -> None:
    assert parsed(annotation(Finding("rule", severity, "here", "this.")))[0] == level  # type: ignore[arg-type]


def test_files_are_named_from_the_root_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training").mkdir()
    monkeypatch.chdir(tmp_path / "training")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    finding = Finding("rule", "error", "here", "this.")
    assert parsed(annotation(finding, Location("plan.toml", 1)))[1]["file"] == "training/plan.toml"
    assert parsed(annotation(finding, Location("/elsewhere/plan.toml")))[1]["file"] == "/elsewhere/plan.toml"


def test_every_problem_of_an_input_is_at_its_line() -> None:
    odd = Problem("tp=5 is odd.", "layout.tp", Location("a/plan.toml", 12), origin="a/plan.toml:12")
    problems = list(error_annotations("fit", PlanError([odd, "which model? Give PLAN."])))
    assert [parsed(line)[1] for line in problems] == [
        {"file": "a/plan.toml", "line": "12", "title": "shardproof fit"},
        {"title": "shardproof fit"},
    ]
    assert parsed(problems[0])[2] == "a/plan.toml:12: tp=5 is odd."
    with pytest.raises(ScheduleError) as caught:
        rows_from_csv("0F0\n1F0\n2F0,2B0,,0Z1\n3F0,?\n", "s.csv")
    cells = [parsed(line) for line in error_annotations("verify", caught.value)]
    assert [properties for _, properties, _ in cells] == [
        {"file": "s.csv", "line": line, "title": "shardproof verify"} for line in ("3", "4")
    ]
    assert cells[0][2] == "s.csv: line 3 (rank 2), cell 4: '0Z1' is not an action."


def test_a_problem_is_the_text_that_is_printed_and_comes_whole_from_another_process() -> None:
    at = Problem("tp=5 is odd.", "layout.tp", Location("plan.toml", 12), origin="plan.toml:12")
    error = pickle.loads(pickle.dumps(PlanError([at, "another."])))
    first, second = error.problems
    assert str(error) == "plan.toml:12: tp=5 is odd.\nanother." and first == "plan.toml:12: tp=5 is odd."
    assert (first.sentence, first.key, first.place) == (at.sentence, at.key, at.place)
    assert (second.key, second.place, second.origin) == (None, Location(), "")
    assert at.of('module "a"') == 'plan.toml:12: module "a": tp=5 is odd.' and at.of("a").place == at.place


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (PLAN.replace("tp = 1", "tp = 0"), [("layout.tp", 10)]),
        (
            PLAN.replace("tp = 1", "zero = 4\nvpp = 2\npp = 1").replace("pp = 8\n", ""),
            [("layout.zero", 10), ("layout.vpp", 11)],
        ),
        (PLAN.replace("dp = 8", "dp = 8\nep = 5"), [("layout.ep", 13)]),
        (PLAN.replace("num_devices = 64", "num_devices = 63"), [("cluster.num_devices", 7)] * 2),
        (PLAN.replace("tp = 1", "tp = = 1"), [(None, 10)]),
        (f"tp = 2\n{PLAN}", [(None, 1)]),
    ],
)
def test_problems_of_a_plan_have_the_key_and_the_line_that_they_are_about(
    text: str, places: list[tuple[str | None, int]]
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text, "plan.toml")
    found = [(each.key, each.place) for each in caught.value.problems]
    assert found == [(key, Location("plan.toml", line)) for key, line in places]
    assert all(each == f"plan.toml:{each.place.line}: {each.sentence}" for each in caught.value.problems)


def test_problems_of_nouns_have_the_keys_of_their_fields() -> None:
    with pytest.raises(PlanError) as caught:
        replace(model_preset("gpt3-175b"), num_layers=0, num_kv_heads=5)
    assert [each.key for each in caught.value.problems] == ["model.num_layers", "model.num_kv_heads"]
    with pytest.raises(PlanError) as caught:
        Layout(tp=2**30)
    assert [each.key for each in caught.value.problems] == ["layout.tp"]


def test_a_degree_of_1_is_passed_over_and_a_section_stands_for_its_keys() -> None:
    values = read_values(PLAN, "plan.toml")
    assert line_of(values, ("layout.tp", "layout.dp")) == 12
    assert line_of(values, ("cluster.file", "cluster.preset")) == 6
    assert line_of(values, ("batch.nothing",)) == 15
    assert line_of(values, ("numerics.mode",)) is None


def test_fit_and_bad_input_name_the_lines_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN)
    assert main(["fit", "plan.toml", "--format", "github"]) == 1
    *text, line = capsys.readouterr().out.splitlines()
    level, properties, message = parsed(line)
    assert (level, properties["file"], properties["line"], properties["title"]) == (
        "error",
        "plan.toml",
        "6",
        "shardproof: out-of-memory",
    )
    assert "GiB" in message and any("does not fit" in each for each in text)
    Path("plan.toml").write_text(PLAN.replace("pp = 8", "pp = 7"))
    assert main(["fit", "plan.toml", "--format", "github"]) == 2
    captured = capsys.readouterr()
    assert [parsed(line)[1]["line"] for line in captured.out.splitlines()] == ["7", "11"]  # num_devices, pp
    assert captured.err.startswith("shardproof fit: plan.toml:7: ")


def test_a_script_is_read_for_its_lines_as_it_was_read_for_its_plan(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "TP=$1\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --seq-length 512 \\\n"
        "    --num-attention-heads 8 --micro-batch-size 1 --bf16 \\\n    --tensor-model-parallel-size $TP\n"
    )
    asked = location_of_key(str(script), "layout.tp", Reading("megatron", {"1": "2"}))
    assert asked == Location(str(script), 4) != location_of_key(str(script), "layout.tp")
    with pytest.raises(PlanError, match="a table of settings"):
        location_of_key(str(script), "layout.tp", Reading("accelerate"))
