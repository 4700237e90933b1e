"""The verbs `simulate` and `fit`: reports as tables, or as JSON. `plan` is in `plan_cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..core.base.errors import PlanError
from ..core.base.files import check_place, write_text
from ..core.base.graphml import graphml
from ..core.base.terminal import say, table
from ..core.base.units import format_bytes, format_count, format_s
from ..core.commands.commands import Command
from ..core.commands.github import annotation, location_of_key
from ..core.commands.options import (
    add_durations,
    add_output,
    add_plan,
    asked_reading,
    assign,
    check_output,
    emit,
    option_values,
    read_any_plan,
    read_durations,
)
from ..core.plan.plan import AnyPlan, Plan, only_model
from .network.link_loads import axes_of, busiest, link_loads, loaded_topology
from .plan_cli import PLAN
from .search.fit import fit
from .search.order import search_order
from .search.sensitivity import sensitivity
from .simulation.explain import explanation, idle_rows, path_rows, sensitivity_rows, variation_rows
from .simulation.simulate import simulate
from .step.step import Simulation
from .titles import title_of

__all__ = ["FIT", "PLAN", "SIMULATE"]

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
    "other": "waiting for the host to launch kernels",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a plan, and those of the output."""
    add_plan(parser)
    add_output(parser)


def configure_fit(parser: argparse.ArgumentParser) -> None:
    """Adds those options, and how findings are printed."""
    add_plan(parser)
    add_output(parser, findings=True)


def configure_simulate(parser: argparse.ArgumentParser) -> None:
    """Adds those options, and what else of the step to report."""
    configure(parser)
    group = parser.add_argument_group("what-if")
    group.add_argument(
        "--sensitivity", action="store_true", help=("which number of the cluster, improved by a tenth, helps most")
    )
    group.add_argument(
        "--samples", type=int, metavar="N", help=("steps to draw from the plan's [variation] (as variation.samples)")
    )
    group.add_argument(
        "--search-schedule",
        metavar="CSV",
        help="search a faster order of this plan's actions, in the memory there is, and write the fastest known to CSV",
    )
    group.add_argument(
        "--links",
        metavar="GRAPHML",
        help="what the step sends over each link of the machine: the busiest here, all of them as a graph in GRAPHML",
    )
    add_durations(group)


def run_simulate(args: argparse.Namespace) -> int:
    """Predicts one step. Exit code 0."""
    check_output(args.output)
    if args.samples is not None:
        assign(args, "variation.samples", str(args.samples), "--samples")
    plan = read_any_plan(args)
    if args.sensitivity:
        only_model(plan, "--sensitivity")
    if args.durations and args.sensitivity:
        raise PlanError(
            "--sensitivity changes numbers of the cluster, which recorded durations do not depend on. "
            "Leave out one of them."
        )
    _refuse_search(args, plan)
    if args.links:
        only_model(plan, "--links")
        if not args.links.endswith(".graphml"):
            raise PlanError(f"--links {args.links}: links are written as a graph; end the name in .graphml.")
    for file in filter(None, (args.links, args.search_schedule)):
        check_place(file)
    simulation = simulate(plan, durations=read_durations(args))
    report = {**simulation.report, **explanation(simulation)}
    if args.search_schedule:
        found = search_order(only_model(plan, "--search-schedule"))
        write_text(args.search_schedule, found.schedule.to_csv())
        report["schedule_search"] = {**found.report, "file": args.search_schedule}
    if args.links:
        report["links"] = _write_links(only_model(plan, "--links"), simulation, args.links)
    if args.sensitivity:
        report["sensitivity"] = [gain.report() for gain in sensitivity(only_model(plan, "--sensitivity"))]
    emit(args, partial(simulate_text, plan, report), report)
    return 0


def _write_links(plan: Plan, simulation: Simulation, file: str) -> dict[str, Any]:
    """Writes the machine with what a step sends over each link; the busiest of each kind as data."""
    step_s = simulation.report["step_time_s"]
    loads = link_loads(plan, simulation.run.graph.schedule)
    write_text(file, graphml(loaded_topology(plan, loads, step_s), lambda node: " ".join(map(str, node))))
    say(f"written: {file}, where {len(loads)} links carry something", sys.stderr)
    return {"file": file, "used": len(loads), "busiest": [load.report(step_s) for load in busiest(loads)]}


def _refuse_search(args: argparse.Namespace, plan: AnyPlan) -> None:
    """Raises `PlanError` where --search-schedule cannot be answered."""
    if not args.search_schedule:
        return
    only_model(plan, "--search-schedule")
    if args.durations:
        raise PlanError(
            "--search-schedule takes the modelled seconds of whole passes, and --durations has those of recorded "
            "actions. Leave out one of them."
        )
    if not args.search_schedule.endswith(".csv"):
        raise PlanError(
            f"--search-schedule {args.search_schedule}: a schedule is written as CSV; end the name in .csv."
        )


def run_fit(args: argparse.Namespace) -> int:
    """Compares every rank's peak memory with the device's. Exit code 0 when all fit, else 1."""
    plan = read_any_plan(args)
    result = fit(plan)
    report = {**result.report, "remedies": [_with_batch(args, plan, remedy) for remedy in result.remedies]}
    why_none = "" if result.fits or result.remedies else result.hint
    emit(args, partial(fit_text, plan, report, why_none), report)
    if args.format == "github":
        for finding in result.findings:
            print(annotation(finding, location_of_key(args.plan, finding.key, asked_reading(args))))
    return 0 if result.fits else 1


def _with_batch(args: argparse.Namespace, plan: AnyPlan, remedy: Mapping[str, Any]) -> dict[str, Any]:
    """A remedy as these options take it: where nothing gives a global batch, its default follows
    what the remedy changes."""
    if args.plan is not None or "global" in option_values(args).get("batch", {}):
        return dict(remedy)
    changed = {text.partition("=")[0] for text in remedy["set"]} & {"batch.micro", "layout.dp"}
    return {**remedy, "set": [*remedy["set"], *([f"batch.global={plan.batch.global_size}"] if changed else [])]}


def simulate_text(plan: AnyPlan, report: Mapping[str, Any], width: int | None = None) -> str:
    """The report of `simulate` for people; `report` has the explanations of `explain` too."""
    step_s = report["step_time_s"]
    peak, capacity = report["peak_memory_bytes"], report["capacity_bytes"]
    over = ", which does not fit" if peak > capacity else ""
    shares = [(_TIME_NAMES[name], format_s(s), f"{s / step_s:6.1%}") for name, s in report["time_s"].items() if s]
    head = [
        ("step", format_s(step_s)),
        ("tokens per second", format_count(report["tokens_per_s"])),
        ("model TFLOP/s per device", f"{report['model_flops_per_s_per_device'] / 1e12:.4g}"),
        ("MFU", f"{report['mfu']:.1%} (causal {report['mfu_causal']:.1%}, hardware {report['hfu']:.1%})"),
        ("bubble", f"{report['bubble_fraction']:.1%} of the step on rank {report['bubble_rank']}"),
        (
            "peak memory",
            (
                f"{format_bytes(peak)} of {format_bytes(capacity)} on rank "
                f"{report['peak_memory_rank']}{_during(report)}{over}"
            ),
        ),
    ]
    return "\n".join(
        [
            title_of(plan, report["num_parameters"]),
            "",
            *table(head, width),
            "",
            f"where the step goes on rank {report['critical_rank']}, which finishes last:",
            *table(shares, width),
            *_section(f"why rank {report['bubble_rank']} idles, which does so longest:", idle_rows(report), width),
            *_section("critical path:", path_rows(report), width),
            *_section("modules:", _module_rows(report), width),
            *_section("search for a faster order of actions:", _search_rows(report), width),
            *_section("busiest link of each kind:", _link_rows(report), width),
            *_section("variation:", variation_rows(report), width),
            *_section(
                "what a tenth of improvement would gain:", sensitivity_rows(report.get("sensitivity", [])), width
            ),
            "",
            "memory of that peak:",
            *_memory_lines(report["memory_bytes"], width),
            "",
            f"{_basis(plan, report)}; --json has the source of each under `provenance`.",
        ]
    )


def _basis(plan: AnyPlan, report: Mapping[str, Any]) -> str:
    """What the seconds of a report rest on."""
    if recorded := report["provenance"].get("durations"):
        return (
            f"Durations measured ({recorded['source']}), split by cause as modelled with the numbers of "
            f"{plan.cluster.name}"
        )
    of_exact = ", exact numerics as fast ones" if plan.numerics.mode == "exact" else ""
    return f"Modelled with the numbers of {plan.cluster.name}{of_exact}"


def fit_text(plan: AnyPlan, report: Mapping[str, Any], why_none: str = "", width: int | None = None) -> str:
    """The report of `fit` for people; `report` has the remedies too, `why_none` says why there is none for a
    plan that does not fit."""
    peak, capacity = report["peak_memory_bytes"], report["capacity_bytes"]
    difference = format_bytes(abs(capacity - peak))
    verdict = f"fits, {difference} to spare" if report["fits"] else f"does not fit: {difference} too much"
    names = list(report["memory_bytes"])
    rows = [("pp rank", "rank", "peak", *names)]
    for entry in report["per_rank"]:
        parts = (format_bytes(entry["memory_bytes"][name]) for name in names)
        rows.append(
            (str(entry["pp_rank"]), str(entry["global_rank"]), format_bytes(entry["peak_memory_bytes"]), *parts)
        )
    worst = (
        f"worst rank {report['peak_memory_rank']}{_during(report)}: {format_bytes(peak)} of {format_bytes(capacity)}"
    )
    return "\n".join(
        [
            title_of(plan, plan.num_parameters),
            "",
            worst,
            verdict,
            *table(_usable_rows(report), width),
            *(["", why_none] if why_none else _remedy_lines(report["remedies"], width)),
            "",
            *table(rows, width),
        ]
    )


def _usable_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """How the usable part of a device comes about."""
    names = (("reserved", "context and libraries"), ("fragmentation", "fragmentation"), ("headroom", "headroom"))
    parts = [(f"less {name}", format_bytes(report[f"{key}_bytes"])) for key, name in names if report[f"{key}_bytes"]]
    return [
        ("memory of the device", format_bytes(report["device_bytes"])),
        *parts,
        ("usable", format_bytes(report["capacity_bytes"])),
    ]


def _remedy_lines(found: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """What makes the plan fit, as options."""
    if not found:
        return []
    rows = [("peak", "step", "--set")]
    for each in found:
        step = "not simulated" if each["step_time_s"] is None else format_s(each["step_time_s"])
        rows.append((format_bytes(each["peak_memory_bytes"]), step, " ".join(each["set"])))
    return ["", "it fits with one of these, each with --set:", *table(rows, width)]


def _module_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Ranks, layout, parameters, peak and bytes handed on of every module; empty for a plan of one model."""
    rows: list[tuple[str, ...]] = []
    if "modules" in report:
        rows.append(("", "ranks", "layout", "parameters", "peak memory", "to the next, a step"))
    for each in report.get("modules", ()):
        ranks, parameters = "{}-{}".format(*each["ranks"]), format_count(each["num_parameters"])
        peak, handed_on = (
            format_bytes(each["peak_memory_bytes"]),
            format_bytes(each["bridge_bytes"]) if each["bridge_bytes"] else "",
        )
        rows.append((each["name"], ranks, each["layout"], parameters, peak, handed_on))
    return rows


def _search_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What --search-schedule found; empty without it."""
    if (found := report.get("schedule_search")) is None:
        return []
    step, before = found["step_time_s"], found["step_time_before_s"]
    gain = f"{abs(1 - step / before):.1%} {'less' if step < before else 'more'}"
    gain = gain if found["found"] else "as before: nothing faster fits"
    named = f"{found['best_named']}, {format_s(found['best_named_s'])}" if found["best_named"] else "none fits"
    return [
        ("step", f"{format_s(step)}, {gain}"),
        ("peak memory", format_bytes(found["peak_memory_bytes"])),
        ("passes and messages", f"{format_s(found['passes_s'])}, the shortest of {found['evaluated']} orders"),
        ("no order is below", f"{format_s(found['lower_bound_s'])} ({found['bound_reason']})"),
        ("shortest with a name", named),
        ("written to", found["file"]),
    ]


def _link_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What --links found; empty without it, and where no rank sends."""
    return [
        (
            row["link"],
            format_bytes(row["bytes"]),
            format_s(row["busy_s"]),
            f"{row['share_of_step']:6.1%}",
            axes_of(row["bytes_of_axis"]),
        )
        for row in report.get("links", {"busiest": []})["busiest"]
    ]


def _during(report: Mapping[str, Any]) -> str:
    return f" during {report['peak_memory_action']}" if report["peak_memory_action"] else ""


def _memory_lines(memory_bytes: Mapping[str, int], width: int | None) -> list[str]:
    total = sum(memory_bytes.values())
    return table([(name, format_bytes(count), f"{count / total:6.1%}") for name, count in memory_bytes.items()], width)


def _section(title: str, rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """A table under its title, after an empty line; nothing where it has no rows."""
    return ["", title, *table(rows, width)] if rows else []


SIMULATE = Command(
    "simulate",
    "shardproof simulate --model llama3-70b --cluster dgx-h100 --devices 512 --tp 8 --pp 8 --zero 1",
    configure_simulate,
    run_simulate,
)
FIT = Command(
    "fit", ("shardproof fit --model llama3-8b --cluster dgx-h100 --devices 8 --tp 4 --pp 2"), configure_fit, run_fit
)
