"""Collectives as they were measured: what `calibrate` writes into a cluster file, in place of an algorithm's line."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.machine.cluster import ClusterSpec, curve_key


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one operation over one number of ranks by payload, ascending."""

    payloads: tuple[float, ...]
    measured_s: tuple[float, ...]
    algorithm: str = "measured"
    protocol: str = "curve"

    def seconds(self, payload: float) -> float:
        """Seconds at a payload: straight between measured points on logarithmic scales, constant below
        them, at the last rate above."""
        place = bisect_left(self.payloads, payload)
        if place == 0:
            return self.measured_s[0]
        low, low_s = self.payloads[place - 1], self.measured_s[place - 1]
        if place == len(self.payloads):
            return low_s * payload / low
        high, high_s = self.payloads[place], self.measured_s[place]
        weight = math.log(payload / low) / math.log(high / low)
        return math.exp(math.log(low_s) * (1 - weight) + math.log(high_s) * weight)


def measured_line(cluster: ClusterSpec, op: str, size: int) -> Measured | None:
    """The measured curve of an operation over `size` ranks of one node; None where the cluster has none.

    Ranks that are more than the cores took turns while they were measured, and take turns again where they are
    simulated (`host_cores`): the seconds are those of a core each.
    """
    points = sorted(_points(cluster.collective_curve, op, size))
    share = min(1.0, cluster.num_cores / size) if cluster.num_cores else 1.0
    return (
        Measured(tuple(payload for payload, _ in points), tuple(share * seconds for _, seconds in points))
        if points
        else None
    )


def _points(curve: Mapping[str, float], op: str, size: int) -> list[tuple[float, float]]:
    keys = [(curve_key(key), seconds) for key, seconds in curve.items()]
    return [(float(key[2]), seconds) for key, seconds in keys if key and key[:2] == (op, size)]
