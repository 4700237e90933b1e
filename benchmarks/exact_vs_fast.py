"""What exact numerics cost: training steps of a 4-layer model, exact and fast in turn in one process,
and where the time goes.

    python benchmarks/exact_vs_fast.py [--hidden 768 2048] [--tp 1 4] [--dtype fp32] [--rounds 3] [--parts] [--json]

Both modes run the same layers, schedule, transport and optimizer on the same batch. The ranks are threads of this
process, on one core each, which runs in the environment of ranks (`backend.launching.launch.rank_environment`). What
counts is the processor time of the process, so waiting and other programs do not enter. Both modes take turns in going
first, a round's ratio is that of two steps that ran one after the other, and the median over rounds is printed, with
the least and the largest. `--parts` says where it goes: seconds inside each operation of `Numerics`, summed over ranks,
and all the rest, to which belong weight gradients that fast numerics add straight to their sums. Hidden 2048 with four
layers takes 13 GB. Numbers are in docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import process_time, thread_time
from typing import Any

from shardproof.backend.launching.launch import rank_environment

if (
    __name__ == "__main__"
    and not os.environ.items() >= (wanted := rank_environment(os.environ, Path(tempfile.gettempdir()))).items()
):
    os.execve(sys.executable, [sys.executable, *sys.argv], wanted)  # libraries read it when they are loaded

import torch

from shardproof.backend.numerics import make_numerics
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision

MODELS = {
    768: ModelSpec(
        "gpt-768", 4, 768, 3072, 12, 12, 64, 8192, 1024,
        activation="gelu", norm="layernorm", position="learned", tied_embeddings=True, bias=True,
    ),
    2048: ModelSpec("llama-2048", 4, 2048, 5632, 16, 8, 128, 8192, 1024),
}  # fmt: skip
MODES = ("fast", "exact")


@dataclass
class Parts:
    """Processor seconds of a rank's threads by operation."""

    seconds: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is added under `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start_s = thread_time()
            result = function(*args, **kwargs)
            with self.lock:
                self.seconds[name] += thread_time() - start_s
            return result

        return run


class TimedNumerics:
    """A `Numerics` whose operations are timed."""

    def __init__(self, numerics: Any, parts: Parts):
        self._numerics = numerics
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._numerics, name)
        return self._parts.timed(name, value) if callable(value) else value


@dataclass(frozen=True)
class Step:
    """Processor seconds of an optimizer step, all ranks together, and of its operations."""

    seconds: float
    parts: dict[str, float]


class Run:
    """All ranks of one plan as threads of this process, ready to step."""

    def __init__(self, plan: Plan, *, parts: bool):
        self.parts = Parts()
        self._world = MemoryWorld(plan.layout.world_size)
        self._ranks: list[TrainingRank] = self._on_all_ranks(lambda rank: self._rank(plan, rank, parts))

    def step(self, number: int) -> Step:
        """One optimizer step."""
        self.parts.seconds.clear()
        start_s = process_time()
        self._on_all_ranks(lambda rank: self._ranks[rank].step(number))
        taken_s = process_time() - start_s
        return Step(taken_s, {**self.parts.seconds, "the rest": taken_s - sum(self.parts.seconds.values())})

    def _rank(self, plan: Plan, global_rank: int, parts: bool) -> TrainingRank:
        numerics: Any = make_numerics(plan)
        timed = TimedNumerics(numerics, self.parts) if parts else numerics
        return TrainingRank(self._world.transport(global_rank), plan, numerics=timed)

    def _on_all_ranks(self, job: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self._world.world_size

        def run(rank: int) -> None:
            try:
                results[rank] = job(rank)
            except BaseException as error:
                self._world.abort(f"rank {rank}: {error}")
                raise

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def plan_of(mode: str, options: argparse.Namespace, *, hidden: int, tp: int, dtype: str) -> Plan:
    """The benchmark's plan."""
    layout = Layout(tp=tp, sequence_parallel=options.sequence_parallel and tp > 1)
    return Plan(
        replace(MODELS[hidden], num_layers=options.layers),
        cluster_preset("this-host", tp),
        layout,
        Batch(options.samples, options.micro, options.sequence),
        precision=Precision(dtype),
        numerics=Numerics(mode),
    )


def measure(options: argparse.Namespace, *, hidden: int, tp: int, dtype: str) -> dict[str, Any]:
    """Seconds per step of both modes and their ratio, medians over the rounds, the ratio's extremes, and the parts
    of the middle rounds."""
    runs = {mode: Run(plan_of(mode, options, hidden=hidden, tp=tp, dtype=dtype), parts=options.parts) for mode in MODES}
    steps: dict[str, list[Step]] = {mode: [] for mode in MODES}
    for number in range(options.rounds + 1):
        for mode in MODES if number % 2 else reversed(MODES):
            steps[mode].append(runs[mode].step(number))
    counted = {mode: found[1:] for mode, found in steps.items()}  # the first one makes the optimizer's state
    ratios = [exact.seconds / fast.seconds for exact, fast in zip(counted["exact"], counted["fast"], strict=True)]
    middle = {mode: sorted(found, key=lambda step: step.seconds)[len(found) // 2] for mode, found in counted.items()}
    return {
        "hidden": hidden,
        "tp": tp,
        "dtype": dtype,
        "tokens": options.samples * options.sequence,
        **{f"{mode}_s": median(step.seconds for step in found) for mode, found in counted.items()},
        "ratio": median(ratios),
        "ratios": [min(ratios), max(ratios)],
        **({"parts_s": {mode: step.parts for mode, step in middle.items()}} if options.parts else {}),
    }


def table(parts_s: dict[str, dict[str, float]]) -> str:
    """Both modes' seconds by operation, the most expensive first."""
    names = sorted(
        {name for mode in MODES for name in parts_s[mode]}, key=lambda name: -parts_s["exact"].get(name, 0.0)
    )
    rows = [(name, *(parts_s[mode].get(name, 0.0) for mode in MODES)) for name in names]
    return "\n".join(
        (f"    {name:22} fast {fast:7.3f} s  exact {exact:7.3f} s  {exact - fast:+7.3f} s")
        for name, fast, exact in rows
    )


def main() -> None:
    """Prints seconds of both modes and their ratio for every choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--micro", type=int, default=1, help="samples per microbatch")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each mode that count, after one that does not")
    parser.add_argument("--parts", action="store_true", help="say where the time goes")
    parser.add_argument("--json", action="store_true", help="one JSON line per choice")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for hidden in options.hidden:
        for tp in options.tp:
            for dtype in options.dtype:
                found = measure(options, hidden=hidden, tp=tp, dtype=dtype)
                if options.json:
                    print(json.dumps(found), flush=True)
                    continue
                print(
                    f"hidden {hidden}, tp {tp}, {dtype}: fast {found['fast_s']:.2f} s, exact {found['exact_s']:.2f} "
                    "s per step, "
                    f"exact / fast = {found['ratio']:.3f} [{found['ratios'][0]:.3f}, {found['ratios'][1]:.3f}]",
                    flush=True,
                )
                if options.parts:
                    print(table(found["parts_s"]), flush=True)


if __name__ == "__main__":
    main()
