"""The validation as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..row import Row, measured_of
from .bias import bias_tables, series_of
from .causes import CAUSES, OUTLIER, causes_of, outliers
from .choices import choice_table, choice_targets
from .fitting import fitting_table
from .noise import Floor, floors, repetitions
from .parts import PartPrediction
from .predictions import Prediction
from .refit import is_fitted_to
from .statistics import grouped, is_calibration, leave_one_model_out, memory_spread, spread_of_errors, time_spread
from .table import Table, percent
from .targets import TARGETS


def validation_tables(rows: Sequence[Row], predictions: list[Prediction], parts: list[PartPrediction]) -> list[Table]:
    """Every table of the validation, those without rows left out."""
    tables = [
        _targets(rows, predictions),
        *bias_tables(rows, predictions),
        _sources(predictions),
        _memory(predictions),
        fitting_table(predictions),
        _split(predictions),
        _left_out(predictions),
        choice_table(rows, predictions),
        _parts(parts),
        _noise(rows),
        _causes(predictions),
        _outliers(predictions),
        _refused(predictions),
    ]
    return [table for table in tables if table.rows]


LEFT_OUT_ERROR = 0.08
"""Asked of vTrain's models of several nodes where each is left out of any fit."""


def _targets(rows_read: Sequence[Row], predictions: list[Prediction]) -> Table:
    rows: list[tuple[str, ...]] = []
    for target in TARGETS:
        if (spread := spread_of_errors(target.errors(predictions))) is not None:
            met = "yes" if spread.mape <= target.mape else "no"
            digits = f"{spread.mape:.2%}" if target.mape < 0.01 else percent(spread.mape)
            cells = (target.name, str(spread.count), digits, f"{target.mape:.2g}".replace("0.006", "0.6%"), met)
            asked = f"{target.mape:.1%}"
            rows.append((*cells[:3], asked, met, percent(spread.bias, True), percent(spread.worst, True), target.peers))
    rows += [*_left_out_target(predictions), *choice_targets(rows_read, predictions)]
    note = (
        "Mean absolute relative error against what is asked; bias is the mean error (above zero: predicted too "
        "slow or too large)."
    )
    return Table("Targets", note, ("rows of", "count", "error", "asked", "met", "bias", "worst", "others"), tuple(rows))


def _left_out_target(predictions: list[Prediction]) -> list[tuple[str, ...]]:
    """vTrain's multi-node rows that no coefficient is fitted to, so that every model is left out of any fit."""
    unseen = [one for one in predictions if one.row.family == "vtrain_multi" and not is_fitted_to(one.row)]
    if (spread := time_spread(unseen)) is None:
        return []
    factor = leave_one_model_out(unseen)
    peers = f"Calculon 8.6% (tp to 8); a factor from the other model {percent(factor.spread.mape)}" if factor else ""
    met = "yes" if spread.mape <= LEFT_OUT_ERROR else "no"
    cells = (
        str(spread.count),
        percent(spread.mape),
        percent(LEFT_OUT_ERROR),
        met,
        percent(spread.bias, True),
        percent(spread.worst, True),
    )
    return [("vTrain multi-node, models that no fit has seen", *cells, peers)]


def _sources(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(predictions, lambda row: (row.source, series_of(row))).items():
        assert isinstance(key, tuple)
        if (spread := time_spread(members)) is not None:
            assumed = sum(bool(one.assumed) for one in members)
            cells = (
                str(spread.count),
                percent(spread.mape),
                percent(spread.bias, True),
                percent(spread.worst, True),
                str(assumed),
            )
            rows.append((str(key[0]), str(key[1]), *cells))
    note = (
        "`assumed` counts rows in which a field that was not published is filled with the default of the source's "
        "software."
    )
    return Table(
        "Step time by source and series",
        note,
        ("source", "series", "count", "error", "bias", "worst", "assumed"),
        tuple(rows),
    )


def _memory(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(predictions, lambda row: (row.source, measured_of(row).memory_kind)).items():
        assert isinstance(key, tuple)
        if (spread := memory_spread(members)) is not None:
            cells = (str(spread.count), f"{spread.mape:.2%}", f"{spread.bias:+.2%}", percent(spread.worst, True))
            rows.append((str(key[0]), str(key[1]), *cells))
    note = (
        "Worst rank's peak. `allocated` is live tensors, `reserved` the allocator's, `nvidia-smi` also the CUDA "
        "context."
    )
    return Table("Peak memory by source", note, ("source", "reading", "count", "error", "bias", "worst"), tuple(rows))


def _split(predictions: list[Prediction]) -> Table:
    rows = []
    for key, members in grouped(predictions, lambda row: row.source).items():
        halves = [time_spread(one for one in members if is_calibration(one.row) == wanted) for wanted in (True, False)]
        if all(half is not None for half in halves):
            cells = [
                cell
                for half in halves
                if half is not None
                for cell in (str(half.count), percent(half.mape), percent(half.bias, True))
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
            cells = (
                str(found.models),
                f"{low:.3f} to {high:.3f}",
                percent(found.spread.mape),
                percent(found.spread.worst, True),
            )
            rows.append((str(key[0]), str(key[1]), *cells))
    note = (
        "One factor on all seconds, the median ratio of the other models of the series; the model that is "
        "predicted has no part in it."
    )
    return Table(
        "A whole model left out", note, ("source", "series", "models", "factor", "error", "worst"), tuple(rows)
    )


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
            (
                section,
                str(spread.count),
                percent(spread.mape),
                percent(spread.bias, True),
                percent(spread.worst, True),
                worst.what,
            )
        )
    note = (
        "Relative errors; of bubbles the difference in points. Products and attention: share of the peak; the "
        "rest: seconds."
    )
    return Table("Parts of a step", note, ("part", "count", "error", "bias", "worst", "which"), tuple(rows))


def _noise(rows: Iterable[Row]) -> Table:
    rows = list(rows)
    training = [row for row in rows if row["kind"] == "train_step"]
    found: list[Floor] = [
        *floors(rows),
        *repetitions(training, lambda row: measured_of(row).memory_bytes, "memory, repeated"),
    ]
    cells = [(one.source, one.reading, str(one.groups), percent(one.median), percent(one.largest)) for one in found]
    note = (
        "Readings that ought to be equal, from the data alone: (largest - smallest) / smallest. Repeated: every "
        "published field equal. "
        "One model and cut: two publications, replicas may differ. Over pp: seconds of a sequence in a layer by the "
        "closed form of 1F1B, "
        "for one tp and microbatch. Layers of equal kernels: mean distance from their median, and largest over "
        "smallest. Between publications of one configuration NVIDIA's own figures differ by 4% (Llama 70B, FP8) to "
        "13% (Llama 405B, FP8; "
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
        rows.append(
            (
                one.row.id,
                one.layout,
                _seconds(one.measured.step_s),
                _seconds(one.predicted_s),
                percent(one.error, True),
                names,
            )
        )
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
    rows = [
        (source, str(count), reason) for (source, reason), count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return Table("Rows without a prediction", "", ("source", "rows", "why"), tuple(rows))
