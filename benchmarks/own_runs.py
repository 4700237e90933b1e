"""Own runs against their predictions: actions and their order, bytes of every collective and message, peak memory.

Run: python benchmarks/own_runs.py [--steps] [--json]; with --steps also seconds of a step, calibrated in between.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardproof import simulate
from shardproof.backend.launch import Workers
from shardproof.backend.measure_machine import Measurement, measure_machine
from shardproof.core.action import Action
from shardproof.core.cluster import ClusterSpec
from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.layout import Layout
from shardproof.core.model import ModelSpec
from shardproof.core.model_presets import model_preset
from shardproof.core.plan import Batch, Numerics, Plan, Precision, ScheduleChoice
from shardproof.core.program import Collective, Message, operations
from shardproof.core.schedules import lower, schedule_for
from shardproof.simulator.calibrate import calibrated, cluster_toml


def gpt(**changes: int) -> ModelSpec:
    """A small GPT-2: LayerNorm, learned positions, tied table, biases."""
    sizes = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 16}
    return replace(model_preset("tiny-gpt"), name="own-gpt", **{**sizes, **changes})


def llama(**changes: int) -> ModelSpec:
    """A small Llama: RMSNorm, rotary positions, gated MLP, two query heads per key head."""
    sizes = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 384, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
    return replace(model_preset("tiny-llama"), name="own-llama", **{**sizes, **changes})


def own_plan(
    model: ModelSpec, layout: Layout, schedule: str = "1F1B", *, samples: int = 8, micro: int = 1, sequence: int = 64, mode: str = "fast"
) -> Plan:
    """A plan that this machine can run."""
    cluster = cluster_preset("this-host", layout.world_size)
    batch, choice = Batch(samples, micro, sequence), ScheduleChoice(schedule)
    return Plan(model, cluster, layout, batch, precision=Precision("fp32"), schedule=choice, numerics=Numerics(mode))


RUNS: Sequence[Plan] = (
    own_plan(gpt(), Layout()),
    own_plan(gpt(), Layout(), micro=4),
    own_plan(gpt(), Layout(dp=2)),
    own_plan(gpt(), Layout(tp=2)),
    own_plan(gpt(), Layout(tp=4), micro=2),
    own_plan(gpt(), Layout(pp=2)),
    own_plan(gpt(), Layout(pp=2), "GPipe"),
    own_plan(gpt(), Layout(pp=2), "ZBH1"),
    own_plan(gpt(), Layout(pp=2, vpp=2), "Interleaved1F1B"),
    own_plan(gpt(), Layout(pp=4, dp=2)),
    own_plan(gpt(), Layout(tp=2, pp=2, dp=2), samples=16, micro=2),
    own_plan(gpt(), Layout(tp=2, pp=2), mode="exact"),
    own_plan(llama(), Layout()),
    own_plan(llama(), Layout(dp=3), samples=9),
    own_plan(llama(), Layout(tp=2, dp=2)),
    own_plan(llama(), Layout(tp=4)),
    own_plan(llama(), Layout(pp=2), micro=2),
    own_plan(llama(), Layout(pp=3, stages="Et|tt|tL")),
    own_plan(llama(), Layout(pp=2, vpp=2), "ZBVZeroBubble"),
    own_plan(llama(), Layout(pp=2, vpp=2), "DualPipeV"),
    own_plan(llama(), Layout(pp=4), "DualPipe"),
    own_plan(llama(), Layout(tp=2, pp=2, vpp=2), "InterleavedZeroBubble"),
    own_plan(llama(), Layout(tp=2, pp=2, dp=2), samples=16),
    own_plan(llama(), Layout(dp=2), mode="exact"),
)


@dataclass(frozen=True)
class Recorded:
    """What one rank did in a step: actions by lane in order, what each sent, the peak of live storages and the action then."""

    lanes: dict[str, list[str]]
    sent: dict[str, list[Collective | Message]]
    peak_bytes: int
    peak_action: str


def record_rank(transport: Any, plan: Plan) -> Recorded:
    """The job of one rank: a first step that is recorded, then two whose memory is metered (by then the optimizer has its state).

    The lower peak counts: gloo's own thread may let go of a message a little after it was received, and so add it to a later one.
    """
    from shardproof.backend.training_rank import TrainingRank

    recorder = transport.recorder
    recorder.enabled = True
    rank = TrainingRank(transport, plan)
    world = transport.group("own-runs", "world", range(transport.world_size))
    _, spans = rank.step(0)
    recorder.enabled = False
    sent = defaultdict(list)
    for action, operation in recorder.events:
        if isinstance(operation, Collective | Message):
            sent[str(action)].append(operation)
    lanes = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        lanes[span.lane].append(str(span.action))
    peaks = []
    for step in (1, 2):
        meter = rank.live_meter()
        world.barrier()
        rank.step(step, meter=meter)
        peaks.append((meter.peak_bytes, meter.peak_action))
    return Recorded(dict(lanes), dict(sent), *min(peaks))


@dataclass(frozen=True)
class Row:
    """One run: how many actions and collectives were recorded, what differs from the prediction, and the peaks of the worst rank."""

    model: str
    layout: str
    schedule: str
    ranks: int
    actions: int
    collectives: int
    sent_bytes: int
    differences: list[str]
    predicted_peak_bytes: int
    measured_peak_bytes: int
    peak_error: float
    predicted_action: str
    measured_action: str


def compare(plan: Plan, ranks: Sequence[Recorded]) -> Row:
    """The recorded step beside the simulated one, rank by rank; the peaks are those of the rank with the largest error."""
    simulation, schedule = simulate(plan), lower(schedule_for(plan))
    differences: list[str] = []
    peaks = []
    everything = [one for rank in ranks for sent in rank.sent.values() for one in sent]
    for global_rank, recorded in enumerate(ranks):
        here = plan.layout.coordinates(global_rank)
        pp_rank = here["pp"]
        for lane in simulation.timeline.spans.lanes:
            expected = [str(span.action) for span in simulation.timeline.select(simulation.global_ranks[pp_rank], lane)]
            if recorded.lanes.get(lane, []) != expected:
                differences.append(f"rank {global_rank} lane {lane}: order of actions")
        for action in schedule.row(pp_rank):
            differences += _sent_differently(plan, global_rank, here, action, recorded)
        memory = simulation.memory[pp_rank]
        peaks.append((memory.peak_bytes, recorded.peak_bytes, memory.peak_action, recorded.peak_action))
    predicted, measured, *actions = max(peaks, key=lambda peak: abs(peak[0] / peak[1] - 1))
    return Row(
        plan.model.name,
        plan.layout.degrees + (" exact" if plan.numerics.mode == "exact" else ""),
        plan.schedule.name,
        plan.layout.world_size,
        sum(len(lane) for rank in ranks for lane in rank.lanes.values()),
        len(everything),
        sum(one.sent_bytes if isinstance(one, Collective) else one.num_bytes for one in everything),
        differences,
        predicted,
        measured,
        predicted / measured - 1,
        *actions,
    )


def _sent_differently(plan: Plan, global_rank: int, here: dict[str, int], action: Action, recorded: Recorded) -> list[str]:
    """What an action sent otherwise than `core.program` says, one sentence for the first difference."""
    expected: list[Any] = []
    for part in action.parts:
        replica = plan.placement.replica_of(part.stage, here["pp"])
        found = operations(plan, part.kind, part.stage, here["tp"], here["dp"], cp_rank=here["cp"], replica=replica)
        expected += [operation for operation in found if isinstance(operation, Collective | Message)]
    parts = [operation for part in action.parts for operation in recorded.sent.get(str(part), [])]
    return [] if parts == expected else [f"rank {global_rank} {action}: sent {parts[:3]}, predicted {expected[:3]}"]


def record(plan: Plan) -> list[Recorded]:
    """A plan's step on real processes."""
    with Workers(plan.layout.world_size, "gloo", timeout_s=120) as workers:
        return workers.run(record_rank, plan)


WIDE = {"hidden_size": 256, "ffn_hidden_size": 1024, "head_dim": 32, "max_positions": 256}
WIDE_LLAMA = {"hidden_size": 256, "ffn_hidden_size": 768, "head_dim": 32}
LARGE = {"hidden_size": 512, "ffn_hidden_size": 2048, "head_dim": 64, "num_layers": 2, "max_positions": 256}

TIMED: Sequence[Plan] = (
    own_plan(gpt(**WIDE), Layout(), samples=4, micro=2, sequence=128),
    own_plan(gpt(**WIDE), Layout(dp=2), samples=8, micro=2, sequence=128),
    own_plan(gpt(**WIDE), Layout(tp=2), samples=4, micro=2, sequence=128),
    own_plan(gpt(**WIDE), Layout(pp=2), samples=8, micro=2, sequence=128),
    own_plan(gpt(**WIDE), Layout(pp=2), "GPipe", samples=8, micro=1, sequence=256),
    own_plan(gpt(**WIDE), Layout(pp=2), "ZBH1", samples=8, micro=1, sequence=256),
    own_plan(gpt(**WIDE), Layout(pp=2, vpp=2), "Interleaved1F1B", samples=8, micro=2, sequence=128),
    own_plan(gpt(**LARGE), Layout(), samples=4, sequence=256),
    own_plan(gpt(**LARGE), Layout(tp=2), samples=4, sequence=256),
    own_plan(gpt(**LARGE), Layout(pp=2), samples=8, sequence=128),
    own_plan(llama(), Layout(), samples=8, micro=4, sequence=64),
    own_plan(llama(**WIDE_LLAMA), Layout(), samples=4, micro=2, sequence=128),
    own_plan(llama(**WIDE_LLAMA), Layout(dp=2), samples=8, sequence=256),
    own_plan(llama(**WIDE_LLAMA), Layout(tp=2), samples=4, micro=2, sequence=256),
    own_plan(llama(**WIDE_LLAMA), Layout(pp=2), samples=8, micro=2, sequence=128),
    own_plan(llama(**WIDE_LLAMA), Layout(pp=2, vpp=2), "ZBVZeroBubble", samples=8, micro=1, sequence=256),
    own_plan(llama(**WIDE_LLAMA), Layout(pp=2, vpp=2), "DualPipeV", samples=8, micro=1, sequence=256),
)
"""As many ranks as there are cores, or fewer: here a step's seconds mean something."""

CROWDED: Sequence[Plan] = (
    own_plan(gpt(**WIDE), Layout(dp=4), samples=8, micro=2, sequence=128),
    own_plan(gpt(**WIDE), Layout(tp=2, pp=2), samples=8, micro=2, sequence=128),
    own_plan(gpt(**WIDE), Layout(pp=4), samples=8, micro=1, sequence=256),
    own_plan(llama(**WIDE_LLAMA), Layout(pp=2, dp=2), samples=16, micro=2, sequence=128),
)
"""More ranks than cores."""

WARM_STEPS, STEPS = 2, 4
CALIBRATION_ROUNDS = 3
"""Turns of every kernel in the calibration before a round of steps."""


@dataclass(frozen=True)
class TimedRow:
    """Seconds of a step: predicted, measured (a quantile of steps of interleaved runs), and the distance of their quartiles over it."""

    model: str
    hidden: int
    sequence: int
    micro: int
    layout: str
    schedule: str
    ranks: int
    predicted_s: float
    measured_s: float
    spread: float
    error: float


def time_rank(transport: Any, plan: Plan) -> list[float]:
    """The job of one rank: seconds of its steps, all ranks starting together, without the first ones."""
    from shardproof.backend.training_rank import TrainingRank

    rank = TrainingRank(transport, plan)
    world = transport.group("own-runs", "world", range(transport.world_size))
    seconds = []
    for step in range(WARM_STEPS + STEPS):
        world.barrier()
        seconds.append(rank.step(step)[0].elapsed_s)
    return seconds[WARM_STEPS:]


@dataclass(frozen=True)
class Timing:
    """Seconds of steps of every plan, and what the machine took for single kernels meanwhile."""

    seconds: list[list[float]]
    rows: list[Measurement]


def timed(plans: Sequence[Plan], *, rounds: int, quantile: float, pause_s: float, calibrate: bool) -> Timing:
    """Rounds in which every plan takes its steps, one plan after the other, each round after a short calibration of its own.

    So whatever slows the machine for a while slows kernels and steps alike. `pause_s` lets others work between rounds.
    """
    seconds: list[list[float]] = [[] for _ in plans]
    measured: list[list[Measurement]] = []
    for _ in range(rounds):
        if calibrate:
            measured.append(measure_machine(groups=(2, 4), rounds=CALIBRATION_ROUNDS, quantile=quantile))
        for found, plan in zip(seconds, plans, strict=True):
            with Workers(plan.layout.world_size, "gloo", timeout_s=300) as workers:
                ranks = workers.run(time_rank, plan)
            found += [max(of_step) for of_step in zip(*ranks, strict=True)]
        time.sleep(pause_s)
    rows = [
        replace(same[0], seconds=float(np.median([row.seconds for row in same])), spread=float(np.median([row.spread for row in same])))
        for same in zip(*measured, strict=True)
    ]
    return Timing(seconds, rows)


def calibrated_cluster(path: str) -> ClusterSpec:
    """The cluster in a file of `shardproof calibrate`."""
    smallest = '[model]\npreset = "tiny-gpt"\n[batch]\nglobal = 8\nsequence = 8\n[layout]\ndp = 1\n'
    return Plan.from_toml(f'{smallest}[cluster]\nfile = "{path}"\nnum_devices = 1\n').cluster


def timed_row(plan: Plan, seconds: list[float], cluster: ClusterSpec, quantile: float) -> TimedRow:
    """The seconds of a plan beside its prediction on the calibrated cluster."""
    cluster = replace(cluster, num_devices=plan.layout.world_size)
    predicted_s = simulate(replace(plan, cluster=cluster)).report["step_time_s"]
    low, middle, high = (float(np.quantile(seconds, part)) for part in (0.25, 0.5, 0.75))
    measured_s = float(np.quantile(seconds, quantile))
    batch = plan.batch
    return TimedRow(
        plan.model.name,
        plan.model.hidden_size,
        batch.sequence,
        batch.micro_size,
        plan.layout.degrees,
        plan.schedule.name,
        plan.layout.world_size,
        predicted_s,
        measured_s,
        (high - low) / middle,
        predicted_s / measured_s - 1,
    )


def timed_lines(title: str, rows: Sequence[TimedRow]) -> list[str]:
    """The timed rows for people, and their errors together."""
    lines = [title]
    for row in rows:
        lines.append(
            f"  {row.model:9}  h{row.hidden:<4} s{row.sequence:<4} b{row.micro} {row.layout:20} {row.schedule:16} {row.ranks} ranks  "
            f"measured {row.measured_s * 1e3:7.1f} ms (spread {row.spread:4.0%})  "
            f"predicted {row.predicted_s * 1e3:7.1f} ms {row.error:+6.1%}"
        )
    errors = sorted(abs(row.error) for row in rows) or [0.0]
    return [*lines, f"  median error {float(np.median(errors)):.1%}, worst {errors[-1]:.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", action="store_true", help="also measure seconds of steps, and calibrate in between")
    parser.add_argument("--cluster", help="a cluster file of `shardproof calibrate`, instead of calibrating in between")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every timed plan")
    parser.add_argument("--quantile", type=float, default=0.5, help="which of the measured steps counts; the median unless said otherwise")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between the turns")
    parser.add_argument("--steps-only", action="store_true", help="leave actions, bytes and memory out")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the timed plans to take, for a short look")
    parser.add_argument("--write-cluster", help="where to leave the cluster file that was calibrated in between")
    args = parser.parse_args()
    cluster = calibrated_cluster(args.cluster) if args.cluster else None  # what is wrong with the file is said before the long part
    rows = [] if args.steps_only else [compare(plan, record(plan)) for plan in RUNS]
    times = {}
    if args.steps or args.steps_only:
        chosen = [plan for number, plan in enumerate((*TIMED, *CROWDED)) if args.only is None or number in args.only]
        timing = timed(chosen, rounds=args.rounds, quantile=args.quantile, pause_s=args.pause, calibrate=cluster is None)
        if cluster is None:
            cores = os.cpu_count() or 1
            cluster = calibrated(timing.rows, name="this-host-measured", num_cores=cores, memory_bytes=16e9, when="between these runs")
        if args.write_cluster:
            Path(args.write_cluster).write_text(cluster_toml(cluster))
        found = [timed_row(plan, seconds, cluster, args.quantile) for plan, seconds in zip(chosen, timing.seconds, strict=True)]
        few = [row for row in found if row.ranks <= cluster.num_cores]
        times = {"as many ranks as cores": few, "more ranks than cores": [row for row in found if row not in few]}
    if args.json:
        tables = {name: [asdict(row) for row in found] for name, found in times.items()}
        print(json.dumps({"runs": [asdict(row) for row in rows], "times": tables}))
        return
    for name, found in times.items():
        print("\n".join(timed_lines(name, found)))
    for row in rows:
        exact = "same" if not row.differences else f"{len(row.differences)} DIFFER: {row.differences[0]}"
        print(
            f"{row.model:9}  {row.layout:32} {row.schedule:22} {row.ranks} ranks  {row.actions:4} actions {row.collectives:5} collectives "
            f"{row.sent_bytes:9} B {exact}  peak {row.measured_peak_bytes:9} B at {row.measured_action or '-'}, "
            f"predicted {row.predicted_peak_bytes:9} at {row.predicted_action or '-'} {row.peak_error:+.1%}"
        )


if __name__ == "__main__":
    main()
