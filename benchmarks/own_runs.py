"""Own runs against their predictions: actions and their order, bytes of every collective and message, peak memory.

Run: python benchmarks/own_runs.py [--steps] [--replay] [--json]; with --steps also seconds of a step, calibrated in
between, with --replay those that follow from the durations of single actions in a first run (`own_steps.py`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardproof import simulate
from shardproof.backend.launching.launch import Workers
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.program import Collective, Message, operations
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Action
from shardproof.core.schedule.timeline import Span, holds_parts
from shardproof.simulator.calibrate import calibrated, cluster_toml
from shardproof.simulator.step.step import Simulation


def gpt(**changes: int) -> ModelSpec:
    """A small GPT-2: LayerNorm, learned positions, tied table, biases."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 16,
    }
    return replace(model_preset("tiny-gpt"), name="own-gpt", **{**sizes, **changes})


def llama(**changes: int) -> ModelSpec:
    """A small Llama: RMSNorm, rotary positions, gated MLP, two query heads per key head."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 384,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
    }
    return replace(model_preset("tiny-llama"), name="own-llama", **{**sizes, **changes})


def own_plan(
    model: ModelSpec,
    layout: Layout,
    schedule: str = "1F1B",
    *,
    samples: int = 8,
    micro: int = 1,
    sequence: int = 64,
    mode: str = "fast",
    active: int | None = None,
    shared: DataParallel | None = None,
) -> Plan:
    """A plan that this machine can run."""
    cluster = cluster_preset("this-host", layout.world_size)
    batch, choice = Batch(samples, micro, sequence), ScheduleChoice(schedule, max_active_stages=active)
    common = {
        "precision": Precision("fp32"),
        "schedule": choice,
        "numerics": Numerics(mode),
        "data_parallel": shared or DataParallel(),
    }
    return Plan(model, cluster, layout, batch, **common)


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
    own_plan(gpt(), Layout(dp=2, zero=1)),
    own_plan(llama(), Layout(dp=2, zero=1), mode="exact"),
    own_plan(llama(), Layout(dp=4, zero=1), shared=DataParallel(shard=2)),
    own_plan(llama(), Layout(dp=2, zero=2)),
    own_plan(llama(), Layout(dp=4, zero=2), shared=DataParallel(bucket_bytes=200_000)),
    own_plan(gpt(), Layout(dp=4, zero=3), active=1),
    own_plan(llama(), Layout(pp=2, vpp=2, dp=2, zero=3), "Interleaved1F1B", active=1),
    own_plan(llama(), Layout(pp=2, dp=2, zero=3), mode="exact", active=1),
)


@dataclass(frozen=True)
class Recorded:
    """What one rank did in a step: actions by lane in order, their times, what each sent, and where it was metered the
    peak of live storages and the action then."""

    lanes: dict[str, list[str]]
    spans: list[Span]
    sent: dict[str, list[Collective | Message]]
    peak_bytes: int = 0
    peak_action: str = ""


def record_step(transport: Any, rank: Any) -> Recorded:
    """The first step of a rank, recorded."""
    recorder = transport.recorder
    recorder.enabled = True
    _, spans = rank.step(0)
    rank.settle()
    recorder.enabled = False
    sent = defaultdict(list)
    for action, operation in recorder.events:
        if isinstance(operation, Collective | Message):
            sent[str(action)].append(operation)
    lanes = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        lanes[span.lane].append(str(span.action))
    return Recorded(dict(lanes), spans, dict(sent))


def record_order(transport: Any, plan: Plan) -> Recorded:
    """The job of one rank where only actions and bytes count: one step, which all ranks begin together."""
    from shardproof.backend.ranks.training_rank import TrainingRank

    rank = TrainingRank(transport, plan)
    transport.group("own-runs", "world", range(transport.world_size)).barrier()
    rank.clock.restart()
    return record_step(transport, rank)


def record_rank(transport: Any, plan: Plan) -> Recorded:
    """The job of one rank: a first step that is recorded, then two whose memory is metered (by then the
    optimizer has its state).

    The lower peak counts: gloo's own thread may let go of a message a little after it was received, and
    so add it to a later one.
    """
    from shardproof.backend.ranks.training_rank import TrainingRank

    rank = TrainingRank(transport, plan)
    world = transport.group("own-runs", "world", range(transport.world_size))
    recorded = record_step(transport, rank)
    peaks = []
    for step in (1, 2):
        meter = rank.live_meter()
        world.barrier()
        rank.step(step, meter=meter)
        peaks.append((meter.peak_bytes, meter.peak_action))
    peak_bytes, peak_action = min(peaks)
    return replace(recorded, peak_bytes=peak_bytes, peak_action=peak_action)


@dataclass(frozen=True)
class Row:
    """One run: how many actions and collectives were recorded, what differs from the prediction, and the
    peaks of the worst rank."""

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
    """The recorded step next to the simulated one, rank by rank; the peaks are those of the rank
    with the largest error."""
    simulation = simulate(plan)
    peaks = []
    everything = [one for rank in ranks for sent in rank.sent.values() for one in sent]
    for global_rank, recorded in enumerate(ranks):
        memory = simulation.memory[plan.layout.coordinates(global_rank)["pp"]]
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
        differences(plan, ranks, simulation),
        predicted,
        measured,
        predicted / measured - 1,
        *actions,
    )


def differences(plan: Plan, ranks: Sequence[Recorded], simulation: Simulation) -> list[str]:
    """What the ranks did otherwise than predicted: lanes with another order of actions, actions that sent something
    else. The lanes of collectives inside a pair (`core.schedule.timeline.collective_lane`) hold parts of actions."""
    timeline, schedule = simulation.timeline, lower(schedule_for(plan))
    found: list[str] = []
    for global_rank, recorded in enumerate(ranks):
        here = plan.layout.coordinates(global_rank)
        shown = simulation.global_ranks[here["pp"]]
        for lane in dict.fromkeys([*timeline.spans.lanes, *(lane for lane in recorded.lanes if not holds_parts(lane))]):
            if recorded.lanes.get(lane, []) != [str(span.action) for span in timeline.select(shown, lane)]:
                found.append(f"rank {global_rank} lane {lane}: order of actions")
        # weights of a stage may be gathered several times
        for action, times in Counter(schedule.row(here["pp"])).items():
            found += _sent_differently(plan, global_rank, here, action, times, recorded)
    return found


def _sent_differently(
    plan: Plan, global_rank: int, here: dict[str, int], action: Action, times: int, recorded: Recorded
) -> list[str]:
    """What an action sent otherwise than `core.program` says, one sentence for the first difference."""
    expected: list[Any] = []
    for part in action.parts:
        replica = plan.placement.replica_of(part.stage, here["pp"])
        found = operations(plan, part.kind, part.stage, here["tp"], here["dp"], cp_rank=here["cp"], replica=replica)
        expected += [operation for operation in found if isinstance(operation, Collective | Message)] * times
    parts = [operation for part in action.parts for operation in recorded.sent.get(str(part), [])]
    return [] if parts == expected else [f"rank {global_rank} {action}: sent {parts[:3]}, predicted {expected[:3]}"]


def record(plan: Plan) -> list[Recorded]:
    """A plan's step on real processes."""
    with Workers(plan.layout.world_size, "shm", timeout_s=120) as workers:
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

OTHERS: Sequence[tuple[Plan, Plan]] = tuple(
    (own_plan(gpt(**WIDE), Layout(pp=2), samples=8, micro=1, sequence=256), TIMED[number]) for number in (4, 5)
)
"""A plan whose recorded durations predict another schedule's step: 1F1B, and GPipe and ZBH1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", action="store_true", help="also measure seconds of steps, and calibrate in between")
    parser.add_argument(
        "--replay", action="store_true", help=("also predict steps from a first run's durations of single actions")
    )
    parser.add_argument("--cluster", help="a cluster file of `shardproof calibrate`, instead of calibrating in between")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every timed plan")
    parser.add_argument(
        "--quantile",
        type=float,
        default=0.5,
        help=("which of the measured steps counts; the median unless said otherwise"),
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between the turns")
    parser.add_argument("--seconds-only", action="store_true", help="leave actions, bytes and memory out")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the timed plans to take, for a short look")
    parser.add_argument("--write-cluster", help="where to leave the cluster file that was calibrated in between")
    args = parser.parse_args()
    from own_steps import TimedRow, calibrated_cluster, replayed, timed, timed_lines, timed_row  # next to this file

    # what is wrong with the file is said before the long part
    cluster = calibrated_cluster(args.cluster) if args.cluster else None
    rows = [] if args.seconds_only else [compare(plan, record(plan)) for plan in RUNS]
    chosen = [plan for number, plan in enumerate((*TIMED, *CROWDED)) if args.only is None or number in args.only]
    times: dict[str, Sequence[TimedRow]] = {}
    if args.steps:
        timing = timed(
            chosen, rounds=args.rounds, pause_s=args.pause, quantile=args.quantile, calibrate=cluster is None
        )
        if cluster is None:
            cores = os.cpu_count() or 1
            cluster = calibrated(
                timing.rows, name="this-host-measured", num_cores=cores, memory_bytes=16e9, when="between these runs"
            )
        if args.write_cluster:
            Path(args.write_cluster).write_text(cluster_toml(cluster))
        found = [
            timed_row(plan, seconds, cluster, args.quantile)
            for plan, seconds in zip(chosen, timing.seconds, strict=True)
        ]
        few = [row for row in found if row.ranks <= cluster.num_cores]
        times["predicted from a calibration, as many ranks as cores"] = few
        times["predicted from a calibration, more ranks than cores"] = [row for row in found if row not in few]
    if args.replay:
        few = [(plan, plan) for plan in chosen if plan.layout.world_size <= (os.cpu_count() or 1)]
        others = [pair for pair in OTHERS if pair[1] in chosen]
        replays = replayed([*few, *others], rounds=args.rounds, pause_s=args.pause)
        times["predicted from the durations of a first run"] = replays[: len(few)]
        times["predicted from the durations of a first run of another schedule"] = replays[len(few) :]
    if args.json:
        tables = {name: [asdict(row) for row in found] for name, found in times.items()}
        print(json.dumps({"runs": [asdict(row) for row in rows], "times": tables}))
        return
    for name, found in times.items():
        print("\n".join(timed_lines(name, found)) if found else f"{name}: none")
    for row in rows:
        exact = "same" if not row.differences else f"{len(row.differences)} DIFFER: {row.differences[0]}"
        print(
            f"{row.model:9}  {row.layout:32} {row.schedule:22} {row.ranks} ranks  {row.actions:4} actions "
            f"{row.collectives:5} collectives "
            f"{row.sent_bytes:9} B {exact}  peak {row.measured_peak_bytes:9} B at {row.measured_action or '-'}, "
            f"predicted {row.predicted_peak_bytes:9} at {row.predicted_action or '-'} {row.peak_error:+.1%}"
        )


if __name__ == "__main__":
    main()
