"""What a profiler's traces measured of a step, next to what the plan that they are drawn with predicts."""

from __future__ import annotations

from typing import Any

from ..core.base.errors import TimelineError
from ..core.base.units import format_s
from ..core.traces.load import Recording
from ..core.traces.recognised import RowOf

EXPOSED = ("tp_comm", "cp_comm", "ep_comm", "dp_comm")
"""Of a prediction's step: collectives that nothing hides. Messages between stages are part of the bubble in a trace."""


def rows_of(simulation: Any) -> RowOf:
    """The actions of every global rank of a simulated plan, lowered. Raises `TimelineError` for a plan of several
    modules, whose ranks have no one pipeline rank."""
    schedule, layout = simulation.run.graph.schedule, getattr(simulation.plan, "layout", None)
    if layout is None:
        raise TimelineError(
            "a plan of several modules recognises no actions in traces. Name them: "
            'torch.profiler.record_function("2F3") around each.'
        )
    return lambda global_rank: list(schedule.row(layout.coordinates(global_rank)["pp"]))


def measures(recording: Recording, simulation: Any | None) -> dict[str, Any]:
    """Step seconds, the largest bubble and the largest exposed collectives as fractions of the step with their ranks,
    and MFU where a plan gives products and peak; the prediction's own under `predicted`. Without a profiler's traces
    there are none."""
    timeline, found = recording.timeline, recording.communication
    if not found:
        return {}
    step_s = timeline.makespan_s
    bubble, bubble_rank = max((timeline.bubble_fraction(rank), rank) for rank in timeline.global_ranks)
    exposed_s, exposed_rank = max((each.exposed_s, rank) for rank, each in found.items())
    measured = {
        "step_time_s": step_s,
        "bubble_fraction": bubble,
        "bubble_rank": bubble_rank,
        "exposed_fraction": exposed_s / step_s if step_s else 0.0,
        "exposed_rank": exposed_rank,
        "collectives_s": {str(rank): each.seconds for rank, each in sorted(found.items())},
        "mfu": None,
        "predicted": None,
    }
    if simulation is not None:
        report = simulation.report
        predicted_s = report["step_time_s"]
        measured["mfu"] = report["mfu"] * predicted_s / step_s if step_s else None
        measured["predicted"] = {
            "step_time_s": predicted_s,
            "bubble_fraction": report["bubble_fraction"],
            "bubble_rank": report["bubble_rank"],
            "exposed_fraction": sum(report["time_s"][name] for name in EXPOSED) / predicted_s,
            "exposed_rank": report["critical_rank"],
            "mfu": report["mfu"],
        }
    return measured


def measures_text(measured: dict[str, Any]) -> str:
    """The same as a table, a line for each; nothing of none."""
    if not measured:
        return ""
    columns = [measured, *([measured["predicted"]] if measured["predicted"] else [])]
    lines = [["", *("measured", "predicted")[: len(columns)]]]
    lines.append(["step", *(format_s(each["step_time_s"]) for each in columns)])
    for title, key in (("bubble", "bubble"), ("exposed collectives", "exposed")):
        cells = [f"{each[key + '_fraction']:.1%} on rank {each[key + '_rank']}" for each in columns]
        lines.append([title, *cells])
    if measured["mfu"] is not None:
        lines.append(["MFU", *(f"{each['mfu']:.1%}" for each in columns)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "".join(f"  {line}\n" for line in text)
