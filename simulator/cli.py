"""The verbs `simulate`, `fit` and `plan`: reports as tables, or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.commands import Command
from ..core.errors import PlanError
from ..core.options import add_output, add_plan, emit, read_plan, read_search_space
from ..core.plan import Plan
from ..core.plan_rules import RULES
from ..core.units import format_bytes, format_count, format_s
from .fit import fit
from .search import REASONS, SearchResult, search
from .simulate import simulate

_TIME_NAMES = {
    "compute": "computing",
    "recompute": "recomputing activations",
    "tp_comm": "tensor-parallel communication",
    "cp_comm": "context-parallel communication",
    "ep_comm": "expert-parallel communication",
    "pp_comm": "waiting for messages under way",
    "dp_comm": "data-parallel communication",
    "optimizer": "optimizer step",
    "bubble": "pipeline bubble",
    "other": "other",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a plan, and those of the output."""
    add_plan(parser)
    add_output(parser)


def run_simulate(args: argparse.Namespace) -> int:
    """Predicts one step. Exit code 0."""
    plan = read_plan(args)
    report = simulate(plan).report
    emit(args, simulate_text(plan, report), report)
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """Compares every rank's peak memory with the device's. Exit code 0 when all fit, else 1."""
    plan = read_plan(args)
    result = fit(plan)
    emit(args, fit_text(plan, result.report), result.report)
    return 0 if result.fits else 1


def run_plan(args: argparse.Namespace) -> int:
    """Ranks layouts; `-o plan.toml` writes the best. Exit code 1 when none fits, and then no plan is written."""
    space = read_search_space(args)
    result = search(space)
    if args.output is not None and args.output.endswith(".toml"):
        if not result.plans:
            raise PlanError(f"no layout fits, so {args.output} is not written. Reasons: {_reasons(result.report['rejected'])}.")
        _write_plan(args, result)
    title = f"{space.model.name} on {space.cluster.num_devices} x {space.cluster.name}"
    emit(args, plan_text(title, result.report), result.report)
    return 0 if result.plans else 1


def _write_plan(args: argparse.Namespace, result: SearchResult) -> None:
    """The best plan as TOML, whole or not at all; the report then goes to standard output only."""
    from ..core.options import write_text

    write_text(args.output, result.plans[0].to_toml())
    args.output = None


def simulate_text(plan: Plan, report: Mapping[str, Any]) -> str:
    """The report of `simulate` for people."""
    step_s = report["step_time_s"]
    shares = [(_TIME_NAMES[name], format_s(s), f"{s / step_s:6.1%}") for name, s in report["time_s"].items() if s]
    head = [
        ("step", format_s(step_s)),
        ("tokens per second", format_count(report["tokens_per_s"])),
        ("model FLOP/s per device", f"{format_count(report['model_flops_per_s_per_device'])}FLOP/s".replace(" BFLOP", " GFLOP").replace(" TFLOP", " TFLOP")),
        ("MFU", f"{report['mfu']:.1%} (causal {report['mfu_causal']:.1%}, hardware {report['hfu']:.1%})"),
        ("bubble", f"{report['bubble_fraction']:.1%} of the step on rank {report['bubble_rank']}"),
        ("peak memory", f"{format_bytes(report['peak_memory_bytes'])} of {format_bytes(plan.cluster.device_memory_bytes)} on rank {report['peak_memory_rank']}"),
    ]
    return "\n".join(
        [
            _title(plan, report["num_parameters"]),
            "",
            *_columns(head),
            "",
            f"where the step goes on rank {report['critical_rank']}, which finishes last:",
            *_columns(shares),
            "",
            "memory of that peak:",
            *_memory_lines(report["memory_bytes"]),
            "",
            f"Modelled with the numbers of {plan.cluster.name}; --json has the source of each under `provenance`.",
        ]
    )


def fit_text(plan: Plan, report: Mapping[str, Any]) -> str:
    """The report of `fit` for people."""
    peak, capacity = report["peak_memory_bytes"], report["capacity_bytes"]
    verdict = f"fits, {format_bytes(capacity - peak)} to spare" if report["fits"] else f"does not fit: {format_bytes(peak - capacity)} too much"
    names = list(report["memory_bytes"])
    rows = [("pp rank", "rank", "peak", *names)]
    for entry in report["per_rank"]:
        parts = (format_bytes(entry["memory_bytes"][name]) for name in names)
        rows.append((str(entry["pp_rank"]), str(entry["global_rank"]), format_bytes(entry["peak_memory_bytes"]), *parts))
    worst = f"worst rank {report['peak_memory_rank']}: {format_bytes(peak)} of {format_bytes(capacity)}"
    return "\n".join([_title(plan, plan.model.num_parameters), "", f"{worst}: {verdict}", "", *_columns(rows)])


def plan_text(title: str, report: Mapping[str, Any]) -> str:
    """The report of `plan` for people: the ranked table, then why the others lost."""
    rows = [("", "step", "MFU", "tp", "pp", "vpp", "dp", "sp", "zero", "micro", "recompute", "schedule", "peak memory")]
    for place, candidate in enumerate(report["candidates"], start=1):
        layout = candidate["layout"]
        degrees = (str(layout[name]) for name in ("tp", "pp", "vpp", "dp"))
        sequence = "yes" if layout["sequence_parallel"] else "no"
        choices = (sequence, str(layout["zero"]), str(candidate["batch"]["micro"]), candidate["recompute"], candidate["schedule"])
        peak = format_bytes(candidate["peak_memory_bytes"])
        rows.append((str(place), format_s(candidate["step_time_s"]), f"{candidate['mfu']:.1%}", *degrees, *choices, peak))
    lines = [title, "", *(_columns(rows) if report["candidates"] else ["no layout fits"]), ""]
    lines.append(f"{report['evaluated']} layouts decided, {report['simulated']} of them simulated, in {format_s(report['elapsed_s'])}. The others lost because:")
    docs = {**{rule.name: f"not so: {rule.doc}" for rule in RULES}, **REASONS}
    lost = [(str(count), reason, docs[reason]) for reason, count in sorted(report["rejected"].items(), key=lambda item: -item[1])]
    return "\n".join([*lines, *_columns(lost)])


def _title(plan: Plan, num_parameters: int) -> str:
    layout = plan.layout
    degrees = " ".join(f"{name}{getattr(layout, name)}" for name in ("tp", "pp", "vpp", "dp") if getattr(layout, name) > 1) or "one device"
    extras = [f"zero {layout.zero}"] if layout.zero else []
    extras += ["sequence parallel"] if layout.sequence_parallel else []
    extras += [f"recompute {plan.recompute.mode}"] if plan.recompute.mode != "none" else []
    schedule = plan.schedule.file or plan.schedule.name
    return (
        f"{plan.model.name} ({format_count(num_parameters)} parameters) on {layout.world_size} x {plan.cluster.name}\n"
        f"{', '.join([degrees, *extras])}; {schedule}, {plan.num_microbatches} microbatches of {plan.batch.micro_size} x {plan.batch.sequence} tokens"
        f", {plan.precision.dtype}"
    )


def _memory_lines(memory_bytes: Mapping[str, int]) -> list[str]:
    total = sum(memory_bytes.values())
    return _columns([(name, format_bytes(count), f"{count / total:6.1%}") for name, count in memory_bytes.items()])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines, indented by two."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _reasons(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items(), key=lambda item: -item[1])) or "no combination was legal"


SIMULATE = Command("simulate", "shardproof simulate --model llama3-70b --cluster dgx-h100 --devices 512 --tp 8 --pp 8", configure, run_simulate)
FIT = Command("fit", "shardproof fit --model llama3-8b --cluster dgx-h100 --devices 8 --tp 4 --pp 2", configure, run_fit)
PLAN = Command(
    "plan",
    "shardproof plan --model llama3-70b --cluster dgx-h100 --devices 512 --global-batch 1024 --sequence 8192 -o plan.toml",
    configure,
    run_plan,
)
