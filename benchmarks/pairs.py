"""What turns hide: seconds of collectives inside pairs that no product covers, with
`runtime.ep_comm_overlap` and without, over gloo.

    python benchmarks/pairs.py [--ranks 2] [--hidden 256] [--wire-bytes-per-s 2e8] [--rounds 7] [--json]

Both ways run the same experts, weights and batches in the same processes, a step of each alternately, and must have
equal losses. Exposed are, without turns, the seconds inside exchanges of a pair; with turns, those in which neither
part computed (there are more inside exchanges then, because a rank may come late while its other part computes). On one
machine gloo moves bytes by the processors that compute, so the second table puts a wire between the ranks: every
exchange of tokens takes longer by its bytes over `--wire-bytes-per-s`, in which the processors are free, as they are
while a network card works. Numbers are in docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from prefixed import Prefixed  # next to this file

from shardproof.backend.launching.launch import run_ranks
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch, Numerics, Precision, ScheduleChoice
from shardproof.core.schedule.action import Kind


@dataclass(frozen=True)
class Job:
    """One table. `wire_bytes_per_s` is None for the machine as it is."""

    plan: Plan
    rounds: int
    wire_bytes_per_s: float | None


@dataclass(frozen=True)
class Way:
    """Medians over the rounds, of the slowest rank. `hidden` is the share of the seconds in collectives
    that a product covered."""

    step_s: float
    in_collectives_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        return 1 - self.exposed_s / self.in_collectives_s


@dataclass
class Meter:
    """Seconds of one rank inside collectives of pairs, over all threads."""

    seconds: float = 0.0


def plan_of(ranks: int, hidden: int) -> Plan:
    """Pairs on every rank, experts spread over all of them."""
    experts = {"num_experts": 4 * ranks, "experts_per_token": 2, "expert_ffn_hidden_size": 2 * hidden}
    model = ModelSpec("pairs", 4, hidden, 2 * hidden, 4, 4, hidden // 4, 512, 128, **experts)
    layout = Layout(dp=ranks, ep=ranks)
    choices = {"schedule": ScheduleChoice("Combined1F1B"), "numerics": Numerics("fast"), "precision": Precision("fp32")}
    return Plan(model, cluster_preset("this-host", ranks), layout, Batch(8 * ranks, 1, 128), **choices)


def measure_rank(transport: Any, job: Job) -> dict[bool, list[tuple[float, float, float]]]:
    """`(step, in collectives, exposed)` seconds of every round by whether parts took turns."""
    from shardproof.backend.ranks.training_rank import TrainingRank

    world = transport.group("world", "world", range(transport.world_size))
    meters = {turns: Meter() for turns in (False, True)}
    plans = {turns: replace(job.plan, runtime=Runtime(ep_comm_overlap=turns or None)) for turns in meters}
    ranks = {
        turns: TrainingRank(Metered(transport, f"turns {turns}", meters[turns], job), plans[turns]) for turns in meters
    }
    found: dict[bool, list[tuple[float, float, float]]] = {turns: [] for turns in meters}
    for step in range(job.rounds + 1):
        losses = set()
        for turns, rank in ranks.items():
            before_s, idle_s = meters[turns].seconds, rank.baton.idle_s if rank.baton is not None else 0.0
            world.barrier()
            result, _ = rank.step(step)
            inside_s = meters[turns].seconds - before_s
            exposed_s = rank.baton.idle_s - idle_s if rank.baton is not None else inside_s
            losses.add(result.loss)
            if step:  # the first warms up
                found[turns].append((result.elapsed_s, inside_s, exposed_s))
        assert len(losses) == 1, f"turns changed the loss of step {step}: {losses}"
    return found


class Metered(Prefixed):
    """Groups are timed inside pairs, and send tokens over the wire."""

    def __init__(self, transport: Any, prefix: str, meter: Meter, job: Job):
        super().__init__(transport, prefix)
        self._meter, self._wire = meter, job.wire_bytes_per_s
        self._lock = threading.Lock()
        num_microbatches = job.plan.num_microbatches
        self._paired = {(Kind.F, m) for m in range(1, num_microbatches)} | {
            (Kind.B, m) for m in range(num_microbatches - 1)
        }

    def group(self, name: str, axis: str, ranks: Any, **how: Any) -> Any:
        group = super().group(name, axis, ranks, **how)
        if axis == "ep":
            group.all_to_all = self._timed(group, group.all_to_all)
        return group

    def _timed(self, group: Any, exchange: Any) -> Any:
        def run(parts: Any, shapes: Any) -> Any:
            start_s = time.perf_counter()
            received = exchange(parts, shapes)
            if self._wire is not None:
                time.sleep(sum(part.nbytes for rank, part in enumerate(parts) if rank != group.rank) / self._wire)
            action, _ = self._transport.recorder.scope
            if action is not None and (action.kind, action.microbatch) in self._paired:
                with self._lock:
                    self._meter.seconds += time.perf_counter() - start_s
            return received

        return run


def measure(job: Job) -> dict[bool, Way]:
    """Both ways by whether parts took turns."""
    by_rank = run_ranks(measure_rank, job, world_size=job.plan.layout.world_size, transport="shm")
    ways = {}
    for turns in (False, True):
        rounds = [[rank[turns][i] for rank in by_rank] for i in range(job.rounds)]
        ways[turns] = Way(*(median(max(rank[part] for rank in each) for each in rounds) for part in range(3)))
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--wire-bytes-per-s", type=float, default=2e8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = {}
    for wire in (None, args.wire_bytes_per_s):
        ways = measure(Job(plan_of(args.ranks, args.hidden), args.rounds, wire))
        name = "gloo alone" if wire is None else f"gloo and a wire of {wire / 1e9:g} GB/s"
        report[name] = {
            "in turns" if turns else "one after the other": {**asdict(way), "hidden": way.hidden}
            for turns, way in ways.items()
        }
        if not args.json:
            print(
                f"{name}, {args.ranks} ranks, hidden {args.hidden}, medians of {args.rounds} steps each, losses equal"
            )
            for label, way in report[name].items():
                print(
                    f"  {label:22} step {1e3 * way['step_s']:7.1f} ms   in exchanges "
                    f"{1e3 * way['in_collectives_s']:7.1f} ms   "
                    f"exposed {1e3 * way['exposed_s']:7.1f} ms   hidden {way['hidden']:4.0%}"
                )
    if args.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
