"""Actions per second of the event engine on lowered schedules, with and without preparation (the waits of
every action), in JSON lines.

Usage: python benchmarks/engine.py                          the schedules below, plain loops, shared links
       python benchmarks/engine.py NAME PP MICROBATCHES     one schedule in this process
       python benchmarks/engine.py growth                   1F1B from a million to 10^8 actions, a process each; the
                                                            last line is the growth. Takes two minutes and 8 GB.
Fails when the compiled loops miss their target. Memory that a process touches for the first time is slow on virtual
machines (measured here, 2026-11: 0.5 GB/s, later 8), so every figure is the best of some repeats.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import SENDS, Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.simulator.engine import kernel
from shardproof.simulator.engine.contention import Traffic, execute_shared
from shardproof.simulator.engine.engine import execute, plain_run
from shardproof.simulator.engine.graph import build_graph, plain_graph

TARGET_PER_S = 20e6
"""Issue 4: actions a second on one core in the compiled path."""

SHAPES = (
    ("1F1B", 64, 1024),
    ("1F1B", 64, 4096),
    ("Interleaved1F1B", 64, 1024),
    ("ZBVZeroBubble", 64, 1024),
    ("DualPipe", 64, 1024),
)
CHUNKS = {"Interleaved1F1B": 4, "ZBVZeroBubble": 2}
GROWTH = ((256, 1024), (256, 4096), (256, 16384), (256, 65536))
REPEATS = 7


def main() -> None:
    """One schedule, the growth, or everything else."""
    match sys.argv[1:]:
        case ["growth"]:
            growth()
        case [name, pp, num_microbatches]:
            print(json.dumps(measure(name, int(pp), int(num_microbatches))))
        case _:
            for shape in SHAPES:
                report = measure(*shape)
                print(json.dumps(report), flush=True)
                assert report["actions_per_s_prepared"] > TARGET_PER_S or not kernel.IS_COMPILED, f"{shape}: too slow"
            print(json.dumps(measure_plain(*SHAPES[0])))
            print(json.dumps(measure_shared(*SHAPES[0])))


def measure(name: str, pp: int, num_microbatches: int) -> dict[str, Any]:
    """Preparation and run of one schedule. 1F1B is checked against its closed form."""
    schedule = lowered(name, pp, num_microbatches)
    duration_s = unit_durations(schedule)
    build_s, graph = best(lambda: build_graph(schedule, sends="rendezvous"))
    run_s, run = best(lambda: execute(graph, duration_s))
    if name == "1F1B":
        assert run.end_s.max() == 3 * (num_microbatches + pp - 1)
    return {
        "benchmark": "engine",
        "compiled": kernel.IS_COMPILED,
        "schedule": name,
        "pp": pp,
        "num_microbatches": num_microbatches,
        "actions": len(schedule),
        "prepare_s": build_s,
        "run_s": run_s,
        "actions_per_s": len(schedule) / (build_s + run_s),
        "actions_per_s_prepared": len(schedule) / run_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
    }


def measure_plain(name: str, pp: int, num_microbatches: int) -> dict[str, Any]:
    """The same with the plain loops, which give the same times."""
    schedule = lowered(name, pp, num_microbatches)
    duration_s = unit_durations(schedule)
    build_s, graph = best(lambda: plain_graph(schedule, sends="rendezvous"), 2)
    run_s, run = best(lambda: plain_run(graph, duration_s), 2)
    assert np.array_equal(run.end_s, execute(build_graph(schedule, sends="rendezvous"), duration_s).end_s)
    rates = {"actions_per_s": len(schedule) / (build_s + run_s), "actions_per_s_prepared": len(schedule) / run_s}
    return {"benchmark": "engine plain", "schedule": name, "actions": len(schedule), **rates}


def measure_shared(name: str, pp: int, num_microbatches: int) -> dict[str, Any]:
    """Messages of eight ranks over one uplink that carries one of them at a time."""
    schedule = lowered(name, pp, num_microbatches)
    graph = build_graph(schedule, sends="rendezvous")
    is_send = np.isin(schedule.actions.kind, [int(kind) for kind in SENDS])
    duration_s = np.where(is_send, 0.5, unit_durations(schedule))
    routes = tuple({("uplink", rank // 8): 1.0} for rank in range(pp))
    traffic = Traffic(
        np.where(is_send, graph.rank, -1), routes, [1.0] * pp, {("uplink", rank): 1.0 for rank in range(-(-pp // 8))}
    )
    run_s, shared = best(lambda: execute_shared(graph, duration_s, traffic), 3)
    slower = float(shared.end_s.max() / execute(graph, duration_s).end_s.max())
    return {
        "benchmark": "engine shared links",
        "actions": len(schedule),
        "actions_per_s": len(schedule) / run_s,
        "slower_by": slower,
    }


def growth() -> None:
    """Time per size, and the power of the number of actions with which it grows."""
    reports = []
    for pp, num_microbatches in GROWTH:
        command = [sys.executable, __file__, "1F1B", str(pp), str(num_microbatches)]
        reports.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(json.dumps(reports[-1]), flush=True)
    print(
        json.dumps(
            {
                "benchmark": "engine growth",
                **{f"{name}_exponent": exponent(reports, name) for name in ("prepare_s", "run_s")},
            }
        )
    )


def exponent(reports: list[dict[str, Any]], name: str) -> float:
    """The slope of the least-squares line through the logarithms of time and number of actions."""
    x, y = (np.log([report[key] for report in reports]) for key in ("actions", name))
    return float(np.polyfit(x, y, 1)[0])


def lowered(name: str, pp: int, num_microbatches: int) -> Schedule:
    """A schedule of the catalog with its messages."""
    return lower(build(name, pp=pp, vpp=CHUNKS.get(name, 1), num_microbatches=num_microbatches))


def unit_durations(schedule: Schedule) -> np.ndarray:
    """F 1 s, B 2 s, I and W 1 s, an overlapped pair 3 s, the rest nothing."""
    table = np.zeros(len(Kind))
    table[[Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B]] = 1, 2, 1, 1, 3
    return table[schedule.actions.kind]


def best(function: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, Any]:
    """Least seconds of some repeats, and the last result."""
    least, result = math.inf, None
    for _ in range(repeats):
        result = None  # so that its memory is there for the next
        start = perf_counter()
        result = function()
        least = min(least, perf_counter() - start)
    return least, result


if __name__ == "__main__":
    main()
