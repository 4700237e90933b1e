"""A step of a plan on pretended CUDA: its bits against one device, and races between streams."""

from __future__ import annotations

import argparse
import sys

from ...core.commands.cli import exit_code
from ...core.commands.options import add_output, add_plan, check_output, emit, read_any_plan
from .examine import examined


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where a bit differs or streams race."""
    check_output(args.output)
    found = examined(read_any_plan(args))
    emit(args, found.text(), found.to_json())
    return 0 if found.ok else 1


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(prog="python -m shardproof.verify.pretended", description=__doc__)
    add_plan(parser)
    add_output(parser)
    args = parser.parse_args()
    return exit_code("python -m shardproof.verify.pretended", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
