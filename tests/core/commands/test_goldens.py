"""What every verb prints today: `--help` at 80 columns, and `--json`. Moving or renaming code changes neither.

`python -m pytest tests/core/commands/test_goldens.py --write-goldens` writes them anew; look at the
difference before you commit it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardproof
from shardproof.core.commands.cli import main
from shardproof.core.commands.commands import QUESTIONS

ROOT = Path(shardproof.__file__).parent
GOLDEN = ROOT / "tests" / "data" / "golden"
MEASURED = {
    *("elapsed_s", "tokens_per_s", "processor_s", "environment", "machine", "versions"),
    *("fingerprint", "used"),  # bits and roundings of the library's products, others on another processor
}
"""Keys of what was measured, or of the machine, dropped where a real run is behind them."""

TINY = "examples/tiny_tp2_pp2_dp2.toml"
SMALL_RUN = [
    "--set",
    "train.steps=1",
    "--set",
    "batch.global=2",
    "--set",
    "layout.dp=1",
    "--set",
    "layout.tp=1",
    "--set",
    "cluster.num_devices=2",
]
JSON: dict[str, list[str]] = {
    "presets-one": ["presets", "llama3-8b"],
    "simulate": ["simulate", "examples/llama70b_512.toml"],
    "simulate-modules": ["simulate", "examples/encoder_decoder.toml", "--set", "cluster.preset=dgx-h100"],
    "simulate-sensitivity": ["simulate", TINY, "--set", "cluster.preset=dgx-h100", "--sensitivity"],
    "fit": ["fit", "examples/llama70b_512.toml"],
    "fit-not": ["fit", "--model", "llama3-70b", "--cluster", "dgx-h100", "--devices", "8"],
    "plan": [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--global-batch",
        "16",
        "--sequence",
        "4096",
    ],
    "draw": ["draw", TINY, "--set", "cluster.preset=dgx-h100"],
    "verify": ["verify", "examples/llama70b_512.toml"],
    "verify-list": ["verify", "--list"],
    "verify-dynamic": ["verify", TINY, *SMALL_RUN, "--dynamic"],
    "train": ["train", TINY, *SMALL_RUN],
    "train-dry-run": ["train", TINY, "--dry-run"],
}
RUNS = {"verify-dynamic", "train", "train-dry-run"}
"""Runs on real processes: their numbers belong to this kind of machine, so four digits are compared."""


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


def compared(path: Path, text: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-goldens"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; --write-goldens writes it anew"


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("verb", ["", *QUESTIONS])
def test_help_is_that_of_the_golden(
    verb: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    try:
        assert main([verb, "--help"] if verb else ["--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    compared(GOLDEN / f"help-{verb or 'all'}.txt", capsys.readouterr().out, request)


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("name", JSON)
def test_json_is_that_of_the_golden(
    name: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    code = main([*JSON[name], "--json"])
    found = without_measured(json.loads(capsys.readouterr().out), rounded=name in RUNS)
    compared(GOLDEN / f"{name}.json", json.dumps({"exit_code": code, "json": found}, indent=1) + "\n", request)


def without_measured(value: Any, *, rounded: bool) -> Any:
    if isinstance(value, dict):
        return {key: without_measured(each, rounded=rounded) for key, each in value.items() if key not in MEASURED}
    if isinstance(value, list):
        return [without_measured(each, rounded=rounded) for each in value]
    return float(f"{value:.4g}") if rounded and isinstance(value, float) else value
