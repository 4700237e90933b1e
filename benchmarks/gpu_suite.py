"""All checks of `shardproof doctor --gpus`, and training on one GPU, in one call of at most about ten minutes.

`python benchmarks/gpu_suite.py -o report.json [--minutes 9] [--small]`: first the checks of GPUs, then training
(`gpu_training.py`), then what needs no GPU, then the checks of GPUs again and again until the time is over. The report
is written after every check, so that a call that is cut off leaves what it has found; a check that failed once stays
failed. `shardproof doctor report.json` prints it. `--small` takes sizes that are soon done: whether the suite comes to
its end, on pretended CUDA too. Exit codes are those of the doctor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardproof.benchmarks.gpu_training import TRAINING
from shardproof.core.base.errors import PlanError
from shardproof.core.base.files import write_text
from shardproof.core.commands.cli import exit_code
from shardproof.verify.doctor.catalog import CHECKS
from shardproof.verify.doctor.checks import Check, Result, run_check
from shardproof.verify.doctor.machine import Machine, this_machine
from shardproof.verify.doctor.report import Report

OFFLINE = frozenset(check.name for check in CHECKS if not check.on_gpu)
"""Checks that say the same on a machine without a GPU."""


def ordered() -> list[Check]:
    """The checks of the suite, those first that need a GPU."""
    return [*(each for each in CHECKS if each.on_gpu), *TRAINING, *(each for each in CHECKS if not each.on_gpu)]


def repeated(
    machine: Machine, checks: Sequence[Check], end_s: float, write: Callable[[Report], None]
) -> tuple[Report, int]:
    """The report when `time.monotonic()` has passed `end_s` and every check had its turn, and how many rounds of the
    checks of GPUs were finished. No check begins again that could end after it, and none at all that needs no GPU."""
    results: dict[str, Result] = {}
    rounds = 0
    while True:
        for check in checks:
            if rounds and (not check.on_gpu or check.needs(machine) or time.monotonic() + check.limit_s > end_s):
                continue
            is_late = check.name in OFFLINE and time.monotonic() + check.limit_s > end_s
            found = Result("skipped", "no time is left") if is_late else run_check(check, machine)
            if check.name not in results or results[check.name].status != "failed":
                results[check.name] = found
            report = Report(str(machine), machine.versions, dict(results), asked_for_gpus=True)
            write(report)
        rounds += 1
        longest_s = max((check.limit_s for check in checks if check.on_gpu and not check.needs(machine)), default=0.0)
        if not longest_s or time.monotonic() + longest_s > end_s:
            return report, rounds


def suite(output: str, minutes: float, *, is_small: bool = False) -> int:
    """Exit code 1 when a check has failed. Raises `PlanError` without a GPU."""
    machine = replace(this_machine(), is_small=is_small)
    if not machine.gpus:
        raise PlanError(f"no CUDA device: {machine.why_no_gpu}. `shardproof doctor` checks what needs none.")
    report, rounds = repeated(
        machine,
        ordered(),
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
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    return exit_code("gpu_suite", lambda: suite(args.output, args.minutes, is_small=args.small))


if __name__ == "__main__":
    sys.exit(main())
