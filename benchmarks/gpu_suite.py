"""All checks of `shardproof doctor --gpus`, those of GPUs again and again until the time is over.

`python benchmarks/gpu_suite.py -o report.json [--minutes 9]`: one call of at most about ten minutes on a machine with
a GPU. The report is written after every check, so that a call that is cut off leaves what it has found; a check
that failed once stays failed. `shardproof doctor report.json` prints it. Exit codes are those of the doctor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from shardproof.core.base.errors import PlanError
from shardproof.core.base.files import write_text
from shardproof.core.commands.cli import exit_code
from shardproof.verify.doctor.catalog import CHECKS
from shardproof.verify.doctor.checks import Check, Result, run_check
from shardproof.verify.doctor.machine import Machine, this_machine
from shardproof.verify.doctor.report import Report


def repeated(
    machine: Machine, checks: Sequence[Check], end_s: float, write: Callable[[Report], None]
) -> tuple[Report, int]:
    """The report when `time.monotonic()` has passed `end_s` and every check has run once, and how many rounds of the
    checks of GPUs were finished. No check begins again that could end after it."""
    results: dict[str, Result] = {}
    rounds = 0
    while True:
        for check in checks:
            if rounds and (not check.on_gpu or check.needs(machine) or time.monotonic() + check.limit_s > end_s):
                continue
            found = run_check(check, machine)
            if check.name not in results or results[check.name].status != "failed":
                results[check.name] = found
            report = Report(str(machine), machine.versions, dict(results), asked_for_gpus=True)
            write(report)
        rounds += 1
        longest_s = max((check.limit_s for check in checks if check.on_gpu and not check.needs(machine)), default=0.0)
        if not longest_s or time.monotonic() + longest_s > end_s:
            return report, rounds


def suite(output: str, minutes: float) -> int:
    """Exit code 1 when a check has failed. Raises `PlanError` without a GPU."""
    machine = this_machine()
    if not machine.gpus:
        raise PlanError(f"no CUDA device: {machine.why_no_gpu}. `shardproof doctor` checks what needs none.")
    report, rounds = repeated(
        machine,
        CHECKS,
        time.monotonic() + 60 * minutes,
        lambda so_far: write_text(output, json.dumps(so_far.to_json(), indent=2, allow_nan=False) + "\n"),
    )
    print(f"{report.text()}\n{rounds} rounds of the checks of GPUs. Written: {output}")
    return 0 if report.ok else 1


def main() -> int:
    """Runs the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=9.0)
    args = parser.parse_args()
    return exit_code("gpu_suite", lambda: suite(args.output, args.minutes))


if __name__ == "__main__":
    sys.exit(main())
