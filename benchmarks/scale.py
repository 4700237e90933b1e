"""Build, lower and check at growing sizes: seconds, actions per second, peak memory, and how they grow
from a million actions on.

Usage: python benchmarks/scale.py                         all sizes below, a process each; the last line is the growth
       python benchmarks/scale.py PP MICROBATCHES [VPP]   one size in this process
Prints one JSON line per size. Fails when a target is missed. The largest size takes about half a minute.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from time import perf_counter, process_time
from typing import Any

from shardproof.core.schedule import build, lower
from shardproof.verify.schedule.check import check

SIZES = (
    (16, 256, 1),
    (64, 256, 1),
    (64, 1024, 1),
    (64, 1024, 4),
    (64, 4096, 1),
    (256, 1024, 1),
    (256, 4096, 1),
    (1024, 4096, 1),
)
"""(pp, microbatches, vpp); with one chunk per rank the schedule is 1F1B, else interleaved 1F1B."""

TARGETS = {(64, 1024, 4): (2.0, None), (1024, 4096, 1): (60.0, 4 * 2**30)}
"""Size -> most seconds and bytes."""


def main() -> None:
    """One size, or all of them with their growth."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(*(int(argument) for argument in sys.argv[1:]))))
        return
    reports = []
    for size in SIZES:
        command = [sys.executable, __file__, *map(str, size)]
        reports.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(json.dumps(reports[-1]), flush=True)
        most_s, most_bytes = TARGETS.get(size, (math.inf, None))
        assert reports[-1]["total_s"] < most_s, f"{size}: more than {most_s} s"
        assert most_bytes is None or reports[-1]["peak_bytes"] < most_bytes, f"{size}: more than {most_bytes} bytes"
    large = [report for report in reports if report["vpp"] == 1 and report["actions"] > 1e6]
    growth = {
        f"{name}_exponent": exponent(large, name) for name in ("build_s", "lower_s", "check_s", "cpu_s", "peak_bytes")
    }
    print(json.dumps({"benchmark": "scale", "growth_with_actions": growth}))


def measure(pp: int, num_microbatches: int, vpp: int = 1) -> dict[str, Any]:
    """Seconds of each step, and the most memory this process has held."""
    name = "Interleaved1F1B" if vpp > 1 else "1F1B"
    start, cpu_start = perf_counter(), process_time()
    schedule = build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    built = perf_counter()
    schedule = lower(schedule)
    lowered = perf_counter()
    findings = check(schedule)
    checked = perf_counter()
    cpu_s = process_time() - cpu_start  # separates the load of a shared machine from the work
    assert not findings, findings[:3]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {
        "benchmark": "scale",
        "schedule": name,
        "pp": pp,
        "num_microbatches": num_microbatches,
        "vpp": vpp,
        "actions": len(schedule),
        "build_s": built - start,
        "lower_s": lowered - built,
        "check_s": checked - lowered,
        "total_s": checked - start,
        "cpu_s": cpu_s,
        "actions_per_s": len(schedule) / (checked - start),
        "peak_bytes": peak_bytes,
        "peak_bytes_per_action": peak_bytes / len(schedule),
    }


def exponent(reports: list[dict[str, Any]], name: str) -> float:
    """The power of the number of actions with which a figure grows: the slope of the least-squares line
    through the logarithms."""
    points = [(math.log(report["actions"]), math.log(report[name])) for report in reports]
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


if __name__ == "__main__":
    main()
