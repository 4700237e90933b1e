"""The gate of pretended CUDA: twenty layouts of the matrix, and plans of files, each looked through as `examined` does.

`python -m shardproof.verify.pretended.layouts [PLAN ...] [--part I/N]`. Exit code 1 when something is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.base.errors import ShardproofError
from ...core.commands.cli import exit_code, run_program
from ...core.plan.plan import AnyPlan, Plan
from ..matrix.covering import Row
from ..matrix.layouts import expected_cost, features, matrix, num_ranks, plan_of
from ..matrix.matrix import label
from ..matrix.portions import parse_part, part_of, smallest_cover
from .examine import examined

NUM_LAYOUTS = 20
MOST_RANKS = 8


def layouts() -> list[Row]:
    """The fewest layouts of few ranks that show every feature that any of these shows, and the cheapest others."""
    rows = [row for row in matrix().rows if num_ranks(row) <= MOST_RANKS]
    few = smallest_cover(rows, features, expected_cost)
    others = sorted((row for row in rows if row not in few), key=expected_cost)
    return [*few, *others[: max(0, NUM_LAYOUTS - len(few))]]


def _named(paths: Sequence[str], part: str | None) -> Iterator[tuple[str, AnyPlan]]:
    for path in paths:
        yield path, Plan.from_toml(Path(path).read_text(), path)
    for row in part_of(layouts(), parse_part(part), expected_cost, lambda row: label(row)):
        plan = plan_of(row)
        assert isinstance(plan, Plan)
        yield label(row), plan


def run(paths: Sequence[str], part: str | None) -> int:
    """Exit code 1 where something is found of a plan; a run that fails is something found."""
    wrong, count = 0, 0
    for name, plan in _named(paths, part):
        start, count = time.perf_counter(), count + 1
        try:
            found = examined(plan)
            verdict, words = ("ok    ", []) if found.ok else ("FAILED", found.text().splitlines())
        except ShardproofError as error:
            verdict, words = "FAILED", [str(error)]
        wrong += verdict != "ok    "
        print("\n    ".join([f"{verdict} {name}  {time.perf_counter() - start:.1f} s", *words]), flush=True)
    print(f"{count - wrong} of {count} plans hold on pretended CUDA")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.verify.pretended.layouts", description="Layouts of the matrix on pretended CUDA."
    )
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="a plan.toml that is looked through besides")
    parser.add_argument("--part", metavar="I/N", help="part I of N of the layouts, cut by expected cost")
    args = parser.parse_args(arguments)
    answer = run_program if arguments is None else exit_code
    return answer("python -m shardproof.verify.pretended.layouts", lambda: run(args.plans, args.part))


if __name__ == "__main__":
    sys.exit(main())
