"""Seconds of single kernels as they were measured on this machine: what `calibrate` writes into `cluster.kernel_curve`.

Between measured sizes seconds are straight on logarithmic scales; beyond them the rate stays.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.base.errors import ClusterError, did_you_mean
from ...core.machine.cluster import ClusterSpec, kernel_key
from ..network.measured import Measured

Variant = Literal["nt", "nn", "tn", "tn_"]
"""Which operand of a product lies transposed in memory: the second (x W^T), none (x W), the first (x^T y of a weight
gradient), which with `tn_` is added to a sum."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds of products by m, n and k: `rates` are FLOP/s on the grid of `sizes`."""

    sizes: tuple[tuple[int, ...], ...]
    rates: np.ndarray

    def seconds(self, m: int, n: int, k: int) -> float:
        """Seconds of one product; its rate lies between those of the eight neighbours, on logarithmic scales."""
        places, weights = [], []
        for size, known in zip((m, n, k), self.sizes, strict=True):
            low = min(max(bisect_right(known, size) - 1, 0), max(len(known) - 2, 0))
            high = min(low + 1, len(known) - 1)
            span = math.log(known[high] / known[low]) if high > low else 1.0
            places.append((low, high))
            weights.append(min(1.0, max(0.0, math.log(size / known[low]) / span)))
        total = 0.0
        for corner in range(8):
            chosen = [corner >> axis & 1 for axis in range(3)]
            share = math.prod(weights[axis] if chosen[axis] else 1 - weights[axis] for axis in range(3))
            if share:
                total += share * math.log(self.rates[tuple(places[axis][chosen[axis]] for axis in range(3))])
        return 2.0 * m * n * k / math.exp(total)


def kernel_s(cluster: ClusterSpec, name: str, elements: float) -> float:
    """Seconds of one call of a kernel on so many elements. Raises `ClusterError` for one that was not measured."""
    line = _curves(cluster)[0].get(name)
    if line is None:
        raise _unknown(cluster, name)
    return line.seconds(max(elements, 1.0))


def attention_head_s(cluster: ClusterSpec, name: str, head_dim: int, sequence: float) -> float:
    """Seconds of one causal head of an attention core, `attention` or `attention_backward`. A width that was not
    measured takes in proportion to the nearest one. Raises `ClusterError` where none was measured."""
    widths = [int(known.rpartition("_")[2]) for known in _curves(cluster)[0] if known.rpartition("_")[0] == name]
    if not widths:
        raise _unknown(cluster, f"{name}_{head_dim}")
    nearest = min(widths, key=lambda width: (abs(math.log(width / head_dim)), width))
    return kernel_s(cluster, f"{name}_{nearest}", sequence) * head_dim / nearest


def host_product_s(cluster: ClusterSpec, variant: Variant, m: int, n: int, k: int) -> float:
    """Seconds of one product [m, k] x [k, n]. Raises `ClusterError` where none was measured."""
    grid = _curves(cluster)[1].get(variant)
    if grid is None:
        raise _unknown(cluster, variant)
    return grid.seconds(m, n, k)


def _unknown(cluster: ClusterSpec, name: str) -> ClusterError:
    known = sorted({*_curves(cluster)[0], *_curves(cluster)[1]})
    return ClusterError(
        f"kernel_curve of {cluster.name} has no {name!r}{did_you_mean(name, known)} Run shardproof calibrate again."
    )


def _curves(cluster: ClusterSpec) -> tuple[dict[str, Measured], dict[str, Grid]]:
    """The curves of a cluster by kernel, and the grids of its products; read once."""
    if "kernels" not in cluster.memo:
        cluster.memo["kernels"] = _read(cluster.kernel_curve)
    found: tuple[dict[str, Measured], dict[str, Grid]] = cluster.memo["kernels"]
    return found


def _read(curve: Mapping[str, float]) -> tuple[dict[str, Measured], dict[str, Grid]]:
    lines: dict[str, dict[int, float]] = {}
    products: dict[str, dict[tuple[int, ...], float]] = {}
    for key, seconds in curve.items():
        parsed = kernel_key(key)
        assert parsed is not None, key
        name, sizes = parsed
        if len(sizes) == 1:
            lines.setdefault(name, {})[sizes[0]] = seconds
        else:
            products.setdefault(name, {})[sizes] = seconds
    measured = {
        name: Measured(tuple(float(size) for size in sorted(points)), tuple(points[size] for size in sorted(points)))
        for name, points in lines.items()
    }
    return measured, {name: _grid(name, points) for name, points in products.items()}


def _grid(name: str, points: Mapping[tuple[int, ...], float]) -> Grid:
    sizes = tuple(tuple(sorted({key[axis] for key in points})) for axis in range(3))
    missing = [(m, n, k) for m in sizes[0] for n in sizes[1] for k in sizes[2] if (m, n, k) not in points]
    if missing:
        lacking = "-".join(map(str, missing[0]))
        raise ClusterError(
            f"kernel_curve has {name} products on no full grid: {name}-{lacking} is missing. Run "
            "shardproof calibrate again."
        )
    rates = [[[2.0 * m * n * k / points[m, n, k] for k in sizes[2]] for n in sizes[1]] for m in sizes[0]]
    return Grid(sizes, np.array(rates))
