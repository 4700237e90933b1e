"""Annotations of GitHub Actions: the form of the lines, and the lines of plans that they name."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from shardproof import Finding
from shardproof.core.base.errors import PlanError, ScheduleError
from shardproof.core.base.findings import Location
from shardproof.core.commands import github
from shardproof.core.commands.cli import main
from shardproof.core.commands.github import annotation, error_annotations, line_of
from shardproof.core.plan.toml import read_values

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
    problems = list(error_annotations("fit", PlanError(["a/plan.toml:12: tp=5 is odd.", "which model? Give PLAN."])))
    assert [parsed(line)[1] for line in problems] == [
        {"file": "a/plan.toml", "line": "12", "title": "shardproof fit"},
        {"title": "shardproof fit"},
    ]
    (cell,) = error_annotations("verify", ScheduleError("s.csv: line 3 (rank 2), cell 4: '0Z1' is not an action."))
    assert parsed(cell)[1] == {"file": "s.csv", "line": "3", "title": "shardproof verify"}


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


def test_docstrings() -> None:
    assert doctest.testmod(github).failed == 0
