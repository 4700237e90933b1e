"""The suite for a machine with a GPU: what it repeats, keeps and writes, on checks whose results are given."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardproof.benchmarks import gpu_suite
from shardproof.core.base.errors import PlanError
from shardproof.verify.doctor.checks import Check, Result
from shardproof.verify.doctor.machine import Machine
from shardproof.verify.doctor.report import Report

CHECKS = (Check("bits", "", "", limit_s=0.01), Check("gpu-step", "", "", limit_s=0.01, on_gpu=True))


def test_a_check_of_gpus_that_failed_once_stays_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(check: Check, machine: Machine) -> Result:
        ran.append(check.name)
        time.sleep(0.005)
        return Result("failed" if len(ran) == 3 else "ok")

    monkeypatch.setattr(gpu_suite, "run_check", run)
    written: list[Report] = []
    machine = Machine(gpus=("a GPU",))
    report, rounds = gpu_suite.repeated(machine, CHECKS, time.monotonic() + 0.2, written.append)
    assert ran.count("bits") == 1 and ran.count("gpu-step") == rounds > 3
    assert not report.ok and report.results["gpu-step"].status == "failed" and report.results["bits"].status == "ok"
    assert len(written) == len(ran) and written[0].results.keys() == {"bits"}


def test_without_a_gpu_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "this_machine", lambda: Machine(why_no_gpu="no NVIDIA driver answers"))
    with pytest.raises(PlanError, match="no CUDA device: no NVIDIA driver answers"):
        gpu_suite.suite(str(tmp_path / "report.json"), 1)
    assert not list(tmp_path.iterdir())


def test_what_needs_no_gpu_is_not_begun_where_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "run_check", lambda check, machine: Result("ok"))
    long = (Check("kernels", "", "", limit_s=600), Check("train", "", "", limit_s=600))
    report, _ = gpu_suite.repeated(Machine(gpus=("a GPU",)), long, time.monotonic() + 1, lambda report: None)
    assert report.results["kernels"] == Result("skipped", "no time is left")
    assert report.results["train"].status == "ok"


def test_the_suite_begins_with_what_needs_a_gpu() -> None:
    names = [check.name for check in gpu_suite.ordered()]
    assert names.index("gpu-step") < names.index("train") < names.index("kernels") and len(set(names)) == len(names)
