"""Fitted coefficients fitted again: on the calibration half of their rows, one at a time, with the spread
over resampled families."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ....core.plan.plan import Plan
from ....simulator.simulation.simulate import simulate
from ..plans import plan_of
from ..row import Row, RowError, measured_of
from .held import aligned, device_field, engine_share, host_calls
from .statistics import is_calibration
from .table import Table

FACTORS = tuple(1.03**step for step in range(-7, 8))
"""Factors on today's value that are tried: 0.81 to 1.23."""

DIFFERENCES = tuple(step / 100 for step in range(-6, 7))
"""Differences to today's share that are tried, where zero is a value like others."""


@dataclass(frozen=True)
class Coefficient:
    """One fitted number of a device or a stack, and the rows that it is fitted to.

    `field` is where it stands, `today` reads it for a plan, and within `held(plan, value)` the plan that it
    gives has it at that value.
    """

    name: str
    field: str
    holds: Callable[[Row], bool]
    today: Callable[[Plan], float]
    held: Callable[[Plan, float], AbstractContextManager[Plan]]
    additive: bool = False

    def tried(self, value: float) -> tuple[float, ...]:
        """The values that are tried around today's."""
        return tuple(value + step for step in DIFFERENCES) if self.additive else tuple(value * step for step in FACTORS)


def _rows(*names: str, gpu: str = "", dtype: str = "") -> Callable[[Row], bool]:
    """Dense rows of sources or series whose names begin so, on a device, in a number format."""
    return lambda row: (
        (row.source.startswith(names) or row.family.startswith(names))
        and gpu in str(row["hardware.gpu"])
        and dtype in str(row["precision"]).lower()
        and row["tier"] != "D"
        and not row["model.moe"]
    )


_OF_2022 = ("Korthikanti",)
_NVIDIA = ("dgxc2504_8b", "dgxc2504_70b", "dgxc2504_nem15", "dgxc2502", "dgxc_gb200_405b", "MLPerf")

COEFFICIENTS: tuple[Coefficient, ...] = (
    Coefficient(
        "A100, sustained share", "sustained_share", _rows(*_OF_2022, gpu="A100"), *device_field("sustained_share")
    ),
    Coefficient(
        "A100, memory efficiency", "memory_efficiency", _rows(*_OF_2022, gpu="A100"), *device_field("memory_efficiency")
    ),
    Coefficient("A100, megatron-2021", "host_calls", _rows("vtrain_single"), *host_calls()),
    Coefficient("A100, megatron-2021", "engine_share", _rows("sc21_t1", "sc21_fig18"), *engine_share(), additive=True),
    Coefficient("A100, megatron-deepspeed", "engine_share", _rows("BLOOM"), *engine_share(), additive=True),
    Coefficient("A100, zero-bubble", "engine_share", _rows("Zero Bubble"), *engine_share(), additive=True),
    Coefficient("A100, zero-bubble-te", "engine_share", _rows("vocabpar_1f1b"), *engine_share(), additive=True),
    Coefficient(
        "all, torchtitan",
        "engine_share",
        _rows("torchtitan benchmarks", "torchtitan docs"),
        *engine_share(),
        additive=True,
    ),
    Coefficient("all, fsdp", "engine_share", _rows("llm-foundry"), *engine_share(), additive=True),
    Coefficient("products, rows at 16 bytes", "ALIGNED_AT_16_BYTES", _rows("BLOOM"), *aligned(3)),
    Coefficient("products, rows at 2 bytes", "ALIGNED_AT_2_BYTES", _rows("vtrain_single"), *aligned(0)),
    Coefficient("H100 and GB200, megatron-te", "host_calls", _rows(*_NVIDIA, "SimuMax"), *host_calls()),
    Coefficient(
        "H100, sustained share, bf16",
        "sustained_share",
        _rows(*_NVIDIA, gpu="H100", dtype="bf16"),
        *device_field("sustained_share"),
    ),
    Coefficient(
        "H100, sustained share, fp8",
        "sustained_share",
        _rows(*_NVIDIA, gpu="H100", dtype="fp8"),
        *device_field("sustained_share", "fp8"),
    ),
    Coefficient(
        "B200, sustained share, bf16", "sustained_share", _rows("SimuMax", gpu="B200"), *device_field("sustained_share")
    ),
    Coefficient(
        "GB200, sustained share, fp8",
        "sustained_share",
        _rows(*_NVIDIA, "Megatron-Bridge", gpu="GB200", dtype="fp8"),
        *device_field("sustained_share", "fp8"),
    ),
)
"""What `--refit` fits."""


def is_fitted_to(row: Row) -> bool:
    """True for a row that a coefficient is, or may be, fitted to."""
    return any(coefficient.holds(row) for coefficient in COEFFICIENTS)


MOST_ROWS = 40
"""Rows per coefficient, taken evenly, so that a refit takes seconds."""

RESAMPLES = 200


@dataclass(frozen=True)
class Fit:
    """Today's value, the one that fits the calibration half best, its spread over resamples, and errors with both."""

    coefficient: Coefficient
    rows: int
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
        fit
        for coefficient in COEFFICIENTS
        if (fit := _refit(coefficient, [row for row in rows if coefficient.holds(row)])) is not None
    ]


def _refit(coefficient: Coefficient, rows: Sequence[Row]) -> Fit | None:
    """Rows are weighted so that each family of near-duplicates counts once; the resampling draws families."""
    families: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    value = 0.0
    for row in rows[:: max(1, len(rows) // MOST_ROWS)]:
        seconds = measured_of(row).step_s
        try:
            plan = plan_of(row).plan
        except RowError:
            continue
        if seconds is None:
            continue
        value = coefficient.today(plan)
        families.setdefault(row.setting_key, []).append(_log_errors(coefficient, plan, value, seconds))
    if len(families) < 2:
        return None
    means = [
        tuple(statistics.fmean(map(abs, column)) for column in zip(*found, strict=True)) for found in families.values()
    ]
    draw = random.Random(2022)
    tried = coefficient.tried(value)
    resampled = [tried[_best(draw.choices(means, k=len(means)))] for _ in range(RESAMPLES)]
    best, now = _best(means), len(tried) // 2
    today, fitted = (statistics.fmean(column[index] for column in means) for index in (now, best))
    count = sum(map(len, families.values()))
    return Fit(coefficient, count, len(families), value, tried[best], statistics.pstdev(resampled), today, fitted)


def _log_errors(coefficient: Coefficient, plan: Plan, value: float, seconds: float) -> tuple[float, ...]:
    """Logarithms of predicted over measured seconds with every value that is tried."""
    found = []
    for tried in coefficient.tried(value):
        with coefficient.held(plan, tried) as changed:
            found.append(math.log(simulate(changed).period_s / seconds))
    return tuple(found)


def _best(columns: Sequence[tuple[float, ...]]) -> int:
    """Index of the value with the smallest mean error, of equal ones the nearest to today's."""
    indices = range(len(columns[0]))
    return min(
        indices,
        key=lambda index: (
            round(statistics.fmean(column[index] for column in columns), 9),
            abs(index - len(indices) // 2),
        ),
    )


def refit_table(fits: Iterable[Fit]) -> Table:
    """The fits as a table."""
    rows = tuple(
        (
            fit.coefficient.name,
            fit.coefficient.field,
            str(fit.rows),
            str(fit.count),
            f"{fit.value:.4g}",
            f"{fit.fitted:.4g} +- {fit.spread:.2g}",
            f"{fit.error:.1%}",
            f"{fit.fitted_error:.1%}",
        )
        for fit in fits
    )
    note = (
        "Each coefficient alone, the others as they are, on the calibration half; families of near-duplicates count "
        "once. The spread is "
        f"the standard deviation over {RESAMPLES} resamples of the families. Errors are mean absolute logarithms. "
        "Sustained share and "
        "memory efficiency of the A100 are measured elsewhere and not fitted; on these rows the second weighs little."
    )
    header = ("coefficient", "field", "rows", "families", "today", "fitted", "error today", "fitted error")
    return Table("Refit", note, header, rows)
