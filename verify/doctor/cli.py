"""`shardproof doctor`: what runs on this machine, as a table and as a report to send."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core.base.errors import PlanError, UnknownNameError
from ...core.base.terminal import say
from ...core.commands.commands import Command
from ...core.commands.options import add_output, check_output, emit
from .catalog import CHECKS
from .checks import Check, run_check
from .machine import Machine, this_machine
from .report import Report, read_report


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("report", nargs="?", metavar="REPORT", help="print a report that was written with -o, and stop")
    parser.add_argument("--gpus", action="store_true", help="check the GPUs too; without any the exit code is 2")
    parser.add_argument(
        "--small", action="store_true", help="with --gpus: sizes that are soon done, to see that every check ends"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this check alone (repeatable), such as bits or gpu-capture"
    )
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when no check has failed, 1 when one has; bad input, and --gpus without a GPU, end with 2."""
    check_output(args.output)
    if args.report is not None:
        if args.gpus or args.only or args.small:
            raise PlanError("a REPORT is only printed. Leave out --gpus, --small and --only, or REPORT.")
        report = read_report(args.report)
        emit(args, report.text, report.to_json())
        return 0 if report.ok else 1
    if args.small and not args.gpus:
        raise PlanError("--small is of checks of GPUs. Add --gpus.")
    checks = asked(args.only, args.gpus)
    machine = replace(this_machine(), is_small=args.small)
    lacking = args.gpus and not machine.gpus
    report = examine(
        machine,
        [check for check in checks if check.on_gpu] if lacking else checks,  # nothing of what was asked for is here
        gpus=args.gpus,
        progress=_progress,
    )
    emit(args, report.text, report.to_json())
    if lacking:
        raise PlanError(
            f"--gpus: no CUDA device: {machine.why_no_gpu}. Run it on a machine with a GPU and a torch built for CUDA, "
            "or leave out --gpus to check the rest."
        )
    return 0 if report.ok else 1


def asked(only: Sequence[str] | None, gpus: bool) -> list[Check]:
    """The checks to run. Raises `UnknownNameError` for a name that there is not, `PlanError` for one of GPUs
    without --gpus, and for --gpus without one."""
    known = {check.name: check for check in CHECKS}
    for name in only or ():
        if name not in known:
            raise UnknownNameError("check", name, known)
        if known[name].on_gpu and not gpus:
            raise PlanError(f"{name} checks GPUs. Add --gpus.")
    if gpus and only and not any(known[name].on_gpu for name in only):
        raise PlanError(f"no GPU is needed for {', '.join(only)}. Leave out --gpus.")
    return [check for check in CHECKS if (gpus or not check.on_gpu) and (only is None or check.name in only)]


def examine(
    machine: Machine, checks: Sequence[Check], *, gpus: bool, progress: Callable[[str], None] = lambda line: None
) -> Report:
    """Runs `checks` one after the other."""
    results = {}
    for number, check in enumerate(checks, start=1):
        progress(f"{number}/{len(checks)} {check.name}: {check.what}")
        results[check.name] = run_check(check, machine)
    return Report(str(machine), machine.versions, results, gpus)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        say(line, sys.stderr)


DOCTOR = Command("doctor", "shardproof doctor -o report.json", configure, run)
