"""The validation as tables: values first, then text or markdown from the same rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..published import Row, measured_of
from .causes import CAUSES, OUTLIER, causes_of, outliers
from .noise import Floor, floor_of, floors, regret_of_chance, repetitions
from .parts import PartPrediction
from .predictions import Prediction
from .statistics import (
    Regret,
    grouped,
    is_calibration,
    leave_one_model_out,
    memory_spread,
    regrets,
    spread_of_errors,
    time_spread,
)
from .targets import TARGETS, bloom_group, vtrain_group


@dataclass(frozen=True)
class Table:
    """A title, a paragraph, a header and rows of cells."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def validation_tables(rows: Sequence[Row], predictions: list[Prediction], parts: list[PartPrediction]) -> list[Table]:
    """Every table of the validation, those without rows left out."""
    tables = [
        _targets(rows, predictions),
        _bias(rows, predictions),
        _sources(predictions),
        _memory(predictions),
        _split(predictions),
        _left_out(predictions),
        _regrets(rows, predictions),
        _parts(parts),
        _noise(rows),
        _causes(predictions),
        _outliers(predictions),
        _refused(predictions),
    ]
    return [table for table in tables if table.rows]


ALLOWED_BIAS = 0.02
"""Bias that is asked of every source."""

LEFT_OUT_ERROR, CHOICE_COST = 0.08, 0.03
"""Asked of a vTrain model left out of a fit, and of choosing the layout that is predicted to be best, in every group."""

MIN_BIAS_ROWS = 2
"""Rows of a series from which a mean error is called a bias."""


def _percent(value: float, signed: bool = False) -> str:
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _targets(rows_read: Sequence[Row], predictions: list[Prediction]) -> Table:
    rows: list[tuple[str, ...]] = []
    for target in TARGETS:
        if (spread := spread_of_errors(target.errors(predictions))) is not None:
            met = "yes" if spread.mape <= target.mape else "no"
            digits = f"{spread.mape:.2%}" if target.mape < 0.01 else _percent(spread.mape)
            cells = (target.name, str(spread.count), digits, f"{target.mape:.2g}".replace("0.006", "0.6%"), met)
            asked = f"{target.mape:.1%}"
            rows.append((*cells[:3], asked, met, _percent(spread.bias, True), _percent(spread.worst, True), target.peers))
    rows += _derived_targets(rows_read, predictions)
    note = "Mean absolute relative error against what is asked; bias is the mean error (above zero: predicted too slow or too large)."
    return Table("Targets", note, ("rows of", "count", "error", "asked", "met", "bias", "worst", "others"), tuple(rows))


def _derived_targets(rows_read: Sequence[Row], predictions: list[Prediction]) -> list[tuple[str, ...]]:
    """What is asked of a model left out, and of choices; no coefficient is fitted to a multi-node row of vTrain, so that every model of
    it is left out already, and a factor from its other model is more than is asked."""
    rows: list[tuple[str, ...]] = []
    multi = [one for one in predictions if one.row.family == "vtrain_multi"]
    if (found := leave_one_model_out(multi)) is not None:
        met = "yes" if found.spread.mape <= LEFT_OUT_ERROR else "no"
        cells = (str(found.spread.count), _percent(found.spread.mape), _percent(LEFT_OUT_ERROR), met)
        worst = (_percent(found.spread.bias, True), _percent(found.spread.worst, True))
        rows.append(("vTrain multi-node, a factor from its other model", *cells, *worst, "Calculon 8.6%, tp to 8, a factor each"))
    costs: dict[str, list[float]] = {"vTrain multi-node and BLOOM": [], "vTrain single-node": []}
    for one in [*regrets(predictions, vtrain_group), *regrets(predictions, bloom_group)]:
        costs["vTrain single-node" if one.group.startswith("vtrain_single") else "vTrain multi-node and BLOOM"].append(one.regret)
    chance = regret_of_chance(rows_read)
    for name, found_costs in costs.items():
        if found_costs:
            worst_cost, groups = max(found_costs), f"{len(found_costs)} groups, {sum(cost <= CHOICE_COST for cost in found_costs)} met"
            met = "yes" if worst_cost <= CHOICE_COST else "no"
            said = "Calculon, SimuMax 4.5%"
            if chance is not None and "single" in name:
                said = f"by times of another day {chance[0]:.1%} and {chance[1]:.1%}"
            mean = statistics.fmean(found_costs)
            rows.append((f"{name}, cost of the choice", groups, _percent(mean), _percent(CHOICE_COST), met, "", _percent(worst_cost), said))
    return rows


def _sources(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(predictions, lambda row: (row.source, _series(row))).items():
        assert isinstance(key, tuple)
        if (spread := time_spread(members)) is not None:
            assumed = sum(bool(one.assumed) for one in members)
            cells = (str(spread.count), _percent(spread.mape), _percent(spread.bias, True), _percent(spread.worst, True), str(assumed))
            rows.append((str(key[0]), str(key[1]), *cells))
    note = "`assumed` counts rows in which a field that was not published is filled with the default of the source's software."
    return Table("Step time by source and series", note, ("source", "series", "count", "error", "bias", "worst", "assumed"), tuple(rows))


def _series(row: Row) -> str:
    """Series of a source; the many of Megatron-Bridge by model."""
    return row.family.rpartition("_")[2] if row.family.startswith("mbridge") else row.family


def _memory(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(predictions, lambda row: (row.source, measured_of(row).memory_kind)).items():
        assert isinstance(key, tuple)
        if (spread := memory_spread(members)) is not None:
            cells = (str(spread.count), f"{spread.mape:.2%}", f"{spread.bias:+.2%}", _percent(spread.worst, True))
            rows.append((str(key[0]), str(key[1]), *cells))
    note = "Worst rank's peak. `allocated` is live tensors, `reserved` the allocator's, `nvidia-smi` also the CUDA context."
    return Table("Peak memory by source", note, ("source", "reading", "count", "error", "bias", "worst"), tuple(rows))


def _split(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(predictions, lambda row: row.source).items():
        halves = [time_spread(one for one in members if is_calibration(one.row) == wanted) for wanted in (True, False)]
        if all(half is not None for half in halves):
            cells = [
                cell for half in halves if half is not None for cell in (str(half.count), _percent(half.mape), _percent(half.bias, True))
            ]
            rows.append((str(key), *cells))
    note = (
        "Rows split by a hash of source, model and cut (tp, pp, vpp, cp, ep), so that near-duplicates stay together. "
        "Coefficients may be fitted to the first half only."
    )
    header = ("source", "calibration", "error", "bias", "validation", "error", "bias")
    return Table("Calibration and validation halves", note, header, tuple(rows))


def _left_out(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(
        predictions, lambda row: (row.source, row.family.split("_")[0] if "mbridge" in row.family else row.family)
    ).items():
        assert isinstance(key, tuple)
        if (found := leave_one_model_out(members)) is not None:
            low, high = found.factors
            cells = (str(found.models), f"{low:.3f} to {high:.3f}", _percent(found.spread.mape), _percent(found.spread.worst, True))
            rows.append((str(key[0]), str(key[1]), *cells))
    note = "One factor on all seconds, the median ratio of the other models of the series; the model that is predicted has no part in it."
    return Table("A whole model left out", note, ("source", "series", "models", "factor", "error", "worst"), tuple(rows))


def _regrets(rows_read: Sequence[Row], predictions: list[Prediction]) -> Table:
    found: list[Regret] = []
    for key in (vtrain_group, bloom_group):
        found += regrets(predictions, key)
    multi = [one for one in found if not one.group.startswith("vtrain_single")]
    single = [one for one in found if one.group.startswith("vtrain_single")]
    rows = [(one.group, str(one.count), _percent(one.regret), f"{one.agreement:.2f}", one.chosen, one.best) for one in multi]
    if single:
        worst = max(single, key=lambda one: one.regret)
        mean, tau = (sum(values) / len(single) for values in ([one.regret for one in single], [one.agreement for one in single]))
        rows.append((f"vTrain single-node, mean of {len(single)} groups", "", _percent(mean), f"{tau:.2f}", "", ""))
        rows.append((f"worst: {worst.group}", str(worst.count), _percent(worst.regret), f"{worst.agreement:.2f}", worst.chosen, worst.best))
    if (chance := regret_of_chance(rows_read)) is not None:
        rows.append(("vTrain single-node, by times of another day: mean, worst", "", " and ".join(map(_percent, chance)), "", "", ""))
    note = (
        "Time of the layout predicted to be best, over that of the best measured one, less 1; `order` is Kendall's tau-b. Another day: "
        "the measured times of each tp and microbatch scaled at random, as much as layers of equal kernels scatter there."
    )
    return Table("What a wrong choice costs", note, ("group", "layouts", "cost", "order", "chosen", "best measured"), tuple(rows))


def _parts(parts: list[PartPrediction]) -> Table:
    sections: dict[str, list[PartPrediction]] = {}
    for part in parts:
        sections.setdefault(part.section, []).append(part)
    rows = []
    for section, members in sections.items():
        spread = spread_of_errors([part.error for part in members])
        assert spread is not None
        worst = max(members, key=lambda part: abs(part.error))
        rows.append(
            (section, str(spread.count), _percent(spread.mape), _percent(spread.bias, True), _percent(spread.worst, True), worst.what)
        )
    note = "Relative errors; of bubbles the difference in points. Products and attention: share of the peak; the rest: seconds."
    return Table("Parts of a step", note, ("part", "count", "error", "bias", "worst", "which"), tuple(rows))


def _bias(rows: Sequence[Row], predictions: list[Prediction]) -> Table:
    found, cells = floors(rows), []
    for key, members in grouped(predictions, lambda row: (row.source, _series(row))).items():
        assert isinstance(key, tuple)
        spread, floor = time_spread(members), floor_of(found, str(key[0]), str(key[1]))
        if spread is None or spread.count < MIN_BIAS_ROWS:
            continue
        middle = statistics.median(one.error for one in members if one.error is not None)
        allowed = max(ALLOWED_BIAS, floor.median if floor else 0.0)
        met = "yes" if abs(spread.bias) <= ALLOWED_BIAS else "within noise" if abs(spread.bias) <= allowed else "no"
        noise = f"{_percent(floor.median)} ({floor.reading})" if floor else "not known"
        cells.append((str(key[0]), str(key[1]), str(spread.count), _percent(spread.bias, True), _percent(middle, True), noise, met))
    note = (
        f"Asked: no bias beyond {ALLOWED_BIAS:.0%} or the noise of the source, whichever is larger. Noise is the median spread of readings "
        "that ought to be equal (table Noise of the data). `middle` is the median error: rows that are slow by chance do not move it."
    )
    return Table("Bias and noise", note, ("source", "series", "count", "bias", "middle", "noise", "met"), tuple(cells))


def _noise(rows: Iterable[Row]) -> Table:
    rows = list(rows)
    training = [row for row in rows if row["kind"] == "train_step"]
    found: list[Floor] = [*floors(rows), *repetitions(training, lambda row: measured_of(row).memory_bytes, "memory, repeated")]
    cells = [(one.source, one.reading, str(one.groups), _percent(one.median), _percent(one.largest)) for one in found]
    note = (
        "Readings that ought to be equal, from the data alone: (largest - smallest) / smallest. Repeated: every published field equal. "
        "One model and cut: two publications, replicas may differ. Over pp: seconds of a sequence in a layer by the closed form of 1F1B, "
        "for one tp and microbatch. Layers of equal kernels: mean distance from their median, and largest over "
        "smallest. Between publications of one configuration NVIDIA's own figures differ by 4% (Llama 70B, FP8) to 13% (Llama 405B, FP8; "
        "README of the rows, section 2)."
    )
    return Table("Noise of the data", note, ("source", "reading", "groups", "median", "largest"), tuple(cells))


def _causes(predictions: list[Prediction]) -> Table:
    far = outliers(predictions)
    rows = [
        (cause.name, str(sum(cause in causes_of(one) for one in far)), cause.why, cause.evidence)
        for cause in CAUSES
        if any(cause in causes_of(one) for one in far)
    ]
    unnamed = sum(not causes_of(one) for one in far)
    rows.append(("none", str(unnamed), "no cause is known", ""))
    return Table("Causes of outliers", f"Rows beyond {OUTLIER:.0%}.", ("cause", "rows", "why", "evidence"), tuple(rows))


MOST_OUTLIERS = 60


def _outliers(predictions: list[Prediction]) -> Table:
    far = outliers(predictions)
    rows = []
    for one in far[:MOST_OUTLIERS]:
        assert one.error is not None
        names = ", ".join(cause.name for cause in causes_of(one)) or "none"
        rows.append((one.row.id, one.layout, _seconds(one.measured.step_s), _seconds(one.predicted_s), _percent(one.error, True), names))
    note = f"The {len(rows)} worst of {len(far)}."
    return Table("Outliers", note, ("row", "layout", "measured", "predicted", "error", "causes"), tuple(rows))


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None or not math.isfinite(seconds) else f"{seconds:.4g} s"


def _refused(predictions: list[Prediction]) -> Table:
    counts: dict[tuple[str, str], int] = {}
    for one in predictions:
        if one.refused:
            key = (one.row.source, one.refused[:120])
            counts[key] = counts.get(key, 0) + 1
    rows = [(source, str(count), reason) for (source, reason), count in sorted(counts.items(), key=lambda item: -item[1])]
    return Table("Rows without a prediction", "", ("source", "rows", "why"), tuple(rows))


def to_text(table: Table) -> str:
    """A table for a terminal."""
    grid = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    return "\n".join([table.title, *([table.note] if table.note else []), *(f"  {line}" for line in lines)])


def to_markdown(table: Table) -> str:
    """A table for the documentation."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.header, ("---",) * len(table.header), *table.rows)]
    return "\n".join([f"## {table.title}", "", *([table.note, ""] if table.note else []), *(f"| {line} |" for line in lines)])
