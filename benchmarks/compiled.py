"""What `runtime.compile` gains on a CPU: seconds that the processors work on a step with compiled kernels between
products, and without.

    python benchmarks/compiled.py [--ranks 1] [--hidden 512] [--sequence 256] [--rounds 9] [--json]

Both ways train the same weights on the same batches in the same processes, a step of each alternately, in fast
numerics; losses must agree within rounding. The first steps compile and are not counted. Counted is the time that the
system charges to a rank, which other programs of the machine change less than they do the wall's. Numbers are in
docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from prefixed import Prefixed  # next to this file

from shardproof.backend.launching.launch import run_ranks
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch, Numerics, Precision

WARM_UP = 2
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True)
class Job:
    """One line of the table."""

    plan: Plan
    rounds: int


def plan_of(ranks: int, hidden: int, sequence: int, dtype: str) -> Plan:
    """A small Llama on tp ranks."""
    ffn = hidden * 11 // 4
    choices = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope"}
    model = ModelSpec("compiled", 4, hidden, ffn, hidden // 64, hidden // 64, 64, 512, sequence, **choices)
    layout = Layout(tp=ranks)
    given = {"numerics": Numerics("fast"), "precision": Precision(dtype)}
    return Plan(model, cluster_preset("this-host", ranks), layout, Batch(4, 2, sequence), **given)


def measure_rank(transport: Any, job: Job) -> dict[bool, list[float]]:
    """Processor seconds of every round by whether kernels were compiled."""
    from shardproof.backend.ranks.training_rank import TrainingRank

    world = transport.group("world", "world", range(transport.world_size))
    ranks = {
        compiles: TrainingRank(Prefixed(transport, str(compiles)), _with(job.plan, compiles=compiles))
        for compiles in (False, True)
    }
    found: dict[bool, list[float]] = {False: [], True: []}
    for step in range(job.rounds + WARM_UP):
        losses = []
        for compiles, rank in ranks.items():
            world.barrier()
            start_s = time.process_time()
            result, _ = rank.step(step)
            spent_s = time.process_time() - start_s
            losses.append(result.loss)
            if step >= WARM_UP:
                found[compiles].append(spent_s)
        assert abs(losses[0] - losses[1]) < LOSS_TOLERANCE[job.plan.precision.dtype], f"step {step}: losses {losses}"
    return found


def _with(plan: Plan, *, compiles: bool) -> Plan:
    return replace(plan, runtime=Runtime(compile=compiles))


def measure(job: Job) -> dict[str, float]:
    """Medians over the rounds, of the slowest rank, and of the ratio round by round."""
    by_rank = run_ranks(measure_rank, job, world_size=job.plan.layout.world_size, transport="shm")
    slowest = {way: [max(each) for each in zip(*(rank[way] for rank in by_rank), strict=True)] for way in (False, True)}
    ratios = [off / on for off, on in zip(slowest[False], slowest[True], strict=True)]
    return {
        "eager_s": median(slowest[False]),
        "compiled_s": median(slowest[True]),
        "gain": median(ratios),
        "least_gain": min(ratios),
        "most_gain": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = {}
    for dtype in ("fp32", "bf16"):
        found = report[dtype] = measure(Job(plan_of(args.ranks, args.hidden, args.sequence, dtype), args.rounds))
        if not args.json:
            print(
                f"{dtype}, {args.ranks} ranks, hidden {args.hidden}: step {1e3 * found['eager_s']:.1f} ms, compiled "
                f"{1e3 * found['compiled_s']:.1f} ms, {found['gain']:.2f}x ({found['least_gain']:.2f} to "
                f"{found['most_gain']:.2f}), medians of {args.rounds}"
            )
    if args.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
