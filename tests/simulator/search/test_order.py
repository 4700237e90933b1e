"""`search_order` and `simulate --search-schedule`: what is found is right, fits, and is simulated as it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof import Plan
from shardproof.core.commands.cli import main
from shardproof.core.schedule.schedule import read_csv
from shardproof.simulator.search.order import search_order

INTERLEAVED = [
    *("--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "16", "--zero", "1"),
    *("--tp", "2", "--pp", "4", "--vpp", "2", "--global-batch", "64"),
]


def test_an_order_found_is_faster_fits_and_is_simulated_as_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "found.csv")
    assert main(["simulate", *INTERLEAVED, "--search-schedule", file, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["schedule_search"]
    assert found["found"] and found["file"] == file
    assert found["step_time_s"] < found["step_time_before_s"] == report["step_time_s"]
    assert found["lower_bound_s"] <= found["passes_s"] < found["best_named_s"]
    assert found["peak_memory_bytes"] <= report["capacity_bytes"]
    assert main(["simulate", *INTERLEAVED, "--schedule", file, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [again[key] for key in ("step_time_s", "peak_memory_bytes")] == [
        found[key] for key in ("step_time_s", "peak_memory_bytes")
    ]
    assert main(["verify", *INTERLEAVED, "--schedule", file]) == 0
    assert main(["simulate", *INTERLEAVED, "--search-schedule", file]) == 0
    assert "search for a faster order of actions:" in capsys.readouterr().out


def test_where_nothing_faster_fits_the_plans_own_order_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*INTERLEAVED[:8], "--tp", "8", "--pp", "1", "--global-batch", "6"]
    file = str(tmp_path / "found.csv")
    assert main(["simulate", *options, "--search-schedule", file]) == 0
    assert "nothing faster fits" in capsys.readouterr().out
    assert read_csv(file).to_csv() == "0F0,0B0,0F1,0B1,0F2,0B2\n"


@pytest.mark.parametrize(
    ("name", "share", "is_found"),
    [("1F1B", 0.75, True), ("1F1B", 0.9, True), ("1F1B", 1.0, True), ("ZBH1", 0.75, True), ("ZBH1", 1.0, False)],
)
def test_an_order_found_fits_and_is_faster_than_one_that_does(name: str, share: float, is_found: bool) -> None:
    """W needs more after I than the forward kept in these layers, which the first search does not count."""
    plan = Plan.from_toml(
        "[model]\npreset = 'llama3-8b'\n[cluster]\npreset = 'dgx-h100'\nnum_devices = 4\n"
        f"device_memory_bytes = {int(80e9 * share)}\n[layout]\npp = 4\n"
        f"[batch]\nglobal = 16\nmicro = 1\nsequence = 4096\n[schedule]\nname = '{name}'\n"
    )
    found = search_order(plan)
    before, after = found.before.report, found.after.report
    assert found.is_found == is_found
    assert not is_found or after["peak_memory_bytes"] <= after["capacity_bytes"]
    assert after["step_time_s"] <= before["step_time_s"] or before["peak_memory_bytes"] > before["capacity_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "schedule.max_active_stages=2", "--zero", "3"], "without UNSHARD"),
        (["--search-schedule", "order.txt"], "end the name in .csv"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.csv"
    assert main(["simulate", *INTERLEAVED, "--search-schedule", str(file), *options]) == 2
    assert message in capsys.readouterr().err
    assert not file.exists()
