"""Seconds of the static check on lowered 1F1B; prints one JSON line. Usage: python
benchmarks/check.py [pp] [microbatches]"""

from __future__ import annotations

import json
import sys
from time import perf_counter

from shardproof.core.schedule import build, lower
from shardproof.verify.schedule.check import check


def main() -> None:
    """Times building, lowering and checking apart."""
    pp, num_microbatches = (int(argument) for argument in sys.argv[1:3]) if len(sys.argv) > 2 else (64, 1024)
    start = perf_counter()
    schedule = build("1F1B", pp=pp, num_microbatches=num_microbatches)
    built = perf_counter()
    schedule = lower(schedule)
    lowered = perf_counter()
    findings = check(schedule)
    checked = perf_counter()
    assert not findings, findings[:3]
    report = {
        "benchmark": "check",
        "schedule": "1F1B",
        "pp": pp,
        "num_microbatches": num_microbatches,
        "actions": len(schedule),
        "build_s": built - start,
        "lower_s": lowered - built,
        "check_s": checked - lowered,
        "actions_per_s": len(schedule) / (checked - lowered),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
