"""Errors of predictions in groups: spreads, the noise of the data itself, a fit that leaves models out, and the cost of a wrong choice."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..published import Row
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
    """True for the half of the rows that coefficients may be fitted to: by a hash of what near-duplicates share, so that they stay
    together."""
    digest = hashlib.blake2b(repr(row.likeness).encode(), digest_size=1).digest()
    return digest[0] % 2 == 0


def noise_floors(rows: Iterable[Row], reading: Callable[[Row], float | None]) -> dict[str, tuple[int, float, float]]:
    """Source -> (configurations published more than once, median and largest spread of their readings, (max - min) / min)."""
    repeats: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if (value := reading(row)) is not None:
            names = ("model", "hardware", "parallel", "batch", "precision", "recompute", "schedule", "flags")
            alike = [*(row[name] for name in names), "scatter/gather" in str(row["notes"]) and row["notes"]]
            repeats.setdefault((row.source, json.dumps(alike, sort_keys=True)), []).append(value)
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
    """The errors that remain when each model's times are scaled by the median ratio of the other models; None for fewer than two."""
    by_model = {
        model: [prediction.error for prediction in members if prediction.error is not None]
        for model, members in grouped(predictions, lambda row: row["model.name"]).items()
    }
    by_model = {model: errors for model, errors in by_model.items() if errors}
    if len(by_model) < 2:
        return None
    errors, factors = [], []
    for model, own in by_model.items():
        factor = 1 / statistics.median(1 + error for other, found in by_model.items() if other != model for error in found)
        factors.append(factor)
        errors += [(1 + error) * factor - 1 for error in own]
    spread = spread_of_errors(errors)
    assert spread is not None
    return LeftOut(len(by_model), (min(factors), max(factors)), spread)


@dataclass(frozen=True)
class Regret:
    """What the layout predicted to be best costs against the one measured to be best, as a share of the latter's time.

    `agreement` is Kendall's tau-b of predicted and measured order.
    """

    group: str
    count: int
    regret: float
    chosen: str
    best: str
    agreement: float


def regrets(predictions: Iterable[Prediction], key: Callable[[Row], Mapping[str, object] | None]) -> list[Regret]:
    """Regret of every group of two layouts or more that answer one question: same model, machine and batch (`key`; None: no group).

    Layouts of a group whose global batch differs slightly are compared by seconds per sequence.
    """
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.error is not None and (found := key(prediction.row)) is not None:
            groups.setdefault(", ".join(str(value) for value in found.values()), []).append(prediction)
    return [_regret(name, members) for name, members in groups.items() if len(members) > 1]


def _regret(name: str, members: Sequence[Prediction]) -> Regret:
    measured = [_each(one, one.measured.step_s) for one in members]
    predicted = [_each(one, one.predicted_s) for one in members]
    chosen, best = predicted.index(min(predicted)), measured.index(min(measured))
    cost = measured[chosen] / measured[best] - 1
    return Regret(name, len(members), cost, members[chosen].layout, members[best].layout, _kendall(predicted, measured))


def _each(prediction: Prediction, seconds: float | None) -> float:
    assert seconds is not None
    return seconds / float(prediction.row["batch.global"])


def _kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b: agreeing less disagreeing pairs, over pairs that are tied in neither."""
    agreeing, first, second = 0, 0, 0
    for i in range(len(one)):
        for j in range(i):
            left, right = (
                math.copysign(1, one[i] - one[j]) * (one[i] != one[j]),
                math.copysign(1, other[i] - other[j]) * (other[i] != other[j]),
            )
            agreeing += int(left * right)
            first, second = first + (left != 0), second + (right != 0)
    return agreeing / math.sqrt(first * second) if first and second else 0.0
