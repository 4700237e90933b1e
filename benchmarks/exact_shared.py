"""Exact training over shared memory against fast training over gloo: what bits that do not depend on the layout cost
where the ranks of a host share memory.

    python benchmarks/exact_shared.py [--hidden 256 768] [--tp 2 4] [--rounds 9] [--leaves 8] [--head-leaves 4] [--json]

Both train a GPT of four layers, fp32, tensor-parallel, in the same rank processes, one thread a rank, and take turns in
going first. A ratio is exact over fast, seconds of the slowest rank's step: the median over rounds with its 95%
interval (order statistics), and next to it that of processor time. `--leaves` is how many leaves the sums over MLP
units and vocabulary rows have, `--head-leaves` those over heads, both at least tp. Numbers are in docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.backend.launching.launch import Workers
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision

SEQUENCE, MICRO, GLOBAL = 128, 2, 4
WARM_STEPS = 2
VOCABULARY = 4096


@dataclass(frozen=True)
class Row:
    """Seconds are medians of a step of the slowest rank."""

    hidden: int
    tp: int
    leaves: int
    head_leaves: int
    ratio: float
    interval: tuple[float, float]
    processor_ratio: float
    exact_s: float
    fast_s: float


def plans(hidden: int, tp: int, leaves: int, head_leaves: int = 4) -> dict[str, Plan]:
    """The two plans, by mode."""
    heads = hidden // 64
    model = ModelSpec(
        f"gpt-{hidden}", 4, hidden, 4 * hidden, heads, heads, 64, VOCABULARY, SEQUENCE,
        activation="gelu", norm="layernorm", position="learned", tied_embeddings=True, bias=True,
    )  # fmt: skip
    fast = Plan(
        model,
        cluster_preset("this-host", tp),
        Layout(tp=tp),
        Batch(GLOBAL, MICRO, SEQUENCE),
        precision=Precision("fp32"),
        numerics=Numerics("fast"),
    )
    blocks = {
        "head_block": max(1, heads // head_leaves),
        "ffn_block": 4 * hidden // leaves,
        "vocab_block": VOCABULARY // leaves,
    }
    return {"exact": replace(fast, numerics=Numerics("exact", **blocks)), "fast": fast}


def measure_rank(transport: Any, job: tuple[dict[str, Plan], int, str]) -> list[dict[str, tuple[float, float]]]:
    """The job of one rank: seconds and processor seconds of every round by mode."""
    import torch.distributed as dist

    from shardproof.backend.ranks.training_rank import TrainingRank
    from shardproof.backend.transport.process_group import ProcessGroupTransport

    by_mode, rounds, folder = job
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, size = transport.global_rank, transport.world_size
    store = dist.FileStore(f"{folder}/store", size)
    with ProcessGroupTransport(store, rank, size) as gloo:
        meeting = gloo.group("meeting", "world", range(size))
        trainers = {
            "exact": TrainingRank(transport, by_mode["exact"]),
            "fast": TrainingRank(gloo, by_mode["fast"]),
        }
        found: list[dict[str, tuple[float, float]]] = []
        for step in range(WARM_STEPS + rounds):
            seconds = {}
            for mode in ("exact", "fast")[:: 1 if step % 2 else -1]:
                meeting.barrier()
                start_s, processor_s = time.perf_counter(), time.process_time()
                trainers[mode].step(step)
                seconds[mode] = time.perf_counter() - start_s, time.process_time() - processor_s
            found.append(seconds)
        meeting.barrier()
    return found[WARM_STEPS:]


def measure(hidden: int, tp: int, leaves: int, head_leaves: int, rounds: int) -> Row:
    """One model on `tp` processes."""
    from peers import interval_of_median

    leaves, head_leaves = max(leaves, tp), max(head_leaves, tp)
    with tempfile.TemporaryDirectory() as folder, Workers(tp, "shm", timeout_s=600) as workers:
        ranks = workers.run(measure_rank, (plans(hidden, tp, leaves, head_leaves), rounds, folder))
    steps = list(zip(*ranks, strict=True))
    slowest = [{mode: max(rank[mode][0] for rank in step) for mode in ("exact", "fast")} for step in steps]
    processor = [{mode: sum(rank[mode][1] for rank in step) for mode in ("exact", "fast")} for step in steps]
    ratios = [step["exact"] / step["fast"] for step in slowest]
    return Row(
        hidden,
        tp,
        leaves,
        head_leaves,
        statistics.median(ratios),
        interval_of_median(ratios),
        statistics.median(step["exact"] / step["fast"] for step in processor),
        statistics.median(step["exact"] for step in slowest),
        statistics.median(step["fast"] for step in slowest),
    )


def main() -> None:
    """Prints a row for each model and degree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", nargs="+", type=int, default=[256, 768])
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--head-leaves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))
    rows = []
    for hidden in args.hidden:
        for tp in args.tp:
            rows.append(measure(hidden, tp, args.leaves, args.head_leaves, args.rounds))
            row = rows[-1]
            print(
                f"hidden {row.hidden:4} tp{row.tp} {row.leaves} leaves, {row.head_leaves} of heads  "
                f"exact / fast {row.ratio:.2f} [{row.interval[0]:.2f}, {row.interval[1]:.2f}]  "
                f"processor {row.processor_ratio:.2f}  "
                f"exact {row.exact_s * 1e3:.0f} ms, fast {row.fast_s * 1e3:.0f} ms",
                file=sys.stderr if args.json else sys.stdout,
                flush=True,
            )
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
