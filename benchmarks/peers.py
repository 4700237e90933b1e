"""Tokens per second next to torch's own parallelism: DDP, FSDP2, DTensor tensor parallelism,
torch.distributed.pipelining.

    python benchmarks/peers.py [--only ddp pp_zbv ...] [--ranks 2 4] [--rounds 6] [--json]

Both train the same Llama from the same weights on the same batches, fp32, fast numerics, gloo, one thread a rank, in
the same rank processes: a round is one step of each, and the order changes with every round. A peer is timed only once
its losses and gradient norms of the first steps agree with ours. A ratio is ours over the peer's tokens per second, the
median over rounds with its 95% interval (order statistics, so whatever the distribution); next to it that of processor
time (the peer's over ours, all ranks together, to which waiting and other programs add nothing), and the peak of live
tensor storages on the worst rank, ours with the simulator's prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardproof import simulate
from shardproof.backend.launching.launch import Workers
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Train

MODEL = ModelSpec("peer-llama", 8, 384, 1024, 8, 8, 48, 512, 128)
"""14.5 M parameters in eight layers, so that four ranks can have two stages each."""
SEQUENCE, MICRO = 128, 2

CHECKED_STEPS = 2
"""Steps whose losses and norms are compared before anything is timed."""
AGREEMENT = 1e-4
"""How far apart they may be, relative: fp32 steps from equal weights, sums in other orders (7e-6 is seen)."""
WARM_ROUNDS = 1


@dataclass(frozen=True)
class Case:
    """One layout of ours, and the peer that has the same."""

    name: str
    peer: str
    plan: Plan


def case(
    name: str,
    peer: str,
    layout: Layout,
    schedule: str = "1F1B",
    *,
    microbatches: int,
    micro: int = MICRO,
    max_active_stages: int | None = None,
    **data_parallel: Any,
) -> Case:
    """`microbatches` are those of a data-parallel rank."""
    batch = Batch(microbatches * micro * layout.dp, micro, SEQUENCE)
    return Case(
        name,
        peer,
        Plan(
            MODEL,
            cluster_preset("this-host", layout.world_size),
            layout,
            batch,
            precision=Precision("fp32"),
            schedule=ScheduleChoice(schedule, max_active_stages=max_active_stages),
            numerics=Numerics("fast"),
            data_parallel=DataParallel(**data_parallel),
            train=Train(data=str(Path(__file__).parent)),
        ),
    )


def cases(ranks: int) -> list[Case]:
    """Every peer on so many ranks."""
    overlapped = {"bucket_bytes": 5_000_000, "overlap_grad_reduce": True}
    return [
        case("ddp", "ddp", Layout(dp=ranks), microbatches=2, **overlapped),
        case(
            "fsdp2",
            "fsdp2",
            Layout(dp=ranks, zero=3),
            microbatches=1,
            micro=2 * MICRO,
            max_active_stages=1,
            **overlapped,
        ),
        case("tp", "tp", Layout(tp=ranks, sequence_parallel=True), microbatches=2),
        case("pp_1f1b", "pp", Layout(pp=ranks), microbatches=2 * ranks),
        case("pp_interleaved", "pp", Layout(pp=ranks, vpp=2), "Interleaved1F1B", microbatches=2 * ranks),
        case("pp_zbv", "pp", Layout(pp=ranks, vpp=2), "ZBVZeroBubble", microbatches=2 * ranks),
    ]


@dataclass(frozen=True)
class Measured:
    """What one rank found: (loss, norm) of the checked steps and seconds and processor seconds of every round, ours and
    the peer's, and the peaks of live bytes."""

    totals: list[tuple[tuple[float, float], tuple[float, float]]]
    seconds: list[tuple[float, float]]
    cpu_seconds: list[tuple[float, float]]
    peak_bytes: tuple[int, int]


def measure_rank(transport: Any, job: tuple[Case, int, str]) -> Measured:
    """The job of one rank."""
    import torch.distributed as dist

    sys.path.append(str(Path(__file__).parent))
    from peer_trainers import PEERS

    from shardproof.backend.data.corpus import Corpus
    from shardproof.backend.ranks.live_memory import LiveMeter
    from shardproof.backend.ranks.training_rank import TrainingRank

    case, rounds, folder = job
    plan = case.plan
    warnings.simplefilter("ignore")  # torch's own deprecations
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as ours, which binds to 127.0.0.1
    store = dist.FileStore(f"{folder}/{case.name}", transport.world_size)
    dist.init_process_group("gloo", store=store, rank=transport.global_rank, world_size=transport.world_size)
    world = transport.group("peers", "world", range(transport.world_size))
    ours = TrainingRank(transport, plan)
    peer = PEERS[case.peer](plan, Corpus.load(plan.train.data), transport.global_rank)

    def our_step(step: int) -> tuple[float, float]:
        result, _ = ours.step(step)
        return result.loss, result.grad_norm

    totals = [(our_step(step), peer.step(step)) for step in range(CHECKED_STEPS)]
    meters = ours.live_meter(), LiveMeter(transport.global_rank)
    world.barrier()
    ours.step(CHECKED_STEPS, meter=meters[0])
    meters[1].hold(peer.tensors)
    with meters[1].watch():
        peer.step(CHECKED_STEPS)
    seconds, cpu_seconds = [], []
    for step in range(CHECKED_STEPS + 1, CHECKED_STEPS + 1 + WARM_ROUNDS + rounds):
        found = {}
        for name, run in ((0, our_step), (1, peer.step))[:: 1 if step % 2 else -1]:
            world.barrier()
            start_s, cpu_start_s = time.perf_counter(), time.process_time()
            run(step)
            found[name] = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        seconds.append((found[0][0], found[1][0]))
        cpu_seconds.append((found[0][1], found[1][1]))
    world.barrier()
    dist.destroy_process_group()
    return Measured(
        totals, seconds[WARM_ROUNDS:], cpu_seconds[WARM_ROUNDS:], (meters[0].peak_bytes, meters[1].peak_bytes)
    )


@dataclass(frozen=True)
class Row:
    """One case. `ratio` is ours over the peer's tokens per second with its interval, `cpu_ratio` the
    peer's over our processor seconds; the seconds are medians of a step; `apart` is the largest
    relative distance of losses and norms."""

    name: str
    ranks: int
    layout: str
    schedule: str
    ratio: float
    interval: tuple[float, float]
    cpu_ratio: float
    our_step_s: float
    peer_step_s: float
    our_tokens_per_s: float
    apart: float
    our_peak_bytes: int
    peer_peak_bytes: int
    predicted_peak_bytes: int
    peak_error: float


def measure(case: Case, rounds: int) -> Row:
    """A case on real processes. Raises `AssertionError` when the peer does not train as ours does."""
    plan = case.plan
    with tempfile.TemporaryDirectory() as folder, Workers(plan.layout.world_size, "shm", timeout_s=600) as workers:
        return row_of(case, workers.run(measure_rank, (case, rounds, folder)))


def row_of(case: Case, ranks: Sequence[Measured]) -> Row:
    """What the ranks found, together."""
    plan = case.plan
    pairs = [zip(*step, strict=True) for rank in ranks for step in rank.totals]
    apart = max(abs(ours / theirs - 1) for pair in pairs for ours, theirs in pair)
    assert apart <= AGREEMENT, (
        f"{case.name} on {len(ranks)} ranks trains otherwise: losses and norms are {apart:.1e} apart"
    )
    slowest = [
        tuple(max(each) for each in zip(*step, strict=True))
        for step in zip(*(rank.seconds for rank in ranks), strict=True)
    ]
    pairs = [
        tuple(sum(each) for each in zip(*step, strict=True))
        for step in zip(*(rank.cpu_seconds for rank in ranks), strict=True)
    ]
    ours_s, peer_s = (statistics.median(step[which] for step in slowest) for which in (0, 1))
    memory = simulate(plan).memory
    peaks = [
        (memory[plan.layout.coordinates(rank)["pp"]].peak_bytes, found.peak_bytes[0])
        for rank, found in enumerate(ranks)
    ]
    predicted, peak = max(peaks, key=lambda peak: abs(peak[0] / peak[1] - 1))
    return Row(
        case.name,
        len(ranks),
        plan.layout.degrees + (f" zero={plan.layout.zero}" if plan.layout.zero else ""),
        plan.schedule.name,
        statistics.median(peer / ours for ours, peer in slowest),
        interval_of_median([peer / ours for ours, peer in slowest]),
        statistics.median(peer / ours for ours, peer in pairs),
        ours_s,
        peer_s,
        plan.batch.global_size * plan.batch.sequence / ours_s,
        apart,
        max(rank.peak_bytes[0] for rank in ranks),
        max(rank.peak_bytes[1] for rank in ranks),
        predicted,
        predicted / peak - 1,
    )


def interval_of_median(values: Sequence[float], miss: float = 0.05) -> tuple[float, float]:
    """Order statistics between which the median lies but for a chance of `miss`, whatever the distribution: the
    sign test, turned round.

    All of the values for fewer than six, which cannot say so much.

    >>> interval_of_median([5, 1, 2, 3, 4, 6, 7, 8, 9, 10])
    (2, 9)
    """
    ordered, n = sorted(values), len(values)
    outside = 0
    while outside < (n - 1) // 2 and 2 * sum(math.comb(n, k) for k in range(outside + 1)) / 2**n <= miss:
        outside += 1
    lowest = max(outside - 1, 0)
    return ordered[lowest], ordered[n - 1 - lowest]


def line(row: Row) -> str:
    """A row for people."""
    low, high = row.interval
    return (
        f"{row.name:15} {row.ranks} ranks {row.layout:28} ratio {row.ratio:5.2f} [{low:.2f}, {high:.2f}]  processor "
        f"{row.cpu_ratio:5.2f}  "
        f"ours {row.our_step_s * 1e3:6.1f} ms, peer {row.peer_step_s * 1e3:6.1f} ms  apart {row.apart:.0e}  "
        f"peak {row.our_peak_bytes / 1e6:6.1f} MB (predicted {row.peak_error:+.1%}), peer "
        f"{row.peer_peak_bytes / 1e6:6.1f} MB"
    )


def main() -> None:
    known = [case.name for case in cases(2)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--json",
        action="store_true",
        help=('one object: {"ratios": {name: ratio, the smaller of all numbers of ranks}, "rows": [...]}'),
    )
    args = parser.parse_args()
    rows = []
    for each in (each for ranks in args.ranks for each in cases(ranks) if each.name in args.only):
        rows.append(measure(each, args.rounds))
        print(line(rows[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        ratios = {
            name: min(row.ratio for row in rows if row.name == name) for name in dict.fromkeys(row.name for row in rows)
        }
        print(json.dumps({"ratios": ratios, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
