"""What a ledger costs: digests and summaries in GB/s of one core, and training steps with a ledger
against the same steps without.

    python benchmarks/ledger.py [--model tiny-llama] [--steps 4] [--rounds 3] [--json]

Runs with and without alternate in one process over the in-memory transport with one rank; what counts is processor
time, of several steps and rounds the middle. Every step writes all its lines. Numbers are in docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from shardproof.backend.launching.launch import run_ranks
from shardproof.core.base.digest import digest
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Precision
from shardproof.core.plan.train import Train
from shardproof.verify.ledger.summary import summarize
from shardproof.verify.run.record import LedgerObservers

if TYPE_CHECKING:
    from shardproof.backend.transport.base import Transport

ELEMENTS = 1 << 24


def rate(function: Callable[[np.ndarray], object]) -> float:
    """GB/s of processor time over 64 MB of fp32, the best of five."""
    values = np.random.default_rng(0).normal(size=ELEMENTS).astype(np.float32)
    best = min(_seconds(lambda: function(values)) for _ in range(5))
    return values.nbytes / best / 1e9


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def step_seconds(outer: Transport, given: tuple[Plan, int, int]) -> tuple[float, float, float]:
    """Processor seconds of one training step without and with a ledger, and those of the second inside of the ledger.

    Inside is all that an observer is shown and does, gradients divided for its eyes among it. Of the steps
    with a ledger the middle one is printed, by the share inside. The process is that of a rank, whose memory
    is kept as ranks keep it.
    """
    from shardproof.backend.ranks.training_rank import TrainingRank
    from shardproof.backend.transport.memory import MemoryWorld, run_threads

    del outer  # the ranks that are timed have worlds of their own
    plan, steps, rounds = given

    def job(transport: Transport, folder: Path | None) -> list[tuple[float, float]]:
        inside = [0.0]
        observer = None if folder is None else LedgerObservers(plan, folder)(0)
        rank, found = TrainingRank(transport, plan, observer=observer), []
        if observer is not None:
            time_methods(inside, observer, ("activation", "_samples"))
            time_methods(inside, rank._observation, ("gradients", "changed", "refreshed"))
        for step in range(1 + steps):
            inside[0] = 0.0
            found.append((_seconds(lambda step=step: rank.step(step)), inside[0]))  # type: ignore[misc]
        return found[1:]

    found: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            for times, folder in zip(found, (None, Path(name)), strict=True):
                times += run_threads(MemoryWorld(1, timeout_s=600), job, folder)[0]
    by_share = sorted(found[1], key=lambda each: each[1] / each[0])
    return median(seconds for seconds, _ in found[0]), *by_share[len(by_share) // 2]


def time_methods(inside: list[float], owner: object, names: tuple[str, ...]) -> None:
    """From now on these methods add their processor seconds to `inside[0]`, also when one calls another."""

    def wrapped(method: Callable[..., None]) -> Callable[..., None]:
        def call(*given: object) -> None:
            before_s, start_s = inside[0], time.thread_time()
            method(*given)
            inside[0] = before_s + time.thread_time() - start_s

        return call

    for name in names:
        setattr(owner, name, wrapped(getattr(owner, name)))


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--mode", choices=("fast", "exact"), default="fast")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    preset = model_preset(args.model)
    hidden = args.hidden
    model = replace(
        preset,
        num_layers=args.layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        head_dim=hidden // preset.num_heads,
        max_positions=args.sequence,
    )
    plan = Plan(
        model,
        cluster_preset("this-host", 1),
        Layout(),
        Batch(args.samples, 1, args.sequence),
        precision=Precision("fp32"),
        train=Train(steps=1),
    )
    plan = replace(plan, numerics=replace(plan.numerics, mode=args.mode))
    given = plan, args.steps, args.rounds
    ((without, with_ledger, inside),) = run_ranks(step_seconds, given, world_size=1, transport="memory")
    report = {
        "digest_gb_per_s": rate(digest),
        "summary_gb_per_s": rate(summarize),
        "step_s": without,
        "step_with_ledger_s": with_ledger,
        "ledger_s": inside,
        "cost": inside / (with_ledger - inside),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(f"digest {report['digest_gb_per_s']:.1f} GB/s, summary {report['summary_gb_per_s']:.1f} GB/s of one core")
        print(
            f"step {without:.3f} s, with a ledger {with_ledger:.3f} s; {inside:.3f} s of it in the ledger: "
            f"{100 * report['cost']:.1f}% more"
        )


if __name__ == "__main__":
    main()
