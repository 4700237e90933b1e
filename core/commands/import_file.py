"""The verb `import`: somebody else's configuration as a plan.toml, every setting of it accounted for."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial

from ..base.errors import PlanError
from ..base.files import read_text, write_text
from ..base.terminal import say, table
from ..imports.account import STATUSES, Imported
from ..imports.given import import_file, known_formats, request_of, unknown_format
from ..plan.plan import any_plan
from .commands import Command
from .options import add_output, add_plan, check_output, emit, import_variables, option_values, with_options


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the file, the options that a plan takes, and those of the output."""
    add_plan(parser, "a file in one of the formats that --from lists")
    parser.add_argument("--explain", action="store_true", help="what became of every setting, as a table")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the plan, with -o plan.toml writes it. Exit code 0; 2 where a setting is refused, since there is no plan
    then."""
    if args.plan is None:
        raise PlanError(f"import which file? Give it: {known_formats()}.")
    check_output(args.output, ".toml")
    options = option_values(args)
    request = request_of(read_text(args.plan), args.plan, options, import_variables(args))
    if (imported := import_file(request, args.import_from)) is None:
        raise unknown_format(args.plan)
    refused = any(imported.of_status("refused"))
    if refused and not (args.json or args.explain):
        imported.raise_refused()
    plan = None if refused else any_plan(with_options(imported.values, options), args.plan).to_toml()
    if plan is not None and args.output is not None and args.output.endswith(".toml"):
        write_text(args.output, plan)
        say(f"written: {args.output}", sys.stderr)
        args.output = None
    report = {**imported.report(), "plan": plan}
    emit(args, partial(_text, imported, plan, explain=args.explain), report)
    return 2 if refused else 0


def _text(imported: Imported, plan: str | None, width: int | None, *, explain: bool) -> str:
    """The table of settings, or the plan with what a reader of it has to know as comments."""
    if explain:
        return explanation(imported, width)
    notes = [
        *imported.assumed,
        *(f"{each.flag}, not modelled: {each.why}" for each in imported.of_status("not-modelled")),
    ]
    return "".join(f"# {note}\n" for note in notes) + (plan or "").rstrip("\n")


def explanation(imported: Imported, width: int | None) -> str:
    """What became of every setting, those that need somebody's eye first."""
    count = Counter(each.status for each in imported.settings)
    version = f" of version {imported.version}" if imported.version else ""
    rows = [("line", "setting", "value", "", "key", "")]
    for status in reversed(STATUSES):
        for each in imported.of_status(status):
            rows.append((str(each.line or ""), each.flag, each.value, status, each.key or "", each.why))
    counted = ", ".join(f"{count[status]} {status}" for status in STATUSES)
    return "\n".join(
        [
            f"{imported.source}: {imported.format}{version}, {len(imported.settings)} settings: {counted}",
            *imported.assumed,
            "",
            *table(rows, width),
        ]
    )


IMPORT = Command(
    "import",
    "shardproof import pretrain_gpt.sh --devices 64 --cluster dgx-h100 --explain -o plan.toml",
    configure,
    run,
)
