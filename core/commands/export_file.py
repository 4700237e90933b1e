"""The verb `export`: a plan in somebody else's words, with what they cannot say."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ..base.errors import PlanError
from ..base.files import check_place, write_text
from ..base.terminal import say, table
from ..imports.exported import Exported
from ..imports.writers import FORMATS, write_as
from .commands import Command
from .options import add_plan, read_plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the plan's options, the format and the output."""
    add_plan(parser)
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="write it there: a file, or a folder for formats of several files; - is standard output",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the files, or with -o writes them, and says on standard error what they lose. Exit code 0."""
    exported = write_as(read_plan(args), args.to)
    if args.output == "-":
        args.output = None
    if args.output is not None:
        for path, text in _targets(exported, args.output):
            write_text(path, text)
            say(f"written: {path}", sys.stderr)
    if args.json:
        print(json.dumps(exported.report(), indent=2, allow_nan=False))
    elif args.output is None:
        print("\n".join(_printed(exported)), end="")
    if not args.json and exported.lost:
        say(lambda width: "\n".join(["not said there:", *table(exported.lost, width)]), sys.stderr)
    return 0


def _printed(exported: Exported) -> list[str]:
    """The text of the only file, or all under their names."""
    if len(exported.files) == 1:
        return [exported.files[0][1]]
    return [f"# {name}\n{text}" for name, text in exported.files]


def _targets(exported: Exported, output: str) -> list[tuple[Path, str]]:
    """Path and text of every file; a folder whose name ends in a slash is made. Raises `PlanError` where several would
    have one name, and as `check_place` does."""
    if output.endswith(os.sep):
        check_place(output.rstrip(os.sep) if not Path(output).is_dir() else Path(output) / exported.files[0][0])
        Path(output).mkdir(exist_ok=True)
    if Path(output).is_dir():
        return [(Path(output) / name, text) for name, text in exported.files]
    if len(exported.files) > 1:
        names = ", ".join(name for name, _ in exported.files)
        raise PlanError(f"-o {output}: {exported.to} has several files ({names}). Give a folder, as in -o job/.")
    check_place(output)
    return [(Path(output), exported.files[0][1])]


EXPORT = Command("export", "shardproof export plan.toml --to slurm -o job/", configure, run)
