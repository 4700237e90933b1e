"""Wall time of `shardproof --help` in fresh processes; prints one JSON line. Usage: python benchmarks/cli_help.py"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from time import perf_counter

REPEATS = 7


def main() -> None:
    """Median and best of some runs, and of an interpreter that does nothing."""
    report: dict[str, object] = {"benchmark": "cli_help", "repeats": REPEATS}
    commands = {"help": ["-m", "shardproof", "--help"], "python": ["-c", "pass"]}
    for name, arguments in commands.items():
        times_s = [_run_s([sys.executable, *arguments]) for _ in range(REPEATS)]
        report[f"{name}_median_s"], report[f"{name}_best_s"] = statistics.median(times_s), min(times_s)
    print(json.dumps(report))


def _run_s(command: list[str]) -> float:
    start = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


if __name__ == "__main__":
    main()
