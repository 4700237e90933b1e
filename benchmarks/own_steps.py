"""Seconds of own runs next to two predictions: from a calibration of single kernels, and from a first run's
durations of single actions.

`own_runs.py` has the plans and the command.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardproof import simulate
from shardproof.backend.calibration.cases import Measurement
from shardproof.backend.calibration.machine import measure_machine
from shardproof.backend.launching.launch import Workers
from shardproof.backend.pipeline.measure import measured_timeline
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.schedule.timeline import Span, Timeline

WARM_STEPS, STEPS = 2, 4
PLANS_BETWEEN = 9
"""Plans that take their steps between two calibrations, which have one turn of every kernel each."""


@dataclass(frozen=True)
class TimedRow:
    """Seconds of a step: predicted, measured (a quantile of steps of interleaved runs), and the distance of
    their quartiles over it."""

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


@dataclass(frozen=True)
class Steps:
    """Some steps of one rank: seconds of each, and when its actions began and ended."""

    seconds: list[float]
    spans: list[list[Span]]


def time_rank(transport: Any, plans: Sequence[Plan]) -> list[Steps]:
    """The job of one rank: steps of all plans by turns, all ranks starting each together, without the first ones."""
    from shardproof.backend.ranks.joined import ModuleTransport
    from shardproof.backend.ranks.training_rank import TrainingRank

    apart = [ModuleTransport(transport, str(number), plan.layout.world_size) for number, plan in enumerate(plans)]
    ranks = [TrainingRank(one, plan) for one, plan in zip(apart, plans, strict=True)]
    world = transport.group("own-runs", "world", range(transport.world_size))
    found = [Steps([], []) for _ in plans]
    for step in range(WARM_STEPS + STEPS):
        for rank, steps in zip(ranks, found, strict=True):
            world.barrier()
            rank.clock.restart()
            result, spans = rank.step(step)
            if step >= WARM_STEPS:
                steps.seconds.append(result.elapsed_s)
                steps.spans.append(spans)
    return found


@dataclass(frozen=True)
class Run:
    """Seconds of the slowest rank and the timeline of every step of one plan."""

    seconds: list[float]
    timelines: list[Timeline]


def run_steps(*plans: Plan) -> list[Run]:
    """Steps of plans of equally many ranks, by turns in the same fresh processes."""
    with Workers(plans[0].layout.world_size, "shm", timeout_s=300) as workers:
        ranks = workers.run(time_rank, plans)
    runs = []
    for plan, of_plan in zip(plans, zip(*ranks, strict=True), strict=True):
        seconds = [max(of_step) for of_step in zip(*(rank.seconds for rank in of_plan), strict=True)]
        name = f"{plan.model.name}, {plan.schedule.name}"
        of_steps = zip(*(rank.spans for rank in of_plan), strict=True)
        spans = [[span for of_rank in of_step for span in of_rank] for of_step in of_steps]
        runs.append(Run(seconds, [measured_timeline(of_step, (), plan, name) for of_step in spans]))
    return runs


@dataclass(frozen=True)
class Timing:
    """Seconds of steps of every plan, and what the machine took for single kernels meanwhile."""

    seconds: list[list[float]]
    rows: list[Measurement]


def timed(plans: Sequence[Plan], *, rounds: int, quantile: float, pause_s: float, calibrate: bool) -> Timing:
    """Rounds in which every plan takes its steps, one plan after the other, with short calibrations in between.

    So whatever slows the machine for a while slows kernels as well as steps. `pause_s` lets others work between rounds.
    """
    groups = sorted({2, *(plan.layout.world_size for plan in plans)} - {1})
    seconds: list[list[float]] = [[] for _ in plans]
    measured: list[list[Measurement]] = []
    for _ in range(rounds):
        for number, (found, plan) in enumerate(zip(seconds, plans, strict=True)):
            if calibrate and number % PLANS_BETWEEN == 0:
                measured.append(measure_machine(groups=groups, rounds=1, quantile=quantile))
            found += run_steps(plan)[0].seconds
        time.sleep(pause_s)
    rows = [
        replace(
            same[0],
            seconds=float(np.median([row.seconds for row in same])),
            spread=float(np.median([row.spread for row in same])),
        )
        for same in zip(*measured, strict=True)
    ]
    return Timing(seconds, rows)


def calibrated_cluster(path: str) -> ClusterSpec:
    """The cluster in a file of `shardproof calibrate`."""
    smallest = '[model]\npreset = "tiny-gpt"\n[batch]\nglobal = 8\nsequence = 8\n[layout]\ndp = 1\n'
    return Plan.from_toml(f'{smallest}[cluster]\nfile = "{path}"\nnum_devices = 1\n').cluster


def timed_row(plan: Plan, seconds: list[float], cluster: ClusterSpec, quantile: float) -> TimedRow:
    """The seconds of a plan next to its prediction on the calibrated cluster."""
    cluster = replace(cluster, num_devices=plan.layout.world_size)
    predicted_s = simulate(replace(plan, cluster=cluster)).report["step_time_s"]
    return _row(plan, plan.schedule.name, predicted_s, seconds, quantile)


def _row(plan: Plan, schedule: str, predicted_s: float, seconds: list[float], quantile: float = 0.5) -> TimedRow:
    low, middle, high = (float(np.quantile(seconds, part)) for part in (0.25, 0.5, 0.75))
    measured_s = float(np.quantile(seconds, quantile))
    batch, layout = plan.batch, plan.layout
    where = (
        plan.model.name,
        plan.model.hidden_size,
        batch.sequence,
        batch.micro_size,
        layout.degrees,
        schedule,
        layout.world_size,
    )
    return TimedRow(*where, predicted_s, measured_s, (high - low) / middle, predicted_s / measured_s - 1)


def replayed(pairs: Sequence[tuple[Plan, Plan]], *, rounds: int, pause_s: float) -> list[TimedRow]:
    """For every pair the step of the second plan: simulated with the durations of actions in runs of
    the first, and measured.

    Both take their steps by turns in the same processes, so that whatever slows the machine for a while slows both;
    where they are one plan, one half of its steps predicts the other.
    """
    recorded: list[list[Timeline]] = [[] for _ in pairs]
    measured: list[list[float]] = [[] for _ in pairs]
    for _ in range(rounds):
        for number, pair in enumerate(pairs):
            first, second = run_steps(*pair)
            recorded[number] += first.timelines
            measured[number] += second.seconds
        time.sleep(pause_s)
    rows = []
    for (plan, other), timelines, seconds in zip(pairs, recorded, measured, strict=True):
        predicted_s = simulate(other, durations=timelines).report["step_time_s"]
        names = dict.fromkeys((plan.schedule.name, other.schedule.name))
        rows.append(_row(other, " -> ".join(names), predicted_s, seconds))
    return rows


def timed_lines(title: str, rows: Sequence[TimedRow]) -> list[str]:
    """The timed rows for people, and their errors together."""
    lines = [title]
    for row in rows:
        lines.append(
            f"  {row.model:9}  h{row.hidden:<4} s{row.sequence:<4} b{row.micro} {row.layout:20} {row.schedule:18} "
            f"{row.ranks} ranks  "
            f"measured {row.measured_s * 1e3:7.1f} ms (spread {row.spread:4.0%})  "
            f"predicted {row.predicted_s * 1e3:7.1f} ms {row.error:+6.1%}"
        )
    errors = sorted(abs(row.error) for row in rows)
    return [*lines, f"  median error {float(np.median(errors)):.1%}, worst {errors[-1]:.1%}"]
