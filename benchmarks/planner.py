"""Processor time of layout searches by fixed commands, layouts decided in a second of it; one JSON line each.

Usage: python benchmarks/planner.py [NAME ...] [--profile]

Every command runs in a process of its own: what it takes is user and system time of that process, start and imports
included, so another program on the machine matters little. `layouts_per_s` counts members of the full space: every
combination of the free values that a search names in its report, decided by a rule, a bound or a simulation.
`--profile` runs the searches here under cProfile instead, and prints where the time went.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

from shardproof.core.commands.cli import main as shardproof

COMMANDS = {
    "llama3-70b on 512": (
        5.0,
        "--model llama3-70b --cluster dgx-h100 --devices 512 --global-batch 1024 --sequence 8192",
    ),
    "deepseek-v3 on 512": (
        20.0,
        "--model deepseek-v3 --cluster dgx-h100 --devices 512 --global-batch 4096 --sequence 4096",
    ),
    "llama3.1-405b on 16384": (
        30.0,
        "--model llama3.1-405b --cluster dgx-h100 --devices 16384 --global-batch 2048 --sequence 8192",
    ),
    "gpt3-175b on 1024": (
        82_759 / 20_000,
        "--model gpt3-175b --cluster dgx-a100-80g --devices 1024 --global-batch 1536 --sequence 2048",
    ),
}
"""Name of a search -> seconds of processor time that it may take, and the options of `plan`. The last is the space of
`benchmarks/simulate.py`, and its seconds are 20,000 of its layouts a second."""

PROFILED = 45
"""Functions that --profile prints."""


def main() -> None:
    """Runs the searches that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="searches of which a part of the name is given")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    for name, (target_s, options) in COMMANDS.items():
        if not args.names or any(given in name for given in args.names):
            if args.profile:
                _profile(options)
            else:
                print(json.dumps({"search": name, "target_s": round(target_s, 2), **measured(options)}), flush=True)


def measured(options: str) -> dict[str, object]:
    """What a search by these options took and found."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "shardproof", "plan", *options.split(), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    best = report["candidates"][0]
    return {
        "processor_s": round(processor_s, 2),
        "evaluated": report["evaluated"],
        "simulated": report["simulated"],
        "layouts_per_s": round(report["evaluated"] / processor_s),
        "best_step_s": best["step_time_s"],
        "rejected": report["rejected"],
    }


def _profile(options: str) -> None:
    """Prints where the time of a search goes."""
    profiler = cProfile.Profile()
    with redirect_stdout(StringIO()):
        profiler.runcall(shardproof, ["plan", *options.split(), "--json"])
    for order in ("cumtime", "tottime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(PROFILED)


if __name__ == "__main__":
    main()
