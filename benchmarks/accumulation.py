"""Weight gradients added to their sums in place, or made first and then added: seconds and bytes of a step.

    python benchmarks/accumulation.py [--hidden 256] [--vocabulary 32768] [--rounds 7] [--json]

Both ways run a dense model and one with experts on one rank, a step of each alternately, on equal weights and batches,
and must have losses that are equal to 1e-5 in fp32. Peak bytes are those of all tensors alive at once. Numbers are in
docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from prefixed import Prefixed  # next to this file

from shardproof.backend.launching.launch import run_ranks
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision

MICROBATCHES = 4


@dataclass(frozen=True)
class Way:
    """Median over the rounds, and the most bytes of one step."""

    step_s: float
    peak_bytes: int


def plan_of(hidden: int, vocabulary: int, *, experts: bool, dtype: str) -> Plan:
    extra = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": hidden} if experts else {}
    name = "experts" if experts else "dense"
    model = ModelSpec(name, 4, hidden, 4 * hidden, 4, 4, hidden // 4, vocabulary, 64, **extra)
    precision, batch = Precision(dtype), Batch(MICROBATCHES, 1, 64)
    return Plan(model, cluster_preset("this-host", 1), Layout(), batch, numerics=Numerics("fast"), precision=precision)


@contextmanager
def sums_of(in_place: bool) -> Iterator[None]:
    """Inside, accumulators add in place, or make a tensor of every contribution first."""
    from shardproof.backend.numerics import fast
    from shardproof.backend.numerics.token_product import AddedInPlace

    original = fast.FastAccumulator.add

    def add(self: Any, first_sample: int, contribution: Any) -> None:
        made = contribution.total() if isinstance(contribution, AddedInPlace) else contribution
        original(self, first_sample, made)

    if not in_place:
        fast.FastAccumulator.add = add  # type: ignore[method-assign]
    try:
        yield
    finally:
        fast.FastAccumulator.add = original  # type: ignore[method-assign]


def measure_rank(transport: Any, job: tuple[Plan, int]) -> dict[bool, Way]:
    """Both ways by whether sums are made in place."""
    from shardproof.backend.ranks.live_memory import LiveMeter
    from shardproof.backend.ranks.training_rank import TrainingRank

    plan, rounds = job
    ranks = {in_place: TrainingRank(Prefixed(transport, f"in place {in_place}"), plan) for in_place in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    meters = {in_place: LiveMeter(0) for in_place in ranks}
    for step in range(rounds + 2):
        losses = []
        for in_place, rank in ranks.items():
            with sums_of(in_place):
                if step < 2:  # the first makes the optimizer's state, and shows the meter all that stays
                    meters[in_place].peak_bytes = 0
                    with meters[in_place].watch():
                        result, _ = rank.step(step)
                else:
                    start_s = time.perf_counter()
                    result, _ = rank.step(step)
                    seconds[in_place].append(time.perf_counter() - start_s)
            losses.append(float(result.loss))
        assert abs(losses[0] - losses[1]) <= 1e-5 * losses[0] or plan.precision.dtype != "fp32", losses
    return {in_place: Way(median(seconds[in_place]), meters[in_place].peak_bytes) for in_place in ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = {}
    for experts in (False, True):
        for dtype in ("fp32", "bf16"):
            plan = plan_of(args.hidden, args.vocabulary, experts=experts, dtype=dtype)
            (ways,) = run_ranks(measure_rank, (plan, args.rounds), world_size=1, transport="shm")
            report[f"{plan.model.name} {dtype}"] = {
                "in place" if in_place else "then added": asdict(way) for in_place, way in ways.items()
            }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for name, found in report.items():
        for label, way in found.items():
            print(f"{name:14} {label:10}  step {1e3 * way['step_s']:7.1f} ms  most {way['peak_bytes'] / 1e6:7.1f} MB")


if __name__ == "__main__":
    main()
