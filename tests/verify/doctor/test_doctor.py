"""The doctor: checks chosen from descriptions of machines, checks that crash or hang, and reports read back."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.core.base.errors import FileError, PlanError, UnknownNameError
from shardproof.core.commands.cli import exit_code
from shardproof.verify.doctor import cli, compiled, kernels, transports
from shardproof.verify.doctor.catalog import CHECKS
from shardproof.verify.doctor.checks import Check, Result, Table, run_check
from shardproof.verify.doctor.machine import Machine, linked
from shardproof.verify.doctor.report import Report, read_report

VERSIONS = {"shardproof": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
CPU = Machine("a CPU", 2, versions=VERSIONS, why_no_gpu="torch 2.11.0 is built without CUDA")
ONE = Machine("a CPU", 16, versions=VERSIONS, gpus=("NVIDIA H200",))
PAIRS = tuple((one, other) for one in range(8) for other in range(one + 1, 8))
LINKED = replace(ONE, gpus=("NVIDIA H100",) * 8, links=PAIRS)
ALONE = {"gpu-products", "gpu-exact-products", "gpu-graphs", "gpu-product-choice"}
MEETING = {"gpu-kernels", "gpu-barriers", "gpu-capture", "gpu-all-reduce"}
MACHINES = {
    "CPU only": (CPU, set()),
    "one GPU": (ONE, ALONE | MEETING),
    "8 GPUs, NVLink": (LINKED, ALONE | MEETING | {"gpu-step"}),
    "8 GPUs without it": (replace(LINKED, links=()), ALONE | {"gpu-step"}),
    "NVLink in pairs": (replace(LINKED, links=((0, 1), (2, 3))), ALONE | {"gpu-step"}),
}

SWITCHED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNODE\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tNODE\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     SYS     SYS     0-15            0
GPU1    NV4      X      SYS     PHB     0-15            0
GPU2    SYS     SYS      X      NV4     16-31           1
GPU3    SYS     PHB     NV4      X      16-31           1
"""


@pytest.mark.parametrize("name", MACHINES)
def test_the_checks_of_gpus_that_a_machine_can_run(name: str) -> None:
    here, runs = MACHINES[name]
    assert {check.name for check in CHECKS if check.on_gpu and not check.needs(here)} == runs


def test_every_check_without_something_to_look_at_says_what_is_missing() -> None:
    why = {check.name: check.needs(CPU) for check in CHECKS if check.on_gpu}
    assert set(why.values()) == {"no CUDA device: torch 2.11.0 is built without CUDA"}
    assert "torch is not installed" in next(c for c in CHECKS if c.name == "exact-sums").needs(Machine())


@pytest.mark.parametrize(
    ("text", "pairs"), [(SWITCHED, ((0, 1), (0, 2), (1, 2))), (BRIDGED, ((0, 1), (2, 3))), ("", ()), ("no GPU0", ())]
)
def test_the_links_of_a_topology(text: str, pairs: tuple[tuple[int, int], ...]) -> None:
    assert linked(text) == pairs


def test_a_machine_is_named_in_a_line() -> None:
    assert str(replace(LINKED, multicast=True)) == "8 x NVIDIA H100, multicast, a CPU, 16 cores"
    assert str(replace(ONE, num_hosts=2)) == "2 hosts, 1 x NVIDIA H200, a CPU, 16 cores"
    assert str(CPU) == "CPU only, a CPU, 2 cores"


def test_functions_of_all_checks_exist_and_names_are_unique() -> None:
    for check in CHECKS:
        module, name = check.function.split(":")
        assert callable(getattr(importlib.import_module(f"shardproof.verify.doctor.{module}"), name))
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_a_check_that_raises_has_failed_with_its_reason() -> None:
    result = run_check(Check("sick", "", "machine:absent"), CPU)
    assert result.status == "failed"
    assert "AttributeError" in result.why and "absent" in result.why


def test_a_check_whose_process_ends_has_failed() -> None:
    assert run_check(Check("sick", "", "nothing"), CPU).why.startswith("ended with exit code 1: ")


def children() -> set[str]:
    """Processes of this one: those of other tests too, such as the server of ranks."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_a_check_that_is_late_has_failed_and_leaves_no_process() -> None:
    others = children()
    result = run_check(Check("slow", "", "transports:barriers", limit_s=0.3), CPU)
    assert (result.status, result.why) == ("failed", "not done within 0.3 s")
    assert children() <= others


def test_a_check_in_its_process_gives_its_figure() -> None:
    result = run_check(Check("digests", "", "compiled:digest"), CPU)
    assert result.status in ("ok", "skipped")
    assert result.unit == "GB/s" or result.why == compiled.NOT_BUILT


def test_wrong_digests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled.digests.compiled is None:
        pytest.skip("no compiled half")
    monkeypatch.setattr(compiled.digests, "digest", lambda values: (1, 2))
    assert compiled.digest(CPU).status == "failed"


def test_a_transport_with_a_wrong_bit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(job: Any, *, transport: str, **_: Any) -> list[Any]:
        found = [transports.awaited(rank, transports.NUM_RANKS) for rank in range(transports.NUM_RANKS)]
        if transport == "gloo":
            name, (low, high) = found[2][0]
            found[2][0] = name, (low ^ 1, high)
        return found

    monkeypatch.setattr(transports, "run_ranks", ranks)
    result = transports.bits(CPU)
    assert (result.status, result.value) == ("failed", 1)
    assert result.why == "other bits than numpy's: gloo, rank 2: all_gather of 1"


def test_all_transports_of_real_ranks_agree() -> None:
    assert transports.bits(CPU) == Result("ok", "memory, gloo, shm carry and add up the same", 0, "different results")


def a_report(status: Any = "ok", gpus: bool = False) -> Report:
    table = Table("two ranks", ("transport", "bytes"), (("shm", 4096), ("gloo", 0.5)))
    results = {"bits": Result(status, "as it is", 0, "bits"), "speed": Result("ok", "", 1.5, "us", (table,))}
    floors = Table("kernels", ("kernel", "floor", "result"), (("all_gather", "interpreted", "ok"),))
    results["kernels"] = Result("ok", "", 1, "kernels", (floors,))
    return Report("CPU only", VERSIONS, results, gpus)


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report().to_json()))
    assert read_report(str(path)) == a_report()
    assert "  shm        4,096" in a_report().text() and "3 ok." in a_report().text()


def test_ok_is_no_failed_check_and_a_gpu_where_one_was_asked_for() -> None:
    assert a_report().ok and not a_report("failed").ok and not a_report(gpus=True).ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"doctor": 2}, "it has version 2"),
        ({"more": 1}, "unknown key 'more'"),
        ({"ok": False}, "its checks say ok is true"),
        ({"checks": [{}]}, "is missing"),
        ({"checks": 3}, "3 is no list"),
        ({"device": None}, "None is no text"),
        ({"versions": {"torch": 2}}, "2 is no text"),
        ({"kernels": {}}, "kernels are not those"),
        ({"gpus": 0}, "gpus is neither"),
    ],
)
def test_another_file_is_no_report(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**a_report().to_json(), **change}))
    with pytest.raises(FileError, match=words):
        read_report(str(path))


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"doctor": NaN}', "import os"])
def test_text_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(FileError, match="no report of the doctor"):
        read_report(str(path))


def parsed(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    cli.configure(parser)
    return parser.parse_args(arguments)


def test_a_failed_check_is_exit_code_1_and_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "this_machine", lambda: CPU)
    monkeypatch.setattr(cli, "run_check", lambda check, machine: Result("failed", "because"))
    path = tmp_path / "report.json"
    assert cli.run(parsed("--only", "bits", "--json", "-o", str(path))) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text()) and printed["checks"][0]["why"] == "because"


def test_gpus_on_a_machine_without_is_exit_code_2_with_every_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "this_machine", lambda: CPU)
    assert exit_code("shardproof doctor", lambda: cli.run(parsed("--gpus", "--json"))) == 2
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert not report["ok"] and {check["status"] for check in report["checks"]} == {"skipped"}
    assert "--gpus: no CUDA device: torch 2.11.0 is built without CUDA." in err


def test_names_of_checks_are_known() -> None:
    with pytest.raises(UnknownNameError, match="bits"):
        cli.asked(["bit"], False)
    with pytest.raises(PlanError, match="Add --gpus"):
        cli.asked(["gpu-step"], False)
    with pytest.raises(PlanError, match="Leave out --gpus"):
        cli.asked(["bits"], True)


def test_a_kernel_that_falls_from_a_floor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"all_gather": {"interpreted": "ok", "assembled": "4 spills"}}
    monkeypatch.setattr(kernels, "kernel_floors", lambda: found)
    result = kernels.floors(CPU)
    assert (result.status, result.why) == ("failed", "all_gather: assembled: 4 spills")
    assert Report("CPU only", VERSIONS, {"kernels": result}).to_json()["kernels"] == found


def test_hosts_of_torchrun_receive_the_same(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "shardproof", "doctor", "--only", "hosts", "--json"]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "MASTER_PORT": str(port)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    reports = [json.loads(process.communicate(timeout=600)[0]) for process in started]
    for report in reports:
        assert report["ok"], report
        assert report["device"].startswith("2 hosts")
        assert [check["status"] for check in report["checks"]] == ["ok"]
