"""`shardproof draw FRONT.json`: the saved answer of `plan` on paper, as `plan -o` draws it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.base.errors import FileError, PlanError
from ..core.base.files import read_text
from ..core.base.parsing import parse_json
from ..core.base.terminal import say
from ..core.commands.options import option_values
from .front import draw_front

HEAD = 256
"""Characters of a file within which an answer of `plan` has its first key."""

_NUMBERS = ("step_time_s", "peak_memory_bytes")
_DEGREES = ("tp", "cp", "ep", "pp", "vpp", "dp", "etp", "zero")


def is_front(name: str) -> bool:
    """Whether a file is the JSON that `plan` prints, by its beginning: recordings may be large."""
    if not name.endswith(".json") or not Path(name).is_file():
        return False
    with Path(name).open(encoding="utf-8", errors="replace") as file:
        return file.read(HEAD).lstrip("{ \n\r\t").startswith('"candidates"')


def draw_saved_front(args: argparse.Namespace, output: str | None) -> int:
    """Draws the answer of a search that PLAN names; exit code 0. Raises `PlanError` for options without an effect on
    it, and where no file is asked for; `FileError` for a damaged one, `UnknownNameError` for another suffix."""
    given = [value.origin for table in option_values(args).values() for value in table.values()]
    others = {
        "--compare": args.compare,
        "--scale": args.scale,
        "--by": args.by,
        "--no-memory": args.no_memory,
        "--durations": args.durations,
        "--width": args.width,
        "--json": args.json,
    }
    if given := given + [name for name, value in others.items() if value]:
        raise PlanError(f"{', '.join(given)} has no effect on {args.plan}, the answer of a search. Leave it out.")
    if output is None:
        raise PlanError(f"{args.plan} is the answer of a search, which is drawn in a file. Give -o front.svg or .png.")
    draw_front(_read(args.plan), output)
    say(f"written: {output}", sys.stderr)
    return 0


def _read(name: str) -> Mapping[str, Any]:
    """The report in a file, with all that its picture shows."""
    report = parse_json(read_text(name), name)
    if not isinstance(report.get("picture"), dict):
        raise FileError(f"{name} does not say how plain its layouts are. Save the answer of `plan --json` again.")
    picture, rows = report["picture"], report.get("candidates")
    counts = picture.get("mechanisms")
    is_sound = (
        isinstance(picture.get("title"), str)
        and isinstance(rows, list)
        and isinstance(counts, list)
        and len(counts) == len(rows)
        and all(_is_number(each) for each in counts)
        and all(map(_is_row, rows))
    )
    if not is_sound:
        raise FileError(f"{name}: its layouts are not what `plan` writes. Save the answer of `plan --json` again.")
    return dict(report)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_row(row: Any) -> bool:
    """Whether a layout has what the picture says of it."""
    return (
        isinstance(row, dict)
        and all(_is_number(row.get(name)) and row[name] > 0 for name in _NUMBERS)
        and all(isinstance(row.get(name), str) for name in ("recompute", "schedule"))
        and isinstance(row.get("layout"), dict)
        and all(_is_number(row["layout"].get(name)) for name in _DEGREES)
        and isinstance(row["layout"].get("sequence_parallel"), bool)
        and isinstance(row.get("batch"), dict)
        and _is_number(row["batch"].get("micro"))
        and isinstance(row.get("free", {}), dict)
    )
