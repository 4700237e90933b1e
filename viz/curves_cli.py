"""`shardproof draw RUN.jsonl`: the losses of one run or several."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from ..core.base.errors import PlanError, UnknownNameError
from ..core.base.files import write_bytes
from ..core.base.terminal import say, width_of
from ..core.commands.options import option_values
from .curves import CurvesScene, curves_scene, names_of, read_curve
from .curves_picture import lay_out_curves
from .curves_text import curves_text
from .picture import enlarged
from .picture_file import picture_bytes
from .text import TEXT_WIDTH

METRICS_SUFFIX = ".jsonl"
SUFFIXES = (".txt", ".svg", ".png")


def draw_curves(args: argparse.Namespace, output: str | None, *, color: bool) -> int:
    """Draws the runs that PLAN and --compare name; exit code 0. Raises `PlanError` and `FileError` for what are none,
    `UnknownNameError` for another suffix of the output."""
    paths = [args.plan, *(args.compare or ())]
    if other := next((path for path in paths if not path.endswith(METRICS_SUFFIX)), None):
        raise PlanError(f"--compare {other}: a run compares with another's metrics, a {METRICS_SUFFIX} file. Give one.")
    if given := [value.origin for table in option_values(args).values() for value in table.values()]:
        raise PlanError(f"{', '.join(given)}: plan options have no effect on {args.plan}. Leave them out.")
    suffix = None if output is None else Path(output).suffix
    if suffix is not None and suffix not in SUFFIXES:
        raise UnknownNameError("picture suffix", suffix or str(output), SUFFIXES)
    curves = [read_curve(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
    width = args.width or (width_of(sys.stdout) if output is None else None)
    if output is None and not args.json:
        print(curves_text(curves_scene(curves), width=width or TEXT_WIDTH, color=color), end="")
    elif output is not None:
        write_bytes(output, _drawn(curves_scene(curves), suffix, width))
        say(f"written: {output}", sys.stderr)
    if args.json:
        print(json.dumps({"runs": [curve.report() for curve in curves], "file": output}, indent=2))
    return 0


def _drawn(scene: CurvesScene, suffix: str | None, width: int | None) -> bytes:
    if suffix == ".txt":
        return curves_text(scene, width=width or TEXT_WIDTH).encode()
    return picture_bytes(enlarged(partial(lay_out_curves, scene), float(width or 960)), str(suffix))
