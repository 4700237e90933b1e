"""Holds a run in fast numerics to exact numerics on one device, step by step: every canonical tensor to a derived bound
(`bounds`), and every class of tensors to having no common factor (`regression`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...core.plan.plan import Plan
from ..ledger.compare import compare
from ..ledger.duplicates import PHASES
from ..ledger.ledger import ACTIVATION, HELD_OUT, OPTIMIZER, WEIGHT, Key, Piece, RunLedger
from ..ledger.stored import StoredValues
from .bounds import StepBounds
from .regression import Coefficient, Values, coefficients


@dataclass(frozen=True)
class Distance:
    """How far a tensor of a fast run is from the reference, at most: `distance` on rank `global_rank`,
    where `bound` is allowed."""

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
    """How far every tensor of a run is from the reference; `wrong` are those that leave their bound, in dataflow order.
    `coefficients` say how many times the reference each class of tensors is."""

    plan: Plan
    distances: Mapping[Key, Distance]
    wrong: tuple[Key, ...]
    coefficients: tuple[Coefficient, ...]

    @property
    def nearest(self) -> Distance:
        """The tensor that uses most of its bound, but for weights: an update is as large for a small gradient
        and may use all of it."""
        return max((each for key, each in self.distances.items() if key.phase != WEIGHT), key=lambda each: each.share)

    @property
    def scaled(self) -> tuple[Coefficient, ...]:
        """Classes that are not once the reference, in the order in which they come."""
        return tuple(each for each in self.coefficients if each.share > 1)

    @property
    def report(self) -> dict[str, object]:
        """The JSON form, in which a share that is not finite is null. Classes stand with the one first that uses
        most of its interval."""
        key, share = self.nearest.key, self.nearest.share
        nearest = {
            "tensor": key.tensor,
            "phase": key.phase,
            "step": key.step + 1,
            "share": share if np.isfinite(share) else None,
        }
        classes = [each.report for each in sorted(self.coefficients, key=lambda each: -each.share)]
        counts = {
            "tensors": len(self.distances),
            "tensors_outside": len(self.wrong),
            "classes_scaled": len(self.scaled),
        }
        return {**counts, "nearest": nearest, "classes": classes}

    def terms(self, key: Key) -> str:
        """What a bound was made of, in words."""
        path = StepBounds(self.plan).roundings(key)
        stored = (
            ""
            if self.plan.precision.dtype == "fp32"
            else (f" and {path.stored} roundings to {self.plan.precision.dtype}")
        )
        return f"{path.terms} terms in fp32{stored}"


def check_fast(plan: Plan, reference: RunLedger, run: RunLedger) -> FastCheck:
    """Every tensor of `run` against that of `reference`, but for what a run has twice, which is compared with itself
    (`twice`). Both ledgers have captured all values, and the same tensors in whole."""
    expected = {key: pieces[0].load() for key, pieces in reference.pieces.items() if key.phase not in PHASES}
    largest = {key: float(np.abs(values).max(initial=0.0)) for key, values in expected.items()}
    bounds, distances = StepBounds(plan), {}
    for key, values in expected.items():
        bound = bounds.of(key, largest)
        found = [
            Distance(key, piece.global_rank, _distance(values[_box(piece)], piece.load()), bound)
            for piece in run.pieces[key]
        ]
        distances[key] = max(found, key=lambda each: each.share)
    differing = [each for each in compare(reference, run, plan.named_shapes) if each.key in distances]
    assert all(each.problem == "differs" for each in differing), "the exact run of this layout had all tensors whole"
    wrong = tuple(each.key for each in differing if distances[each.key].share > 1)
    return FastCheck(plan, distances, wrong, coefficients(plan.model, whole_values(expected, run)))


def whole_values(expected: Mapping[Key, np.ndarray], run: RunLedger) -> Iterator[Values]:
    """Every tensor of the reference and of a run, in whole: of replicas that which is farthest from the reference."""
    for key, values in expected.items():
        found = np.full(values.shape, np.nan)
        parts = [(_box(piece), piece.load()) for piece in run.pieces[key]]
        for box, part in sorted(parts, key=lambda part: _distance(values[part[0]], part[1])):
            found[box] = part
        yield key, values, found


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in piece.region)


def _distance(expected: np.ndarray, found: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float64) - expected).max(initial=0.0))


def states(reference: RunLedger) -> dict[Key, StoredValues]:
    """Where the weights and moments of every step of a captured run on one device lie, and the
    logits of its routers."""
    found = {}
    for key, (piece, *_) in reference.pieces.items():
        if key.phase in (OPTIMIZER, WEIGHT) or (
            key.phase in (ACTIVATION, HELD_OUT) and key.tensor.endswith(".mlp.router")
        ):
            assert isinstance(piece.stored, StoredValues), f"{key} was not captured"
            found[key] = piece.stored
    return found
