"""Fitted coefficients fitted again: on the calibration half of their rows, one at a time, with the spread over resampled families."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...core.plan import Plan
from ..published import Row, RowError, measured_of
from ..published_plans import plan_of
from ..simulate import simulate
from .statistics import is_calibration
from .tables import Table


@dataclass(frozen=True)
class Coefficient:
    """One fitted number of a device or a stack: a field of `ClusterSpec`, and the rows that it is fitted to."""

    name: str
    field: str
    holds: Callable[[Row], bool]


def _sources(*names: str, device: str) -> Callable[[Row], bool]:
    return lambda row: row.source.startswith(names) and device in str(row["hardware.gpu"]) and row["tier"] != "D"


COEFFICIENTS: tuple[Coefficient, ...] = (
    Coefficient("A100 sustained share of the clock", "sustained_share", _sources("SC21", "Korthikanti", "MT-NLG", device="A100")),
    Coefficient("A100 memory efficiency", "memory_efficiency", _sources("SC21", "Korthikanti", "MT-NLG", device="A100")),
    Coefficient("A100 host, megatron-2021", "host_dispatch_s", lambda row: row.family == "vtrain_single"),
    Coefficient("H100 sustained share of the clock", "sustained_share", _sources("dgxc", "MLPerf", device="H100")),
    Coefficient("B200 sustained share of the clock", "sustained_share", _sources("SimuMax", device="B200")),
)
"""What `--refit` fits."""

STEPS = tuple(1.04**step for step in range(-6, 7))
"""Factors on today's value that are tried: 0.79 to 1.27."""

MOST_ROWS = 60
"""Rows per coefficient, taken evenly, so that a refit takes seconds."""

RESAMPLES = 200


@dataclass(frozen=True)
class Fit:
    """Today's value, the one that fits the calibration half best, its spread over resamples, and errors with both."""

    coefficient: Coefficient
    count: int
    value: float
    fitted: float
    spread: float
    error: float
    fitted_error: float


def refit(rows: Iterable[Row]) -> list[Fit]:
    """Every coefficient that has rows."""
    rows = [row for row in rows if row["kind"] == "train_step" and is_calibration(row) and not row["flags.suspect"]]
    return [
        fit for coefficient in COEFFICIENTS if (fit := _refit(coefficient, [row for row in rows if coefficient.holds(row)])) is not None
    ]


def _refit(coefficient: Coefficient, rows: Sequence[Row]) -> Fit | None:
    """Rows are weighted so that each family of near-duplicates counts once; the resampling draws families."""
    chosen = rows[:: max(1, len(rows) // MOST_ROWS)]
    families: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    value = 0.0
    for row in chosen:
        seconds = measured_of(row).step_s
        try:
            plan = plan_of(row).plan
        except RowError:
            continue
        if seconds is None:
            continue
        value = getattr(plan.cluster, coefficient.field)
        families.setdefault(row.likeness, []).append(tuple(_log_error(plan, coefficient.field, step, seconds) for step in STEPS))
    if len(families) < 2:
        return None
    means = [tuple(statistics.fmean(map(abs, column)) for column in zip(*found, strict=True)) for found in families.values()]
    draw = random.Random(2022)
    resampled = [_best(draw.choices(means, k=len(means))) for _ in range(RESAMPLES)]
    best = _best(means)
    today, fitted = (statistics.fmean(column[STEPS.index(step)] for column in means) for step in (1.0, best))
    return Fit(coefficient, len(families), value, value * best, value * statistics.pstdev(resampled), today, fitted)


def _log_error(plan: Plan, field: str, step: float, seconds: float) -> float:
    ceiling = math.inf if field.endswith("_s") else 1.0
    changed = dataclasses.replace(plan.cluster, **{field: min(ceiling, getattr(plan.cluster, field) * step)})
    return math.log(simulate(dataclasses.replace(plan, cluster=changed)).report["step_time_s"] / seconds)


def _best(columns: Sequence[tuple[float, ...]]) -> float:
    return min(STEPS, key=lambda step: statistics.fmean(column[STEPS.index(step)] for column in columns))


def refit_table(fits: Iterable[Fit]) -> Table:
    """The fits as a table."""
    rows = tuple(
        (
            fit.coefficient.name,
            fit.coefficient.field,
            str(fit.count),
            f"{fit.value:.4g}",
            f"{fit.fitted:.4g} +- {fit.spread:.2g}",
            f"{fit.error:.1%}",
            f"{fit.fitted_error:.1%}",
        )
        for fit in fits
    )
    note = (
        "Each coefficient alone, the others as they are, on the calibration half; families of near-duplicates count once. The spread is "
        f"the standard deviation over {RESAMPLES} resamples of the families. Errors are mean absolute logarithms."
    )
    return Table("Refit", note, ("coefficient", "field", "families", "today", "fitted", "error today", "fitted error"), rows)
