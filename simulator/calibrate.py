"""`calibrate`: what this machine takes for single kernels, collectives and messages, as a cluster
file that plans can name.

Measuring needs torch and is the backend's (`measure_machine`, reached through the registry); what
becomes of the rows is here.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median
from typing import Any, Literal, Protocol

from ..core.base.errors import PlanError
from ..core.base.files import write_text
from ..core.base.terminal import say
from ..core.commands.commands import Command, service
from ..core.commands.options import add_output, check_output, emit
from ..core.commands.probes import PROBE_STEPS, PROBES
from ..core.machine.cluster import ClusterSpec
from ..core.plan.write import toml_value
from .simulation.simulate import simulate

MOST_RANKS = 64
"""Ranks that a calibrated host is described for: they share its cores."""

ELEMENT_BYTES = 4
"""Ranks on a host compute in fp32."""

ADD_TRAFFIC_BYTES = 3 * ELEMENT_BYTES
"""What a sum of two tensors reads and writes per element."""


LEAST_SHARE = 0.1
"""Share of the largest message's time that must be more than latency for its rate to be seen."""


class Row(Protocol):
    """A measurement of `backend.calibration.machine`."""

    kind: str
    name: str
    sizes: tuple[int, ...]
    ranks: int
    seconds: float
    spread: float


def calibrated(
    rows: Sequence[Row],
    *,
    name: str,
    num_cores: int,
    memory_bytes: float,
    when: str,
    transport: Literal["shm", "gloo"] = "shm",
) -> ClusterSpec:
    """The host that gave these measurements, over `transport`, as a cluster of ranks that share its cores. Raises
    `PlanError` where a kind is missing."""
    if missing := {"product", "kernel", "step", "collective", "message"} - {row.kind for row in rows}:
        raise PlanError(
            f"the measurements hold no {' and no '.join(sorted(missing))}. Measure again without leaving anything out."
        )
    measured = f"measured: shardproof calibrate, {when}"
    kernels = {
        "-".join(map(str, (row.name, *row.sizes))): row.seconds for row in rows if row.kind in ("product", "kernel")
    }
    skews = _skews(rows, num_cores)
    transfers = _never_faster(_at_once(rows, skews))
    rate = max(2.0 * row.sizes[0] * row.sizes[1] * row.sizes[2] / row.seconds for row in rows if row.kind == "product")
    additions = {row.sizes[0]: row.seconds for row in rows if row.name == "add"}
    latency_s, bytes_per_s = _line([(row.sizes[0], row.seconds) for row in rows if row.name == "message"])
    largest, skew = max(additions), skews[max(skews)] if skews else 0.0
    forward, backward = (_attention_share(rows, kind, rate) for kind in ("attention", "attention_backward"))
    fields: dict[str, tuple[Any, str]] = {
        "devices_per_node": (MOST_RANKS, "all ranks run on this one machine"),
        "device_memory_bytes": (memory_bytes / num_cores, "counted by the operating system: memory per core"),
        "device_memory_bytes_per_s": (
            ADD_TRAFFIC_BYTES * largest / additions[largest],
            (f"{measured}: sum of two tensors of {largest}"),
        ),
        "host_link_bytes_per_s": (
            ADD_TRAFFIC_BYTES * largest / additions[largest] / 2,
            f"{measured}: sum of two tensors of {largest}; a copy reads and writes the same memory",
        ),
        "peak_flops_per_s": (
            {"fp32": rate, "bf16": rate, "fp16": rate},
            (f"{measured}: the fastest product; half formats are no faster"),
        ),
        "matmul_efficiency": (1.0, "the peak is a measured one"),
        "memory_efficiency": (1.0, "the bandwidth is a measured one"),
        "attention_forward_efficiency": (forward, f"{measured}: the best attention core"),
        "attention_backward_efficiency": (backward, f"{measured}: the best attention core"),
        "attention_half_head_dim": (0.0, "in the measured seconds"),
        "kernel_launch_s": (additions[min(additions)], f"{measured}: the smallest sum"),
        "kernel_floor_s": (0.0, "in the launch"),
        "host_dispatch_s": (0.0, "in the measured seconds: a kernel is finished when its call returns"),
        "kernel_curve": (kernels, measured),
        "num_cores": (num_cores, "counted by the operating system"),
        "busy_core_share": (
            _busy_share(rows, skew),
            f"{measured}: seconds of steps on one rank, over those on all cores at once less the waits for the "
            "slower rank",
        ),
        "rank_skew_root_s": (skew, f"{measured}: growth of turns of work and collective with the work"),
        "node_link_bytes_per_s": (bytes_per_s, f"{measured}: slope of messages over their bytes"),
        "node_link_latency_s": (latency_s, f"{measured}: the smallest message"),
        "node_network_bytes_per_s": (bytes_per_s, "as inside the node: there is only one"),
        "network_latency_s": (latency_s, "as inside the node: there is only one"),
        "link_efficiency": (1.0, "the link rate is a measured one"),
        "network_efficiency": (1.0, "the link rate is a measured one"),
        "collective_library": (transport, "the transport that was measured"),
        "collective_launch_s": (0.0, "in the link latency"),
        "collective_curve": (transfers, measured),
    }
    values = {field: value for field, (value, _) in fields.items()}
    sources = {field: source for field, (_, source) in fields.items()}
    cluster = ClusterSpec(name=name, num_devices=MOST_RANKS, **values, sources=sources)
    source = f"{measured}: steps of {len(PROBES)} small models over what their kernels say, geometric mean"
    return replace(
        cluster, step_over_kernels=_step_over_kernels(rows, cluster), sources={**sources, "step_over_kernels": source}
    )


def _step_over_kernels(rows: Sequence[Row], cluster: ClusterSpec) -> float:
    """How much longer the steps of the probes took than a simulation from single kernels says: the geometric mean."""
    measured_s = {row.name: row.seconds for row in rows if row.kind == "step"}
    alone = replace(cluster, num_devices=1)
    return geometric_mean(
        measured_s[plan.model.name] / simulate(replace(plan, cluster=alone)).report["step_time_s"] for plan in PROBES
    )


def _skews(rows: Sequence[Row], num_cores: int) -> dict[int, float]:
    """By the ranks of a group that has a core for each: what a turn of work and collective takes longer than the work,
    by the root of the work."""
    found = {}
    for ranks in {row.ranks for row in rows if row.kind == "turn" and row.ranks <= num_cores}:
        seconds = {row.name: row.seconds for row in rows if row.kind == "turn" and row.ranks == ranks}
        roots = [math.sqrt(seconds[f"{name}_work"]) for name in ("short", "long")]
        more_work = roots[1] - roots[0]  # on a machine that stood still meanwhile the short turns may be the long ones
        found[ranks] = max(0.0, (seconds["long"] - seconds["short"]) / more_work) if more_work > 0 else 0.0
    return found


def _at_once(rows: Sequence[Row], skews: Mapping[int, float]) -> list[Row]:
    """Collectives and messages, of collectives what they take once all ranks have come."""
    worked_s = {row.ranks: row.seconds for row in rows if row.kind == "turn" and row.name == "work"}
    found: list[Row] = []
    for row in rows:
        if row.kind == "collective" and row.ranks in skews:
            waited_s = skews[row.ranks] * math.sqrt(worked_s[row.ranks])
            found.append(replace(row, seconds=max(LEAST_SHARE * row.seconds, row.seconds - waited_s)))  # type: ignore[type-var]
        elif row.kind in ("collective", "message"):
            found.append(row)
    return found


def _never_faster(rows: Sequence[Row]) -> dict[str, float]:
    """Key of `collective_curve` -> seconds: no tensor takes less than a smaller one. Neighbours that were measured
    otherwise, by chance, get their mean (isotonic regression: Ayer et al. 1955, pool adjacent violators)."""
    found: dict[str, float] = {}
    for name, ranks in dict.fromkeys((row.name, row.ranks) for row in rows):
        pools: list[list[float]] = []
        of_kernel = sorted((row for row in rows if (row.name, row.ranks) == (name, ranks)), key=lambda row: row.sizes)
        for row in of_kernel:
            pools.append([row.seconds])
            while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
                last = pools.pop()
                pools[-1] += last
        level = [fmean(pool) for pool in pools for _ in pool]
        found |= {f"{name}-{ranks}-{row.sizes[0]}": seconds for row, seconds in zip(of_kernel, level, strict=True)}
    return found


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency and rate of messages: the time of the smallest, and the bytes that the largest moves more in its time
    more; all that it moves in all its time, where it takes hardly longer (few sizes, or a busy machine)."""
    points = sorted(points)
    (least, least_s), (most, most_s) = points[0], points[-1]
    longer_s = most_s - least_s
    return least_s, (most - least) / longer_s if longer_s > LEAST_SHARE * most_s else most / most_s


def _busy_share(rows: Sequence[Row], skew: float) -> float:
    """Share of its rate that a rank keeps while all cores compute: caches and memory are the cores' together. Steps on
    all cores end with the slowest rank's."""
    alone = {row.name: row.seconds for row in rows if row.kind == "alone"}
    simultaneous_s = sum(row.seconds for row in rows if row.kind == "together")
    waited_s = sum(skew * math.sqrt(PROBE_STEPS * seconds) / PROBE_STEPS for seconds in alone.values())
    return min(1.0, sum(alone.values()) / (simultaneous_s - waited_s)) if simultaneous_s > waited_s else 1.0


def _attention_share(rows: Sequence[Row], kind: str, rate: float) -> float:
    """Rate of the best attention core as a share of the fastest product; a causal core runs half of 4 s^2 d
    FLOPs, backward of 10."""
    rates = [1e-6]
    for row in rows:
        name, _, head_dim = row.name.rpartition("_")
        if row.kind == "kernel" and name == kind and head_dim.isdecimal():
            rates.append((2 if kind == "attention" else 5) * row.sizes[0] ** 2 * int(head_dim) / row.seconds)
    return min(1.0, max(rates) / rate)


def cluster_toml(cluster: ClusterSpec) -> str:
    """A cluster file: `[cluster]` with its numbers, then a table for each curve and for the
    sources, one line an entry."""
    plain = {name: getattr(cluster, name) for name in ("name", *cluster.sources)}
    tables = {
        name: value
        for name, value in plain.items()
        if isinstance(value, Mapping) and len(value) > len(cluster.peak_flops_per_s)
    }
    lines = ["[cluster]", *(f"{name} = {toml_value(value)}" for name, value in plain.items() if name not in tables)]
    for name, table in {**tables, "sources": cluster.sources}.items():
        lines += ["", f"[cluster.{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def report_of(cluster: ClusterSpec, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON form: the cluster's numbers and the measurements behind them."""
    return {
        "name": cluster.name,
        "num_cores": cluster.num_cores,
        "peak_flops_per_s": cluster.peak_flops_per_s["fp32"],
        "device_memory_bytes_per_s": cluster.device_memory_bytes_per_s,
        "message_latency_s": cluster.node_link_latency_s,
        "message_bytes_per_s": cluster.node_link_bytes_per_s,
        "median_spread": median(row.spread for row in rows),
        "measurements": [
            {
                "kind": row.kind,
                "name": row.name,
                "sizes": list(row.sizes),
                "ranks": row.ranks,
                "seconds": row.seconds,
                "spread": row.spread,
            }
            for row in rows
        ],
    }


def report_text(cluster: ClusterSpec, rows: Sequence[Row], written: str | None) -> str:
    """What was found, for people."""
    report = report_of(cluster, rows)
    lines = [
        f"{cluster.name}: {cluster.num_cores} cores, {len(rows)} measurements, half of them within "
        f"{report['median_spread']:.0%} "
        "(distance of quartiles)",
        f"  products up to {report['peak_flops_per_s'] / 1e9:.1f} GFLOP/s, memory "
        f"{report['device_memory_bytes_per_s'] / 1e9:.1f} GB/s",
        f"  messages from {report['message_latency_s'] * 1e6:.0f} us, {report['message_bytes_per_s'] / 1e9:.2f} GB/s",
    ]
    if written is not None:
        lines.append(f'Use it in a plan as: [cluster] file = "{written}", num_devices = <ranks>')
    return "\n".join(lines)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `calibrate`."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: half a minute instead of a few")
    parser.add_argument("--rounds", type=int, help="how often every case is measured")
    parser.add_argument(
        "--quantile",
        type=float,
        default=0.5,
        help=("which of the rounds counts: 0.5 is the median, less on a busy machine"),
    )
    parser.add_argument(
        "--transport", choices=("shm", "gloo"), default="shm", help="how ranks talk, as for train (default: shm)"
    )
    parser.add_argument("--name", default="this-host-measured", help="what the cluster is called")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measures this machine; `-o cluster.toml` writes the cluster file. Exit code 0."""
    import datetime

    if not 0 <= args.quantile <= 1:
        raise PlanError(f"--quantile {args.quantile} must lie between 0 and 1.")
    if args.rounds is not None and args.rounds < 1:
        raise PlanError(f"--rounds {args.rounds} must be at least 1.")
    check_output(args.output, ".toml")  # measuring takes minutes
    progress = service("measure_machine")
    rows = progress(
        quick=args.quick,
        rounds=args.rounds,
        quantile=args.quantile,
        transport=args.transport,
        report=lambda text: say(text, sys.stderr),
    )
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    cluster = calibrated(
        rows,
        name=args.name,
        num_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        when=when,
        transport=args.transport,
    )
    written = args.output if args.output is not None and args.output.endswith(".toml") else None
    if written is not None:
        write_text(written, cluster_toml(cluster))
        args.output = None
    emit(args, report_text(cluster, rows, written), report_of(cluster, rows))
    return 0


CALIBRATE = Command("calibrate", "shardproof calibrate -o cluster.toml", configure, run)
