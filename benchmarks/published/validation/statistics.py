"""Errors of predictions in groups: spreads, the noise of the data itself and a fit that leaves models out."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ..row import Row
from .predictions import Prediction


@dataclass(frozen=True)
class Spread:
    """Errors of a group: how many, mean absolute, mean, and the one furthest from zero."""

    count: int
    mape: float
    bias: float
    worst: float


def spread_of_errors(errors: Sequence[float]) -> Spread | None:
    """The spread of relative errors; None of none."""
    if not errors:
        return None
    return Spread(len(errors), statistics.fmean(map(abs, errors)), statistics.fmean(errors), max(errors, key=abs))


def time_spread(predictions: Iterable[Prediction]) -> Spread | None:
    """Errors of step times."""
    return spread_of_errors([error for prediction in predictions if (error := prediction.error) is not None])


def memory_spread(predictions: Iterable[Prediction], kind: str | None = None) -> Spread | None:
    """Errors of peak memory, of one kind of reading or of all."""
    wanted = (one for one in predictions if kind is None or one.measured.memory_kind == kind)
    return spread_of_errors([error for prediction in wanted if (error := prediction.memory_error) is not None])


def grouped(predictions: Iterable[Prediction], key: Callable[[Row], Hashable]) -> dict[Hashable, list[Prediction]]:
    """Predictions by a key of their row, in order of first appearance."""
    groups: dict[Hashable, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(key(prediction.row), []).append(prediction)
    return groups


def is_calibration(row: Row) -> bool:
    """True for the half of the rows that coefficients may be fitted to: by a hash of what near-duplicates share, so
    that they stay together."""
    digest = hashlib.blake2b(repr(row.setting_key).encode(), digest_size=1).digest()
    return digest[0] % 2 == 0


def noise_floors(rows: Iterable[Row], reading: Callable[[Row], float | None]) -> dict[str, tuple[int, float, float]]:
    """Source -> (configurations published more than once, median and largest spread of their
    readings, (max - min) / min)."""
    repeats: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if (value := reading(row)) is not None:
            names = ("model", "hardware", "parallel", "batch", "precision", "recompute", "schedule", "flags")
            fields = [*(row[name] for name in names), "scatter/gather" in str(row["notes"]) and row["notes"]]
            repeats.setdefault((row.source, json.dumps(fields, sort_keys=True)), []).append(value)
    spreads: dict[str, list[float]] = {}
    for (source, _), values in repeats.items():
        if len(values) > 1:
            spreads.setdefault(source, []).append(max(values) / min(values) - 1)
    return {source: (len(found), statistics.median(found), max(found)) for source, found in spreads.items()}


@dataclass(frozen=True)
class LeftOut:
    """A source predicted with one factor on its seconds, fitted to the other models of the source only."""

    models: int
    factors: tuple[float, float]
    spread: Spread


def leave_one_model_out(predictions: Sequence[Prediction]) -> LeftOut | None:
    """The errors that remain when each model's times are scaled by the median ratio of the other models;
    None for fewer than two."""
    by_model = {
        model: [prediction.error for prediction in members if prediction.error is not None]
        for model, members in grouped(predictions, lambda row: row["model.name"]).items()
    }
    by_model = {model: errors for model, errors in by_model.items() if errors}
    if len(by_model) < 2:
        return None
    errors, factors = [], []
    for model, own in by_model.items():
        factor = 1 / statistics.median(
            1 + error for other, found in by_model.items() if other != model for error in found
        )
        factors.append(factor)
        errors += [(1 + error) * factor - 1 for error in own]
    spread = spread_of_errors(errors)
    assert spread is not None
    return LeftOut(len(by_model), (min(factors), max(factors)), spread)
