"""What differences between devices cost to simulate; prints one JSON line. Usage: python benchmarks/variation.py

GPT-3 175B (tp 8, pp 8) on 1,024 A100: without variation, with a slow device and a slow card, 100 drawn steps, the
sensitivity to every number of the cluster; and on 100,352 devices with a slow device, a slow node and one drawn step.
Fails when a plan without variation takes longer than 1 ms, or 100,352 devices longer than a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Batch
from shardproof.simulator.search.sensitivity import sensitivity
from shardproof.simulator.simulation.simulate import simulate

REPEATS = 5
DIFFERENT = Variation(stragglers={"device-17": 1.3}, slow_links={"card-3-1": 0.5})


def plan_of(dp: int, microbatches: int, variation: Variation) -> Plan:
    """GPT-3 175B on 64 x dp devices."""
    layout = Layout(tp=8, pp=8, dp=dp, zero=1, sequence_parallel=True)
    cluster = cluster_preset("dgx-a100-80g", layout.world_size)
    batch = Batch(dp * microbatches, 1, 2048)
    return Plan(
        model_preset("gpt3-175b"), cluster, layout, batch, recompute=Recompute("selective"), variation=variation
    )


def best_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest of some repeats."""
    found = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        found.append(perf_counter() - start)
    return min(found)


def main() -> None:
    """Measures and prints."""
    plain, different = plan_of(16, 96, Variation()), plan_of(16, 96, DIFFERENT)
    drawn = replace(
        different, variation=replace(DIFFERENT, jitter=0.02, device_spread=0.02, hiccups_per_s=1e-4, hiccup_s=1.0)
    )
    large = plan_of(1568, 48, Variation(stragglers={"device-17": 1.3}, slow_links={"node-3": 0.5}))
    large_drawn = replace(large, variation=Variation(jitter=0.02, samples=1))
    found = {
        "plain_s": best_s(lambda: simulate(plain), 50),
        "different_s": best_s(lambda: simulate(different)),
        "drawn_100_s": best_s(lambda: simulate(drawn), 2),
        "sensitivity_s": best_s(lambda: sensitivity(plain), 2),
        "devices_100352_s": best_s(lambda: simulate(large), 3),
        "devices_100352_drawn_s": best_s(lambda: simulate(large_drawn), 2),
    }
    print(json.dumps({"benchmark": "variation", **found}))
    assert found["plain_s"] < 1e-3 and found["devices_100352_s"] < 1.0, "too slow"


if __name__ == "__main__":
    main()
