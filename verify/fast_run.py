"""Holds a run in fast numerics to the derived bounds: every canonical tensor against exact numerics on one device, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.plan import Plan
from .bounds import StepBounds
from .compare import compare
from .kept import Kept
from .ledger import OPTIMIZER, WEIGHT, Key, RunLedger


@dataclass(frozen=True)
class Distance:
    """How far a tensor of a fast run is from the reference, at most: `distance` on rank `global_rank`, where `bound` is allowed."""

    key: Key
    global_rank: int
    distance: float
    bound: float

    @property
    def share(self) -> float:
        """The part of the bound that is used; not finite numbers leave every bound."""
        if not np.isfinite(self.distance):
            return np.inf
        return self.distance / self.bound if self.bound else np.inf * self.distance if self.distance else 0.0


@dataclass(frozen=True)
class FastCheck:
    """How far every tensor of a run is from the reference; `wrong` are those that leave their bound, in dataflow order."""

    plan: Plan
    distances: Mapping[Key, Distance]
    wrong: tuple[Key, ...]

    @property
    def nearest(self) -> Distance:
        """The tensor that uses most of its bound, but for weights: an update is as large for a small gradient and may use all of it."""
        return max((each for key, each in self.distances.items() if key.phase != WEIGHT), key=lambda each: each.share)

    @property
    def report(self) -> dict[str, Any]:
        """The JSON form, in which a share that is not finite is null."""
        key, share = self.nearest.key, self.nearest.share
        nearest = {"tensor": key.tensor, "phase": key.phase, "step": key.step + 1, "share": share if np.isfinite(share) else None}
        return {"tensors": len(self.distances), "tensors_outside": len(self.wrong), "nearest": nearest}

    def terms(self, key: Key) -> str:
        """What a bound was made of, in words."""
        path = StepBounds(self.plan).roundings(key)
        stored = "" if self.plan.precision.dtype == "fp32" else f" and {path.stored} roundings to {self.plan.precision.dtype}"
        return f"{path.terms} terms in fp32{stored}"


def check_fast(plan: Plan, reference: RunLedger, run: RunLedger) -> FastCheck:
    """Every tensor of `run` against that of `reference`. Both ledgers have captured all values, and the same tensors in whole."""
    expected = {key: pieces[0].load() for key, pieces in reference.pieces.items()}
    largest = {key: float(np.abs(values).max(initial=0.0)) for key, values in expected.items()}
    bounds, distances = StepBounds(plan), {}
    for key, values in expected.items():
        bound = bounds.of(key, largest)
        found = [Distance(key, piece.global_rank, _distance(values, piece), bound) for piece in run.pieces[key]]
        distances[key] = max(found, key=lambda each: each.share)
    differing = [each for each in compare(reference, run, plan.model) if each.key in distances]
    assert all(each.problem == "differs" for each in differing), "the exact run of this layout had all tensors whole"
    return FastCheck(plan, distances, tuple(each.key for each in differing if distances[each.key].share > 1))


def _distance(expected: np.ndarray, piece: Any) -> float:
    part = expected[tuple(slice(lo, hi) for lo, hi in piece.region)]
    return float(np.abs(piece.load().astype(np.float64) - part).max(initial=0.0))


def states(reference: RunLedger) -> dict[Key, Kept]:
    """Where the weights and moments of every step of a captured run on one device lie."""
    found = {}
    for key, (piece, *_) in reference.pieces.items():
        if key.phase in (OPTIMIZER, WEIGHT):
            assert isinstance(piece.kept, Kept), f"{key} was not captured"
            found[key] = piece.kept
    return found
