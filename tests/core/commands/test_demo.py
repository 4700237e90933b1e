"""The demo, at its `--quick` size, does everything it says and leaves what it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.paths import EXAMPLES
from shardproof import check, lower
from shardproof.core.commands.cli import main
from shardproof.core.commands.demo import PAGE, PLANS, print_step
from shardproof.core.plan.plan import ModularPlan, Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.verify.schedule.joined import examine_joined

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("demo") / "made" / "here"
    assert main(["demo", "--quick", "-o", str(target)]) == 0
    return target


def test_quick_demo_leaves_a_report_and_every_file_that_it_links(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    names = {part.split(")")[0] for part in text.split("](")[1:]}
    assert {
        "llama70b_512.svg",
        "llama70b_512.png",
        "predicted_and_measured.svg",
        "predicted_and_measured.png",
        PAGE,
        *PLANS.values(),
    } <= names
    assert all((folder / name).stat().st_size > 0 for name in names)
    page = (folder / PAGE).read_text()
    assert page.startswith("<!DOCTYPE html>") and "<title>llama3-70b on 512 devices" in page
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "no temporary file is left"


def test_quick_demo_proves_0_different_bits_and_learns(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    assert report["ok"] and report["proof"]["bits_different"] == 0 and report["proof"]["world_size"] == 8
    training = report["training"]
    assert training["world_size"] == 4 and training["losses"][0] > 5
    assert (
        sum(training["losses"][-10:]) / 10 < 3.3
        and training["validation_losses"][-1] < training["validation_losses"][0] - 1.5
    )
    assert report["simulation"]["num_devices"] == 512 and 0.3 < report["simulation"]["mfu"] < 0.6
    assert report["comparison"]["same_order"]


@pytest.mark.parametrize("path", sorted((EXAMPLES).glob("*.toml")), ids=lambda path: path.name)
def test_every_example_plan_is_read_and_its_schedule_is_right(path: Path) -> None:
    plan = Plan.from_toml(path.read_text(), path.name)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert (
        examine_joined(plan).findings == () if isinstance(plan, ModularPlan) else check(lower(schedule_for(plan))) == []
    )


def test_the_first_step_the_eighths_and_validations_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Result:
        def __init__(self, step: int, validation_loss: float | None):
            self.step, self.loss, self.validation_loss = step, 2.5, validation_loss

    for step in range(16):
        print_step(16, False, Result(step, 3.0 if step == 2 else None))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, 2, 3, 4, 6, 8, 10, 12, 14, 16]
    assert lines[2].endswith("validation 3.000")


def test_a_folder_that_is_a_file_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert main(["demo", "-o", str(tmp_path / "taken")]) == 2
    assert "taken" in capsys.readouterr().err


def test_without_torch_it_says_so_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo", "-o", str(tmp_path / "demo")]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == "" and "`pip install 'shardproof[train]'`" in captured.err and not (tmp_path / "demo").exists()
    )
