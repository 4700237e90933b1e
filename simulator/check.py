"""The verb `check`: what somebody asks before a run is started. Every setting accounted for, memory with its margin,
the schedule's verdict, the step with the interval that measured runs support, and what would be better."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..core.base.files import check_place
from ..core.base.findings import Finding, Where, has_errors
from ..core.base.terminal import Row, table
from ..core.base.units import format_bytes, format_s
from ..core.commands.commands import Command, service
from ..core.commands.github import annotation, location_of_key
from ..core.commands.options import add_output, add_plan, asked_reading, check_output, emit, read_with_account
from ..core.imports.account import STATUSES, Imported
from ..core.plan.plan import AnyPlan, Plan
from .search.fit import Fit, fit
from .search.neighbours import better_plans
from .simulation.interval import interval_of
from .simulation.simulate import simulate
from .titles import title_of

NOT_MODELLED = "not-modelled"
"""The finding of a setting that changes bits, time or memory and has no key."""

CLOSE = 0.03
"""Share of a device's usable memory; a plan with less than this to spare may not fit after all: the middle of published
peaks is predicted to 2% (docs/validation.md)."""

CLOSE_TO_LIMIT = "memory-margin"
"""The finding of a plan that fits with less to spare."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the plan's options, those of the output, and the picture."""
    add_plan(parser)
    add_output(parser, findings=True)
    parser.add_argument("--picture", metavar="FILE", help="also draw the predicted step, as .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Prints the verdict. Exit code 0, or 1 where something is wrong; settings that no plan can take end with 2."""
    check_output(args.output)
    if args.picture is not None:
        check_place(args.picture)
    plan, imported = read_with_account(args)
    fitting, simulation = fit(plan), simulate(plan)
    step_s = float(simulation.report["step_time_s"])
    interval = interval_of(plan).report(step_s)
    better = [each.report() for each in better_plans(plan, step_s)] if isinstance(plan, Plan) else []
    findings = [*fitting.findings, *_close(fitting), *service("check_plan")(plan), *_not_modelled(imported)]
    if args.picture is not None:
        service("draw")(simulation.timeline, args.picture)
    report = {
        "ok": not has_errors(findings),
        "findings": [each.to_dict() for each in findings],
        "import": None if imported is None else {**imported.report(), "plan": plan.to_toml()},
        "fit": {**fitting.report, "remedies": fitting.remedies},
        "simulate": {**simulation.report, "step_time_interval_s": interval},
        "better": better,
    }
    emit(args, partial(check_text, plan, imported, findings, report), report)
    if args.format == "github":
        for finding in findings:
            print(annotation(finding, location_of_key(args.plan, finding.key, asked_reading(args))))
    return 0 if report["ok"] else 1


def _close(fitting: Fit) -> Iterable[Finding]:
    """What there is to say of a plan that fits by little."""
    report = fitting.report
    margin = report["capacity_bytes"] - report["peak_memory_bytes"]
    if fitting.fits and margin < CLOSE * report["capacity_bytes"]:
        what = (
            f"it fits with {format_bytes(margin)} to spare, {margin / report['capacity_bytes']:.1%} of what is usable: "
            "less than predictions of memory are off."
        )
        hint = "Choose --headroom, and see what `shardproof fit` suggests."
        place = Where(report["peak_memory_rank"], report["peak_memory_action"] or None)
        yield Finding.at(CLOSE_TO_LIMIT, "warning", place, what, hint, key="cluster.device_memory_bytes")


def _not_modelled(imported: Imported | None) -> Iterable[Finding]:
    """A finding for every setting that changes the run and is not modelled."""
    for each in () if imported is None else imported.of_status("not-modelled"):
        where = Where(words=f"{imported.source}:{each.line}" if imported is not None else "")
        yield Finding.at(NOT_MODELLED, "warning", where, f"{each.flag} {each.value}".strip() + f": {each.why}")


def check_text(
    plan: AnyPlan,
    imported: Imported | None,
    findings: Sequence[Finding],
    report: Mapping[str, Any],
    width: int | None = None,
) -> str:
    """The verdict for people."""
    return "\n".join(
        [
            title_of(plan, plan.num_parameters),
            "",
            *table([*_settings_rows(imported), *_verdict_rows(report, findings)], width),
            *(["", *map(str, findings)] if findings else []),
            *_better_lines(report, width),
            *(["", *imported.assumed] if imported is not None and imported.assumed else []),
        ]
    )


def _settings_rows(imported: Imported | None) -> list[Row]:
    """How many settings were read, and what became of them."""
    if imported is None:
        return []
    count = Counter(each.status for each in imported.settings)
    named = ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status])
    version = f" {imported.version}" if imported.version else ""
    return [("settings", f"{imported.format}{version}: all {len(imported.settings)} accounted for, {named}")]


def _verdict_rows(report: Mapping[str, Any], findings: Iterable[Finding]) -> list[Row]:
    """Memory, schedule and step, a line each."""
    fitting, simulated = report["fit"], report["simulate"]
    peak, capacity = fitting["peak_memory_bytes"], fitting["capacity_bytes"]
    side = "to spare" if fitting["fits"] else "too much"
    left = f"{format_bytes(abs(capacity - peak))} ({abs(1 - peak / capacity):.1%}) {side}"
    memory = f"{format_bytes(peak)} of {format_bytes(capacity)} on rank {fitting['peak_memory_rank']}, {left}"
    wrong = sum(each.severity == "error" for each in findings) - (not fitting["fits"])
    interval = simulated["step_time_interval_s"]
    step = (
        f"{format_s(simulated['step_time_s'])}; measured runs say {format_s(interval['low'])} to "
        f"{format_s(interval['high'])} ({interval['share']:.0%} of {interval['settings']} settings: {interval['of']})"
    )
    return [
        ("memory", memory),
        ("schedule", "right" if not wrong else f"{wrong} findings"),
        ("step", step),
        ("MFU", f"{simulated['mfu']:.1%}, bubble {simulated['bubble_fraction']:.1%}"),
    ]


def _better_lines(report: Mapping[str, Any], width: int | None) -> list[str]:
    """What would be faster and fits, and what would make it fit."""
    rows: list[Row] = [("step", "", "peak", "--set")]
    now = report["simulate"]["step_time_s"]
    for each in report["better"]:
        gain = f"{each['step_time_s'] / now - 1:+.1%}"
        settings = " ".join(each["set"])
        rows.append((format_s(each["step_time_s"]), gain, format_bytes(each["peak_memory_bytes"]), settings))
    lines = ["", "better, each simulated, with --set:", *table(rows, width)] if report["better"] else []
    if not report["fit"]["fits"] and (remedies := report["fit"]["remedies"]):
        lines += ["", "it fits with one of these:", *(f"  {' '.join(each['set'])}" for each in remedies)]
    return lines


CHECK = Command(
    "check", "shardproof check pretrain.sh --devices 64 --cluster dgx-h100 --picture step.svg", configure, run
)
