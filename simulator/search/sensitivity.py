"""Which number of the cluster, improved by a tenth, shortens the step most: every rate and latency in
turn, all else equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.machine.cluster import ClusterSpec
from ...core.plan.plan import Plan
from ..simulation.simulate import simulate

IMPROVEMENT = 0.1
"""Rates and shares become this much larger, times this much smaller."""

RATES = (
    "peak_flops_per_s",
    "device_memory_bytes_per_s",
    "node_link_bytes_per_s",
    "node_network_bytes_per_s",
    "channel_bytes_per_s",
    "product_curve",
    "memory_curve",
)
SHARES = (
    "matmul_efficiency",
    "grouped_matmul_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "sustained_share",
    "overlap_compute_share",
    "nvls_efficiency",
)
"""Shares of a rate that many kernels have in common; improved at most to 1."""

TIMES = (
    "kernel_launch_s",
    "kernel_floor_s",
    "host_dispatch_s",
    "node_link_latency_s",
    "network_latency_s",
    "leaf_latency_s",
    "collective_launch_s",
    "collective_ramp_bytes",
    "oversubscription",
    "collective_curve",
)
"""Latencies, and the other numbers that are better the smaller they are."""

BY_DTYPE = {"matmul_efficiency": "matmul_efficiency_by_dtype", "sustained_share": "sustained_share_by_dtype"}
"""Shares that single dtypes override: both are improved together."""


@dataclass(frozen=True)
class Gain:
    """A field of the cluster, its value and improved value (None for curves and tables), and the step with it."""

    name: str
    value: float | None
    improved: float | None
    step_time_s: float
    gained_s: float
    gained_share: float

    def report(self) -> dict[str, Any]:
        """The JSON keys."""
        return {
            "name": self.name,
            "value": self.value,
            "improved": self.improved,
            "step_time_s": self.step_time_s,
            "gained_s": self.gained_s,
            "gained_share": self.gained_share,
        }


def sensitivity(plan: Plan) -> tuple[Gain, ...]:
    """Every number of the plan's cluster that can be improved, by the step time it gains, most first.

    Slow devices and links count; steps that `variation` draws do not, because their chance would hide small gains.
    """
    plan = replace(plan, variation=plan.variation.with_samples(0))
    step_s = simulate(plan).report["step_time_s"]
    found = []
    for name, cluster in improvements(plan.cluster, plan.precision.dtype):
        improved_s = simulate(replace(plan, cluster=cluster)).report["step_time_s"]
        before, after = _number(plan.cluster, name, plan.precision.dtype), _number(cluster, name, plan.precision.dtype)
        found.append(Gain(name, before, after, improved_s, step_s - improved_s, (step_s - improved_s) / step_s))
    return tuple(sorted(found, key=lambda gain: (-gain.gained_s, gain.name)))


def improvements(cluster: ClusterSpec, dtype: str) -> Iterator[tuple[str, ClusterSpec]]:
    """(field, the cluster with that field improved) for every field that is used at all; `dtype` is
    that of the products."""
    for name in RATES:
        yield from _changed(cluster, name, 1 + IMPROVEMENT)
    for name in SHARES:
        yield from _changed(cluster, name, 1 + IMPROVEMENT, most=1.0)
    for name in TIMES:
        yield from _changed(cluster, name, 1 - IMPROVEMENT, least=1.0 if name == "oversubscription" else 0.0)


def _changed(
    cluster: ClusterSpec, name: str, factor: float, *, most: float = float("inf"), least: float = 0.0
) -> Iterator[tuple[str, ClusterSpec]]:
    fields = {name: _scaled(getattr(cluster, name), factor, most, least)}
    if name in BY_DTYPE:
        fields[BY_DTYPE[name]] = _scaled(getattr(cluster, BY_DTYPE[name]), factor, most, least)
    if any(value != getattr(cluster, field) for field, value in fields.items()):
        yield name, replace(cluster, **fields)


def _scaled(value: Any, factor: float, most: float, least: float) -> Any:
    if isinstance(value, Mapping):
        return {key: max(least, min(most, number * factor)) for key, number in value.items()}
    return max(least, min(most, value * factor))


def _number(cluster: ClusterSpec, name: str, dtype: str) -> float | None:
    """The number of a field that the plan uses; None for a curve."""
    value = getattr(cluster, name)
    if name in BY_DTYPE:
        return float(getattr(cluster, BY_DTYPE[name]).get(dtype, value))
    if isinstance(value, Mapping):
        return float(value[dtype]) if dtype in value else None
    return float(value)
