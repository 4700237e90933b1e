"""`shardproof draw`: a plan (simulated), a schedule (with unit costs) or a recorded timeline, or the losses of runs, as
text or in a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..core.base.bounds import shown
from ..core.base.errors import PlanError, TimelineError
from ..core.base.files import check_place, write_text
from ..core.base.findings import Finding
from ..core.base.graphml import graphml
from ..core.base.terminal import say, width_of
from ..core.commands.commands import Command, service
from ..core.commands.options import (
    add_durations,
    add_plan,
    option_values,
    read_any_plan,
    read_durations,
    whole_number,
)
from ..core.schedule.schedule import Schedule, read_csv
from ..core.schedule.timeline import Timeline
from ..core.traces.load import Recording, read_recording
from .curves_cli import METRICS_SUFFIX, draw_curves
from .draw import SUFFIXES, draw, kind_of
from .front_cli import draw_saved_front, is_front
from .maps_cli import STEP, draw_plan
from .maps_cli import configure as configure_maps
from .measured import measures, measures_text, rows_of
from .page.content import Extra
from .page.html import schedules_to_html
from .page.schedules import sized
from .scene.axis import TimeUnit
from .scene.lanes import compare_lanes
from .step_page import extra_of
from .text import TEXT_WIDTH

_NO_SECONDS = "--compare {compare}: a schedule CSV has unit costs and no seconds, so it compares only with another CSV."

GRAPH_SUFFIX = ".graphml"

MOST_CHARACTERS = 10_000
"""Of a line of text: more takes minutes to draw."""

LEAST_PIXELS, LEAST_OF_TRAFFIC, MOST_PIXELS = 200, 500, 20_000
"""Of a picture: names and numbers take some 130, the table next to what ranks send 430."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds PLAN, the plan options and those of the picture."""
    add_plan(
        parser,
        "a plan.toml (simulated), a schedule .csv (unit costs), a recorded .timeline.json, a run's metrics .jsonl, "
        "a profiler's trace or folder of traces, or the JSON of `plan`",
    )
    add_durations(parser)
    group = parser.add_argument_group("picture")
    configure_maps(group)
    group.add_argument(
        "--compare",
        metavar="OTHER",
        action="append",
        help=(
            "a second plan, schedule or recorded timeline, drawn below the first; a plan's schedule also says which "
            "actions a profiler's traces have that name none; of metrics another run, as often as there are runs"
        ),
    )
    group.add_argument(
        "--scale",
        choices=("auto", "time", "own"),
        help="with --compare: one time scale, or each its own; auto takes own from a factor of three on",
    )
    group.add_argument(
        "--by",
        choices=("lane", "timeline"),
        help=(
            "with --compare of a prediction and a measurement of the same actions: lane by lane (default), or one "
            "below the other"
        ),
    )
    group.add_argument(
        "--width",
        type=whole_number,
        metavar="N",
        help=("characters of text (default: the terminal's) or pixels of a picture"),
    )
    group.add_argument("--no-memory", action="store_true", help="leave the memory curves out")
    parser.add_argument("--json", action="store_true", help="print one JSON object about the timeline and nothing else")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=(
            f"write {' '.join(SUFFIXES)} instead of the terminal, or {GRAPH_SUFFIX}: what every action of a schedule "
            "waits for; - is standard output"
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Draws; exit code 0."""
    output = None if args.output in (None, "-") else args.output
    _check_width(args.width, output, args.what)
    if output is not None:
        check_place(output)
    if args.what != STEP:
        return draw_plan(args, output)
    if args.axis:
        raise PlanError(
            f"--axis {args.axis} has no effect on a step. Leave it out, or ask for --what layout or traffic."
        )
    if is_front(args.plan or ""):
        return draw_saved_front(args, output)
    if (args.plan or "").endswith(METRICS_SUFFIX):
        return draw_curves(args, output, color=output is None and not args.json and _wants_color())
    args.compare = _only_other(args.compare)
    for name, value in (("--scale", args.scale), ("--by", args.by)):
        if value is not None and args.compare is None:
            raise PlanError(f"{name} {value} has no effect without --compare. Leave it out, or give --compare OTHER.")
    if output is not None and output.endswith(GRAPH_SUFFIX):
        return _write_graph(args, output)
    on_page = output is not None and kind_of(output) == ".html"
    if on_page and (args.plan or "").endswith(".csv"):
        return _write_schedules(args, str(output))
    first, second = _read_both(args, on_page=on_page)
    timeline, time_unit, other = first.timeline, first.time_unit, second.timeline if second else None
    if second and second.time_unit != time_unit:
        raise TimelineError(_NO_SECONDS.format(compare=args.compare))
    extras = [each.extra for each in (first, second) if each]
    measured = _measured(first, second)
    color = output is None and not args.json and _wants_color()
    width = args.width
    if output is None and width is None:
        width = width_of(sys.stdout) or TEXT_WIDTH
    if output is not None or not args.json:
        drawn = draw(
            timeline,
            output,
            memory=not args.no_memory,
            width=width,
            compare=other,
            scale=args.scale or "auto",
            by=args.by or "lane",
            time_unit=time_unit,
            color=color,
            extras=extras,
        )
        if output is None:
            print(drawn, end="")
        else:
            say(f"written: {output}", sys.stderr)
    if measured and not args.json:
        print(measures_text(measured), end="")
    if args.json:
        report = {**summary(timeline), "compare": summary(other) if other else None, "file": output}
        if measured:
            report["measured"] = measured
        if other is not None:
            report["lanes"] = [lane.report() for lane in compare_lanes(timeline, other)]
        print(json.dumps(report, indent=2))
    return 0


def _check_width(width: int | None, output: str | None, what: str) -> None:
    """Raises `PlanError` for a width on which nothing can be drawn or read."""
    is_text = output is None or output.endswith(".txt")
    pixels = LEAST_OF_TRAFFIC if what == "traffic" else LEAST_PIXELS
    least, most, unit = (1, MOST_CHARACTERS, "characters") if is_text else (pixels, MOST_PIXELS, "pixels")
    if width is not None and not least <= width <= most:
        raise PlanError(f"--width {shown(width)} must lie between {least:,} and {most:,} {unit}.")


def _only_other(given: list[str] | None) -> str | None:
    """What is drawn below a timeline, if anything is. Raises `PlanError` for several, and for a run's metrics."""
    for name in given or ():
        if name.endswith(METRICS_SUFFIX):
            raise PlanError(f"--compare {name}: metrics of a run compare with those of another, as `draw RUN.jsonl`.")
    if given and len(given) > 1:
        raise PlanError(f"--compare is given {len(given)} times; two timelines are drawn, not more. Give it once.")
    return given[0] if given else None


def _write_graph(args: argparse.Namespace, output: str) -> int:
    """Writes the dependency graph of what runs; exit code 0."""
    name = args.plan or ""
    if args.compare is not None or name.endswith((".json", ".json.gz")):
        what = f"--compare {args.compare}" if args.compare is not None else f"{name}, a recorded timeline,"
        raise PlanError(f"{what} has no place in {output}, the graph of one schedule. Give a plan.toml or a schedule.")
    schedule = read_csv(name) if name.endswith(".csv") else service("simulate")(read_any_plan(args)).run.graph.schedule
    graph = schedule.graph()
    write_text(output, graphml(graph, lambda place: f"rank {place[0]} action {place[1]}"))
    say(f"written: {output}", sys.stderr)
    if args.json:
        report = {"num_actions": graph.number_of_nodes(), "num_waits": graph.number_of_edges(), "file": output}
        print(json.dumps(report, indent=2))
    return 0


def _write_schedules(args: argparse.Namespace, output: str) -> int:
    """Writes the page of a schedule, or of two, whose reader chooses durations; exit code 0."""
    _check_alone(args)
    files = [args.plan, *([args.compare] if args.compare is not None else [])]
    if other := next((name for name in files if not name.endswith(".csv")), None):
        raise TimelineError(_NO_SECONDS.format(compare=other))
    schedules = [replace(read_csv(name), name=Path(name).stem) for name in files]
    write_text(output, schedules_to_html([sized(each, _findings(each)) for each in schedules], " / ".join(files)))
    say(f"written: {output}", sys.stderr)
    if args.json:
        drawn, *others = [summary(service("run_schedule")(each)) for each in schedules]
        print(json.dumps({**drawn, "compare": others[0] if others else None, "file": output}, indent=2))
    return 0


def summary(timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints: makespan, worst bubble, and per rank busy seconds, bubble fraction and peak bytes
    (None without samples)."""
    peaks: dict[int, int] = {}
    for sample in timeline.memory:
        peaks[sample.global_rank] = max(peaks.get(sample.global_rank, 0), sample.num_bytes)
    ranks = [
        {
            "global_rank": rank,
            "busy_s": timeline.busy_s(rank),
            "bubble_fraction": timeline.bubble_fraction(rank),
            "peak_memory_bytes": peaks.get(rank),
        }
        for rank in timeline.global_ranks
    ]
    return {
        "title": timeline.title,
        "source": timeline.source,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": max(map(timeline.bubble_fraction, timeline.global_ranks), default=0.0),
        "num_ranks": len(ranks),
        "num_spans": len(timeline.spans),
        "per_rank": ranks,
    }


class _Read(NamedTuple):
    """A timeline, whether its times are seconds, and what a page says besides; the plan's simulation, or the recording,
    that it comes from."""

    timeline: Timeline
    time_unit: TimeUnit
    extra: Extra = Extra()
    simulation: Any = None
    recording: Recording | None = None


def _read_both(args: argparse.Namespace, *, on_page: bool) -> tuple[_Read, _Read | None]:
    """What PLAN and `--compare` mean. Where one of them is a plan, its schedule says what traces without names of
    actions are, so it is read first."""
    if args.compare is None:
        return _read(args, on_page=on_page), None
    given = _only_plan(args.compare)
    if _is_recorded(args.plan or "") and not _is_recorded(args.compare):
        second = _read(given, on_page=on_page)
        return _read(args, on_page=on_page, simulation=second.simulation), second
    first = _read(args, on_page=on_page)
    return first, _read(given, on_page=on_page, simulation=first.simulation)


def _is_recorded(name: str) -> bool:
    """Whether a file or a folder has what was recorded or drawn, rather than a plan or a schedule."""
    return name.endswith((".json", ".json.gz")) or (bool(name) and Path(name).is_dir())


def _read(args: argparse.Namespace, *, on_page: bool, simulation: Any = None) -> _Read:
    """The timeline that PLAN and the options mean. In traces that name no actions a simulated plan's are recognised."""
    name = args.plan or ""
    if _is_recorded(name):
        _check_alone(args)
        recording = read_recording(name, rows_of(simulation) if simulation is not None else None)
        return _Read(recording.timeline, "s", recording=recording)
    if name.endswith(".csv"):
        _check_alone(args)
        return _Read(service("run_schedule")(read_csv(name)), "unit")
    simulated = service("simulate")(read_any_plan(args), durations=read_durations(args))
    return _Read(simulated.timeline, "s", extra_of(simulated) if on_page else Extra(), simulation=simulated)


def _measured(first: _Read, second: _Read | None) -> dict[str, Any]:
    """What the traces among both measured, next to the plan among both."""
    both = [each for each in (first, second) if each]
    recording = next((each.recording for each in both if each.recording and each.recording.communication), None)
    simulation = next((each.simulation for each in both if each.simulation is not None), None)
    return measures(recording, simulation) if recording else {}


def _check_alone(args: argparse.Namespace) -> None:
    """Raises `PlanError` for plan options with a file that is no plan."""
    given = [value.origin for table in option_values(args).values() for value in table.values()]
    given += ["--durations"] * bool(args.durations)
    if given:
        raise PlanError(
            f"{', '.join(given)}: plan options have no effect on {args.plan}. Give a plan.toml, or leave them out."
        )


def _findings(schedule: Schedule) -> tuple[Finding, ...]:
    """What the static rules find in a schedule, warnings too."""
    return tuple(service("check")(schedule, warnings=True))


def _only_plan(name: str) -> argparse.Namespace:
    """The arguments of a verb that was given PLAN alone: the options on the command line belong to the first."""
    parser = argparse.ArgumentParser()
    add_plan(parser)
    add_durations(parser)
    return parser.parse_args([name])


def _wants_color() -> bool:
    """True on a terminal that shows Unicode, unless NO_COLOR is set (https://no-color.org: to
    anything but the empty text)."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return (
        sys.stdout.isatty()
        and encoding == "utf8"
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


DRAW = Command(
    "draw",
    ("shardproof draw --model llama3-8b --cluster dgx-h100 --devices 8 --tp 4 --pp 2 -o step.svg"),
    configure,
    run,
)
