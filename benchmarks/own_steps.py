"""Seconds of own runs beside two predictions: from a calibration of single kernels, and from a first run's durations of single actions.

`own_runs.py` has the plans and the command.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardproof import simulate
from shardproof.backend.launch import Workers
from shardproof.backend.measure_machine import Measurement, measure_machine
from shardproof.core.cluster import ClusterSpec
from shardproof.core.plan import Plan
from shardproof.core.timeline import Span, Timeline

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


@dataclass(frozen=True)
class Steps:
    """Some steps of one rank: seconds of each, and when its actions began and ended."""

    seconds: list[float]
    spans: list[list[Span]]


def time_rank(transport: Any, plan: Plan) -> Steps:
    """The job of one rank: its steps, all ranks starting together, without the first ones."""
    from shardproof.backend.training_rank import TrainingRank

    rank = TrainingRank(transport, plan)
    world = transport.group("own-runs", "world", range(transport.world_size))
    found = Steps([], [])
    for step in range(WARM_STEPS + STEPS):
        world.barrier()
        rank.clock.restart()
        result, spans = rank.step(step)
        found.seconds.append(result.elapsed_s)
        found.spans.append(spans)
    return Steps(found.seconds[WARM_STEPS:], found.spans[WARM_STEPS:])


def run_steps(plan: Plan) -> tuple[list[float], list[Timeline]]:
    """Seconds of the slowest rank and the timeline of every step of a run on fresh processes."""
    from shardproof.backend.measure import measured_timeline

    with Workers(plan.layout.world_size, "gloo", timeout_s=300) as workers:
        ranks = workers.run(time_rank, plan)
    seconds = [max(of_step) for of_step in zip(*(rank.seconds for rank in ranks), strict=True)]
    timelines = [
        measured_timeline([span for spans in of_step for span in spans], (), plan.layout, f"{plan.model.name}, {plan.schedule.name}")
        for of_step in zip(*(rank.spans for rank in ranks), strict=True)
    ]
    return seconds, timelines


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
            found += run_steps(plan)[0]
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
    return _row(plan, plan.schedule.name, predicted_s, seconds, quantile)


def _row(plan: Plan, schedule: str, predicted_s: float, seconds: list[float], quantile: float = 0.5) -> TimedRow:
    low, middle, high = (float(np.quantile(seconds, part)) for part in (0.25, 0.5, 0.75))
    measured_s = float(np.quantile(seconds, quantile))
    batch, layout = plan.batch, plan.layout
    where = (plan.model.name, plan.model.hidden_size, batch.sequence, batch.micro_size, layout.degrees, schedule, layout.world_size)
    return TimedRow(*where, predicted_s, measured_s, (high - low) / middle, predicted_s / measured_s - 1)


def replayed(pairs: Sequence[tuple[Plan, Plan]], *, rounds: int, pause_s: float) -> list[TimedRow]:
    """For every pair the step of the second plan: simulated with the durations of actions in runs of the first, and measured.

    A round records and measures every pair on processes of their own, by turns one before the other and the other before the one, so
    that a machine that gets slower does so for both.
    """
    recorded: list[list[Timeline]] = [[] for _ in pairs]
    measured: list[list[float]] = [[] for _ in pairs]
    for turn in range(rounds):
        for number, (first, second) in enumerate(pairs):
            for part in (0, 1) if turn % 2 == 0 else (1, 0):
                if part == 0:
                    recorded[number] += run_steps(first)[1]
                else:
                    measured[number] += run_steps(second)[0]
        time.sleep(pause_s)
    rows = []
    for (first, second), timelines, seconds in zip(pairs, recorded, measured, strict=True):
        predicted_s = simulate(second, durations=timelines).report["step_time_s"]
        names = dict.fromkeys((first.schedule.name, second.schedule.name))
        rows.append(_row(second, " -> ".join(names), predicted_s, seconds))
    return rows


def timed_lines(title: str, rows: Sequence[TimedRow]) -> list[str]:
    """The timed rows for people, and their errors together."""
    lines = [title]
    for row in rows:
        lines.append(
            f"  {row.model:9}  h{row.hidden:<4} s{row.sequence:<4} b{row.micro} {row.layout:20} {row.schedule:18} {row.ranks} ranks  "
            f"measured {row.measured_s * 1e3:7.1f} ms (spread {row.spread:4.0%})  "
            f"predicted {row.predicted_s * 1e3:7.1f} ms {row.error:+6.1%}"
        )
    errors = sorted(abs(row.error) for row in rows)
    return [*lines, f"  median error {float(np.median(errors)):.1%}, worst {errors[-1]:.1%}"]
