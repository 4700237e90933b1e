"""Mean errors of sources and series, next to the noise of what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ..row import Row
from .noise import BETWEEN, Floor, across_publications, floor_of, floors
from .open_fields import open_fields, open_table
from .predictions import Prediction
from .statistics import grouped, time_spread
from .table import Table, percent

ALLOWED_BIAS = 0.02
"""Bias that is asked of every source."""

MIN_BIAS_ROWS = 2
"""Rows from which a mean error is called a bias."""


def series_of(row: Row) -> str:
    """Series of a source; the many of Megatron-Bridge by model."""
    return row.family.rpartition("_")[2] if row.family.startswith("mbridge") else row.family


def between_publications(rows: Iterable[Row]) -> Floor | None:
    """What two publications of one model and cut differ by, over all pairs of publications that have one in common."""
    spreads = [floor.median for floor in across_publications(rows)]
    return (
        Floor("two publications", BETWEEN, len(spreads), statistics.median(spreads), max(spreads)) if spreads else None
    )


def bias_tables(rows: Sequence[Row], predictions: list[Prediction]) -> list[Table]:
    """By source, which is what is asked, and by series; and what fields that a source does not publish leave open."""
    training = [row for row in rows if row["kind"] == "train_step"]
    found, between = floors(training), between_publications(training)
    opened = open_fields(training)
    by_source = []
    for source, members in grouped(predictions, lambda row: row.source).items():
        own = [
            floor
            for name in {one.row.family for one in members}
            if (floor := floor_of(found, str(source), name)) is not None
        ]
        floor = max(own, key=lambda one: one.median, default=between)
        others = [bias for one in opened if one.source == source for _, bias in one.biases]
        by_source += [(str(source), *cells) for cells in _cells(members, floor, others)]
    by_series = []
    for key, members in grouped(predictions, lambda row: (row.source, series_of(row))).items():
        assert isinstance(key, tuple)
        floor = floor_of(found, str(key[0]), members[0].row.family)
        by_series += [(str(key[0]), str(key[1]), *cells) for cells in _cells(members, floor)]
    header = ("count", "bias", "middle", "noise", "met")
    note = (
        f"Asked: no bias beyond {ALLOWED_BIAS:.0%} or the noise of the source, whichever is larger. Noise is the "
        "median spread of readings "
        "that ought to be equal (table Noise of the data); of a source that publishes nothing twice, what two "
        "publications of one model "
        "and cut differ by. Open: within that with another value of a field that was not published, or between two "
        "(next table). "
        "`middle` is the median error: rows that are slow by chance do not move it."
    )
    finer = (
        "The same by series, which is finer than what is asked; a series whose source publishes nothing twice "
        "has no noise of its own."
    )
    return [
        Table("Bias of sources", note, ("source", *header), tuple(by_source)),
        open_table(opened),
        Table("Bias of series", finer, ("source", "series", *header), tuple(by_series)),
    ]


def _cells(members: Iterable[Prediction], floor: Floor | None, others: Iterable[float] = ()) -> list[tuple[str, ...]]:
    """Count, bias, median error, noise and verdict; nothing for fewer than `MIN_BIAS_ROWS`. `others`: biases with other
    values of fields that were not published."""
    members = list(members)
    spread = time_spread(members)
    if spread is None or spread.count < MIN_BIAS_ROWS:
        return []
    middle = statistics.median(one.error for one in members if one.error is not None)
    allowed = max(ALLOWED_BIAS, floor.median if floor else 0.0)
    met = "yes" if abs(spread.bias) <= ALLOWED_BIAS else "within noise" if abs(spread.bias) <= allowed else "no"
    biases = [spread.bias, *others]
    if met == "no" and (any(abs(bias) <= allowed for bias in biases) or min(biases) < 0 < max(biases)):
        met = "open"
    noise = f"{percent(floor.median)} ({floor.reading})" if floor else "not known"
    return [(str(spread.count), percent(spread.bias, True), percent(middle, True), noise, met)]
