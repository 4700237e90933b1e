"""The parts of `simulate`'s report that explain it: idle time by cause, critical path, what variation
does, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.base.units import format_bytes, format_count, format_s
from ..engine.bubbles import CAUSES, idle_of
from ..engine.critical_path import critical_path
from ..step.step import Simulation

Row = tuple[str, ...]

MOST_SHOWN = 8
"""Rows of a table in the text; the JSON has all of them."""


def explanation(simulation: Simulation) -> dict[str, Any]:
    """The JSON keys `idle_s`, of the rank with the largest bubble, and `critical_path`."""
    pp_rank = simulation.global_ranks.index(simulation.report["bubble_rank"])
    path = critical_path(simulation.run, simulation.prices)
    prices = None if simulation.recorded else simulation.prices
    return {
        "idle_s": [idle.report() for idle in idle_of(simulation.run, pp_rank, prices)],
        "critical_path": path.report(),
    }


def idle_rows(report: Mapping[str, Any]) -> list[Row]:
    """Why the rank with the largest bubble idles: seconds, share of the step, for what."""
    rows = report["idle_s"]
    shown: list[Row] = [
        (format_s(idle["seconds"]), _share(idle["seconds"], report), CAUSES[idle["cause"]].format(**idle))
        for idle in rows[:MOST_SHOWN]
    ]
    if rest := rows[MOST_SHOWN:]:
        seconds = sum(idle["seconds"] for idle in rest)
        shown.append((format_s(seconds), _share(seconds, report), f"{len(rest)} others"))
    return shown


def path_rows(report: Mapping[str, Any]) -> list[Row]:
    """The critical path by rank, kind and stage."""
    rows = report["critical_path"]["by_action"]
    shown: list[Row] = [
        (
            format_s(row["seconds"]),
            _share(row["seconds"], report),
            (f"{row['count']} x {row['of']}"),
            _of_rank(row["pp_rank"]),
        )
        for row in rows[:MOST_SHOWN]
    ]
    if rest := rows[MOST_SHOWN:]:
        seconds = sum(row["seconds"] for row in rest)
        shown.append((format_s(seconds), _share(seconds, report), f"{sum(row['count'] for row in rest)} others", ""))
    return shown


def variation_rows(report: Mapping[str, Any]) -> list[Row]:
    """What slow devices and links, drawn steps and failures make of the step; empty where a plan
    says nothing of them."""
    return [*_difference_rows(report.get("variation", {})), *_goodput_rows(report.get("goodput", {}))]


def sensitivity_rows(gains: list[dict[str, Any]]) -> list[Row]:
    """What a tenth of improvement of each number gains, most first, of those that gain anything that can be read."""
    rows: list[Row] = [
        (f"{gain['gained_share']:.2%}", format_s(gain["gained_s"]), gain["name"], _change(gain))
        for gain in gains
        if gain["gained_share"] >= 5e-5
    ]
    rest = len(gains) - len(rows)
    return [*rows, ("", "", f"{rest} others gain less than 0.01%", "")] if rest else rows


def _difference_rows(report: Mapping[str, Any]) -> Iterator[Row]:
    if not report:
        return
    nominal = format_s(report["nominal_step_time_s"])
    yield (
        "without differences",
        (f"{nominal}; the slowest replica, {report['replica']}, takes {report['slowed_by']:.4g} times as long"),
    )
    for entry in report.get("device_classes", ()):
        over = ", which does not fit" if entry["peak_memory_bytes"] > entry["capacity_bytes"] else ""
        peak = f"{format_bytes(entry['peak_memory_bytes'])} of {format_bytes(entry['capacity_bytes'])}"
        yield f"{entry['num_devices']} of {entry['class']}", f"peak memory {peak}{over}"
    if sampled := report.get("sampled_step_time_s"):
        name = f"{report['samples']} steps drawn"
        yield name, f"mean {format_s(sampled['mean'])}, standard deviation {format_s(sampled['std'])}"
        yield "5%, 50%, 95%, 99%", ", ".join(format_s(sampled[percent]) for percent in ("p5", "p50", "p95", "p99"))
        yield "shortest, longest", f"{format_s(sampled['min'])}, {format_s(sampled['max'])}"
    if load := report.get("expert_load"):
        yield "busiest experts", f"{load['mean']:.3g} times the average load, at most {load['max']:.3g}"
        yield "tokens dropped", f"{report['dropped_tokens_share']:.2%}"


def _goodput_rows(report: Mapping[str, Any]) -> Iterator[Row]:
    if report:
        yield (
            "a failure every",
            (f"{_long(report['job_mtbf_s'])}; a checkpoint every {_long(report['checkpoint_interval_s'])}"),
        )
        best = _long(report["daly_interval_s"])
        yield (
            "goodput",
            (
                f"{report['goodput']:.2%}, {format_count(report['tokens_per_s'])} tokens per second "
                f"(best interval {best})"
            ),
        )


def _long(seconds: float) -> str:
    """Hours where that is easier to read."""
    return f"{seconds / 3600:.4g} h" if seconds >= 3600 else format_s(seconds)


def _change(gain: Mapping[str, Any]) -> str:
    return "all of it" if gain["value"] is None else f"{gain['value']:.4g} -> {gain['improved']:.4g}"


def _of_rank(pp_rank: int) -> str:
    return f"on pipeline rank {pp_rank}" if pp_rank >= 0 else ""


def _share(seconds: float, report: Mapping[str, Any]) -> str:
    return f"{seconds / report['step_time_s']:6.1%}"
