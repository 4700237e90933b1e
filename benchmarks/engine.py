"""Actions per second of the event engine on lowered 1F1B; prints one JSON line. Usage: python benchmarks/engine.py [pp] [microbatches]"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import numpy as np

from shardproof.core.action import Kind
from shardproof.core.schedules import build, lower
from shardproof.simulator.engine import execute
from shardproof.simulator.graph import build_graph

REPEATS = 5


def main() -> None:
    """Best of some repeats, with the preparation (waits of every action) and the run proper apart."""
    pp, num_microbatches = (int(argument) for argument in sys.argv[1:3]) if len(sys.argv) > 2 else (64, 1024)
    schedule = lower(build("1F1B", pp=pp, num_microbatches=num_microbatches))
    kind = schedule.actions.kind
    duration_s = np.select([kind == Kind.F, kind == Kind.B], [1.0, 2.0], 0.0)
    prepare_s, run_s, makespan_s = float("inf"), float("inf"), 0.0
    for _ in range(REPEATS):
        start = perf_counter()
        graph = build_graph(schedule, sends="rendezvous")
        _ = graph.evaluated_waits
        prepared = perf_counter()
        makespan_s = float(execute(graph, duration_s).end_s.max())
        prepare_s, run_s = min(prepare_s, prepared - start), min(run_s, perf_counter() - prepared)
    assert makespan_s == 3 * (num_microbatches + pp - 1)
    report = {
        "benchmark": "engine",
        "schedule": "1F1B",
        "pp": pp,
        "num_microbatches": num_microbatches,
        "actions": len(schedule),
        "prepare_s": prepare_s,
        "run_s": run_s,
        "actions_per_s": len(schedule) / (prepare_s + run_s),
        "actions_per_s_prepared": len(schedule) / run_s,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
