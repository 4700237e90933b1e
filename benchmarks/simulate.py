"""Time of one simulation of a 1,024-GPU and of a 3,072-GPU plan, and of a layout search; prints one JSON line.

Usage: python benchmarks/simulate.py
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter

from shardproof.core.commands.options import SearchSpace
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Batch
from shardproof.simulator.search.search import search
from shardproof.simulator.simulation.simulate import simulate

REPEATS = 10


def main() -> None:
    """GPT-3 175B on 1,024 A100 (tp8 pp8 dp16, 96 microbatches) and 1T on 3,072 (tp8 pp64 dp6, 512 microbatches), once
    cold and then warm, and the search over the layouts of the first."""
    model, cluster = model_preset("gpt3-175b"), cluster_preset("dgx-a100-80g", 1024)
    batch = Batch(1536, 1, 2048)
    plan = Plan(
        model,
        cluster,
        Layout(tp=8, pp=8, dp=16, zero=1, sequence_parallel=True),
        batch,
        recompute=Recompute("selective"),
    )
    times_s = [_simulate_s(plan) for _ in range(REPEATS)]
    large = Plan(
        model_preset("megatron-1t"),
        cluster_preset("dgx-a100-80g", 3072),
        Layout(tp=8, pp=64, dp=6, sequence_parallel=True),
        Batch(3072, 1, 2048),
        recompute=Recompute("selective"),
    )
    large_s = [_simulate_s(large) for _ in range(REPEATS)]
    found = search(SearchSpace(model, cluster, batch)).report
    report = {
        "benchmark": "simulate",
        "num_devices": plan.layout.world_size,
        "first_s": times_s[0],
        "again_s": min(times_s[1:]),
        "large_num_devices": large.layout.world_size,
        "large_first_s": large_s[0],
        "large_again_s": min(large_s[1:]),
        "large_median_s": median(large_s[1:]),
        "search_evaluated": found["evaluated"],
        "search_simulated": found["simulated"],
        "search_s": found["elapsed_s"],
        "search_layouts_per_s": found["evaluated"] / found["elapsed_s"],
    }
    print(json.dumps(report))


def _simulate_s(plan: Plan) -> float:
    start = perf_counter()
    simulate(plan)
    return perf_counter() - start


if __name__ == "__main__":
    main()
