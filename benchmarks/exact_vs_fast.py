"""Seconds per step of exact and fast numerics on one device: hidden 512, sequence 256, a Llama-style model of two layers.

    python benchmarks/exact_vs_fast.py [--micro 2] [--rounds 8]

Both run the same layers on the same batch, in turn; the best of several rounds counts, because the machine is shared.
Measured on 2 cores of an AMD EPYC (AVX512), torch 2.13: exact takes 1.1 to 1.2 times as long as fast.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shardproof.backend  # noqa: F401 - sets MKL_CBWR before torch is loaded

import torch  # isort: skip

from shardproof.backend.model.transformer import Microbatch, Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.layout import Layout
from shardproof.core.model import ModelSpec
from shardproof.core.plan import Batch, Numerics, Plan, Precision

MODEL = ModelSpec("mid", 2, 512, 1408, 8, 8, 64, 4096, 512)
SAMPLES, SEQUENCE = 4, 256


def step_of(mode: str, micro: int) -> Callable[[], None]:
    """A function that runs forward and backward of one global batch."""
    plan = Plan(
        MODEL,
        cluster_preset("this-host", 1),
        Layout(),
        Batch(SAMPLES, micro, SEQUENCE),
        precision=Precision("fp32"),
        numerics=Numerics(mode),
    )
    transport = MemoryWorld(1).transport(0)
    tp, dp = (transport.group(axis, axis, [0]) for axis in ("tp", "dp"))
    stage = Stage(plan, plan.stages[0], tp=tp, numerics=make_numerics(plan), recorder=transport.recorder)
    text = torch.randint(0, MODEL.vocab_size, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        for index, first in enumerate(range(0, SAMPLES, micro)):
            rows = text[first : first + micro]
            losses = stage(Microbatch(index, first, rows[:, :-1], rows[:, 1:]), None)
            torch.autograd.backward(losses, torch.ones_like(losses))
        stage.gradients.reduce(dp, plan.samples_of)

    return step


def main() -> None:
    """Prints both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro", type=int, default=2, help="samples per microbatch (1, 2 or 4)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of one step each; the best counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = {mode: step_of(mode, options.micro) for mode in ("fast", "exact")}
    best_s = dict.fromkeys(steps, float("inf"))
    for _ in range(options.rounds):
        for mode, step in steps.items():
            start_s = perf_counter()
            step()
            best_s[mode] = min(best_s[mode], perf_counter() - start_s)
    for mode, seconds in best_s.items():
        print(f"{mode:5} {seconds:.3f} s per step, {SAMPLES * SEQUENCE / seconds:,.0f} tokens/s")
    print(f"exact / fast = {best_s['exact'] / best_s['fast']:.2f}")


if __name__ == "__main__":
    main()
