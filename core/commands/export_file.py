"""The verb `export`: a plan in the words of another framework, and what they cannot say."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from ..base.errors import PlanError
from ..base.files import write_text
from ..base.terminal import say
from ..imports.exported import Exported
from ..imports.writers import WRITERS, writer_named
from .commands import Command
from .options import add_output, add_plan, emit, read_plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds PLAN and its options, the format, and those of the output."""
    add_plan(parser)
    names = ", ".join(f"{each.name} ({each.title})" for each in WRITERS)
    parser.add_argument("--to", metavar="NAME", required=True, help=f"the format: {names}")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the file, with -o writes it; what is lost is said on standard error. Exit code 0."""
    exported = writer_named(args.to).write(read_plan(args))
    output = args.output
    if output is not None and output != "-" and not output.endswith(".json"):
        if len(exported.files) > 1:
            raise PlanError(f"-o {output}: {args.to} is {len(exported.files)} files. Give -o FILE.json, or no -o.")
        write_text(output, exported.files[0][1])
        say(f"written: {Path(output)}", sys.stderr)
        args.output = None
        if not args.json:
            _say_lost(exported)
            return 0
    if not args.json:
        _say_lost(exported)
    emit(args, partial(_text, exported), exported.report())
    return 0


def _say_lost(exported: Exported) -> None:
    for key, why in exported.lost:
        say(f"{exported.to} does not say {key}: {why}", sys.stderr)


def _text(exported: Exported, width: int | None) -> str:
    return "\n".join(text.rstrip("\n") for _, text in exported.files)


EXPORT = Command("export", "shardproof export plan.toml --to megatron -o pretrain.sh", configure, run)
