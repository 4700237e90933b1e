"""Files that shardproof wrote in November 2026 are read today (tests/data/files_of_2026_11, whose README
says what wrote them)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.paths import DATA
from shardproof import Schedule, check
from shardproof.core.commands.cli import main

FILES = DATA / "files_of_2026_11"
LOSSES = json.loads((FILES / "losses.json").read_text())["losses"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "files"
    shutil.copytree(FILES, copy)
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.parametrize("layout", [["pp=2", "tp=1"], ["pp=1", "tp=2"]], ids=str)
def test_a_checkpoint_goes_on_to_the_loss_of_the_undisturbed_run(folder: Path, layout: list[str], capsys) -> None:
    options = [word for each in layout for word in ("--set", f"layout.{each}")]
    assert main(["train", "plan.toml", "--resume", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == pytest.approx(LOSSES[2:], rel=1e-6)


def test_a_ledger_is_read_and_compared(folder: Path, capsys) -> None:
    assert main(["verify", "run.ledger", "--against", "run.ledger", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors_compared"] > 100
    (rank,) = folder.glob("run.ledger/rank-1.*")
    lines = rank.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines) if '"loss"' in line][:1]
    shutil.copytree("run.ledger", "other.ledger")
    (folder / "other.ledger" / rank.name).write_text("\n".join(lines[:number] + lines[number + 1 :]) + "\n")
    assert main(["verify", "other.ledger", "--against", "run.ledger"]) == 1


def test_a_recorded_step_is_drawn_and_stands_in_for_prices(folder: Path, capsys) -> None:
    assert main(["draw", "run.timeline.json"]) == 0
    capsys.readouterr()
    assert main(["simulate", "plan.toml", "--durations", "run.timeline.json", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["step_time_s"] < 60


def test_a_cluster_file_of_calibrate_prices_a_plan(folder: Path, capsys) -> None:
    assert main(["simulate", "plan.toml", "--cluster", "cluster.toml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["provenance"] and 0 < report["step_time_s"] < 60


def test_a_schedule_is_read_and_right(folder: Path) -> None:
    schedule = Schedule.from_csv((folder / "schedule.csv").read_text())
    assert check(schedule) == [] and (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 4, 4)
