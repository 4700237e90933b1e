"""What a save costs the steps of a run: the same training without checkpoints, with asynchronous ones and with ones
that are waited for, in turns within one process per rank.

    python benchmarks/asynchronous_saves.py [STEPS_BETWEEN]

Prediction, written before the first run (2026-11-27): a save is some 20 ns of processor time per parameter of a rank
(12 bytes through a copy, two digests, a zip and a file), of which the thread that trains pays the copy, the agreement
on who writes what and one small all-gather a step: a tenth. On two ranks that keep both cores busy the writers take
their time from the steps all the same: with a core to spare a save costs what the training thread pays.

Outcome: on a machine that others kept busy (load 8 on 2 cores) the clock and the processor say nothing below 15 %
either way; the calls that save held steps up for 0.30 s of a save, waiting for slower peers among it, against 0.78 s
where saves are waited for. So 2 % of steps of 0.32 s come from 47 steps between saves on, and from 121 on.

Second prediction (2026-11-27), for files that are written like the one before and for answers that are read with the
loss: of 12 MB and 60 tensors the writer took 50 to 59 ms of processor for DCP's writer and takes 17 to 19 ms, 4 of them
with Python's lock; the training thread's calls are some 5 ms of processor (a copy of 12 MB), and steps that do not save
wait for nobody in them. So a save holds steps up for a tenth of the 0.30 s on the same busy machine.

Outcome: docs/measurements.md.

A round is all steps from one save to the next; its seconds per step are those of the clock, of the processor in the
thread that trains, and of the processor in the whole rank. Medians of rounds; ratios are of one run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace

from shardproof import Plan
from shardproof.backend.checkpoint.saver import Checkpoints
from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.ranks.rank_of_plan import training_rank
from shardproof.backend.transport.base import Transport
from shardproof.core.plan.train import Checkpoint

ROUNDS = 3
KINDS = ("none", "asynchronous", "waits")
CLOCKS = {"clock": time.monotonic, "training thread": time.thread_time, "rank": time.process_time}
PLAN = """
[model]
preset = "tiny-llama"
num_layers = 2
hidden_size = 256
ffn_hidden_size = 512
[layout]
dp = 2
zero = 1
[batch]
global = 4
micro = 2
sequence = 64
[precision]
dtype = "fp32"
[numerics]
mode = "fast"
"""

Found = dict[str, dict[str, list[float]]]
"""By kind and clock the seconds per step of every round."""


def measure(transport: Transport, payload: tuple[Plan, int]) -> tuple[int, Found, dict[str, list[float]]]:
    """Elements that a rank holds, what its rounds took, and the seconds of each within calls that save; the first round
    of each kind is left out."""
    plan, between = payload
    rank, number = training_rank(transport, plan), 0
    inside: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found: Found = {kind: {clock: [] for clock in CLOCKS} for kind in KINDS}
    savers = {
        kind: Checkpoints(
            replace(plan, checkpoint=replace(plan.checkpoint, every=between, asynchronous=kind == "asynchronous")),
            rank.batches.corpus,
            transport.everyone,
            transport.device,
            transport.watch,
        )
        for kind in KINDS
    }
    for turn in range(1 + ROUNDS):
        for kind, checkpoints in savers.items():
            begun, inside_s = number, 0.0
            checkpoints.before_steps(number, rank, transport.stop)
            transport.everyone.barrier()
            started = {clock: now() for clock, now in CLOCKS.items()}
            for step in range(between):
                rank.step(number)
                number += 1
                if kind != "none":  # due at the first step of a round: all of it is over within the round
                    steps = begun + between if step == 0 else begun + 1
                    own_s = time.monotonic()
                    checkpoints.after_step(steps, rank, last=False)
                    inside_s += time.monotonic() - own_s
            if turn:
                for clock, now in CLOCKS.items():
                    found[kind][clock].append((now() - started[clock]) / between)
                inside[kind].append(inside_s)
            checkpoints.finish()
    return sum(one.tensor.numel() for one in rank.optimizer.held), found, inside


def main(between: str = "20") -> None:
    """Prints seconds per step, and what saves add to them."""
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(Plan.from_toml(PLAN), checkpoint=Checkpoint(folder, keep=2))
        ranks = run_ranks(measure, (plan, int(between)), world_size=2, transport="shm")
    count, found, inside = ranks[0]
    print(f"{count:,} elements on each of 2 ranks, a save every {between} steps; medians of {ROUNDS} rounds")
    for clock in CLOCKS:
        medians = {kind: statistics.median(found[kind][clock]) for kind in KINDS}
        added = {kind: f"{100 * (medians[kind] / medians['none'] - 1):+.1f} %" for kind in KINDS[1:]}
        print(
            f"{clock:16} {1e3 * medians['none']:7.2f} ms a step, asynchronous saves {added['asynchronous']}, "
            f"saves that are waited for {added['waits']}"
        )
    for kind in KINDS[1:]:
        one_s, step_s = statistics.median(inside[kind]), statistics.median(found["none"]["clock"])
        enough = one_s / step_s / 0.02
        print(f"a save holds up steps for {1e3 * one_s:.1f} ms ({kind}): 2 % with {enough:.0f} steps between")


if __name__ == "__main__":
    main(*sys.argv[1:])
