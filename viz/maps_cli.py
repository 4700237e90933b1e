"""`shardproof draw PLAN --what ...`: pictures of a plan that have no axis of time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..core.base.errors import PlanError, UnknownNameError
from ..core.base.files import write_bytes
from ..core.base.terminal import say, width_of
from ..core.commands.commands import service
from ..core.commands.options import read_any_plan
from ..core.layout.rank_map import ALL_AXES
from .layout_picture import lay_out_map
from .layout_text import map_text
from .memory_bars import bars_of, bars_text, lay_out_bars
from .picture import Picture, enlarged
from .picture_file import picture_bytes
from .text import TEXT_WIDTH
from .traffic_picture import lay_out_traffic
from .traffic_text import traffic_text

STEP = "step"
WHAT = {
    STEP: "the step over time",
    "layout": "which rank is on which node and in which rack, by axis",
    "traffic": "the bytes that ranks send each other in a step",
    "memory": "what each rank holds at its peak, by component",
}
"""What `--what` takes, and what it draws."""

SUFFIXES = (".txt", ".svg", ".png")
PIXELS, NARROWEST = 1200.0, 40
"""Pixels of a picture unless --width says otherwise, and characters that text has at least."""


@dataclass(frozen=True)
class Drawing:
    """One thing in all its forms: as data, in characters of a width, and on paper of a width in pixels."""

    report: dict[str, Any]
    text: Callable[[int], str]
    picture: Callable[[float], Picture]


def configure(group: Any) -> None:
    """Adds --what and --axis to the options of the picture."""
    said = "; ".join(f"{name}: {meaning}" for name, meaning in WHAT.items())
    group.add_argument("--what", choices=tuple(WHAT), default=STEP, help=f"{said} (default: {STEP})")
    group.add_argument(
        "--axis", metavar="AXIS", help=f"with layout and traffic: one axis alone, such as {', '.join(ALL_AXES[:-1])}"
    )


def draw_plan(args: argparse.Namespace, output: str | None) -> int:
    """Draws what --what says of a plan; exit code 0. Raises `PlanError` for options that have no effect on it,
    `UnknownNameError` for another suffix of the output."""
    _refuse(args)
    suffix = None if output is None else Path(output).suffix
    if suffix is not None and suffix not in SUFFIXES:
        raise UnknownNameError("picture suffix", suffix or str(output), SUFFIXES)
    drawing = _drawing(args)
    if output is not None:
        write_bytes(output, drawn(drawing, str(suffix), args.width))
        say(f"written: {output}", sys.stderr)
    elif not args.json:
        print(drawing.text(max(args.width or width_of(sys.stdout) or TEXT_WIDTH, NARROWEST)), end="")
    if args.json:
        print(json.dumps({**drawing.report, "file": output}, indent=2))
    return 0


def drawn(drawing: Drawing, suffix: str, width: int | None) -> bytes:
    """The file of a suffix among `SUFFIXES`; `width` is in characters or pixels."""
    if suffix == ".txt":
        return drawing.text(max(width or TEXT_WIDTH, NARROWEST)).encode()
    return picture_bytes(enlarged(drawing.picture, width or PIXELS), suffix)


def _drawing(args: argparse.Namespace) -> Drawing:
    """What is asked for, of the plan that the options mean."""
    plan = read_any_plan(args)
    if args.what == "layout":
        found = service("rank_map")(plan)
        found = found.only(args.axis) if args.axis else found
        return Drawing(found.report(), partial(map_text, found), partial(lay_out_map, found))
    if args.what == "memory":
        held = bars_of(service("simulate")(plan))
        return Drawing(held.report(), partial(bars_text, held), partial(lay_out_bars, held))
    traffic = service("rank_traffic")(plan)
    traffic = traffic.only(args.axis) if args.axis else traffic
    return Drawing(traffic.report(), partial(traffic_text, traffic), partial(lay_out_traffic, traffic))


def _refuse(args: argparse.Namespace) -> None:
    """Raises `PlanError` for what has no effect on a picture without an axis of time."""
    given = {
        "--compare": args.compare,
        "--scale": args.scale,
        "--by": args.by,
        "--no-memory": args.no_memory,
        "--durations": args.durations,
        "--axis": args.axis and args.what == "memory",
    }
    if useless := [name for name, value in given.items() if value]:
        raise PlanError(f"{', '.join(useless)} has no effect on --what {args.what}. Leave it out.")
    name = args.plan or ""
    if name.endswith((".csv", ".json", ".json.gz", ".jsonl")) or (name and Path(name).is_dir()):
        raise PlanError(f"--what {args.what} is about a plan, and {name} is none. Give a plan.toml.")
