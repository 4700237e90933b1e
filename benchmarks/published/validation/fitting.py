"""Published runs against `fit`: what ran has to fit, and what ran out of memory must not."""

from __future__ import annotations

from collections.abc import Sequence

from .predictions import Prediction
from .statistics import grouped
from .table import Table

HELD = ("recompute", "parallel.sharding", "batch.micro", "precision", "parallel.vpp", "parallel.sp")
"""Fields of a row that decide how much is held."""


def fitting_table(predictions: Sequence[Prediction]) -> Table:
    """Counts of the sources in which a run that ran is refused, or one ran out of memory; then of all sources."""
    rows = []
    for source, members in grouped(list(predictions), lambda row: row.source).items():
        if any(ran_out_of_memory(one) or refused_though_it_ran(one) for one in members):
            rows.append((str(source), *_counts(members)))
    note = (
        "Peaks against what is usable of a device (`simulator.memory.capacity`): the total that its runtime reports "
        "less context, libraries and "
        "fragmentation. Open: what was not published, or only in words, of the runs that ran and are refused."
    )
    header = (
        "source",
        "ran",
        "refused",
        "ran out of memory",
        "refused",
        "without a plan",
        ("open where refused though it ran"),
    )
    return Table("What fits", note, header, (*rows, ("all", *_counts(predictions))) if rows else ())


def refused_though_it_ran(one: Prediction) -> bool:
    """True for a run that was measured and is said not to fit."""
    return one.fits is False and not ran_out_of_memory(one)


def ran_out_of_memory(one: Prediction) -> bool:
    """True for a run that did, whether there is a plan for it or not."""
    return bool(one.row["measured.oom"])


def open_fields(one: Prediction) -> list[str]:
    """Fields that decide how much a run held and that its row leaves open: null, or filled from
    its software's defaults."""
    assumed = {text.partition("=")[0] for text in one.assumed}
    return [name for name in HELD if name in assumed or one.row[name] is None]


def _counts(members: Sequence[Prediction]) -> tuple[str, ...]:
    ran = [one for one in members if one.fits is not None and not ran_out_of_memory(one)]
    ran_out = [one for one in members if ran_out_of_memory(one)]
    wrong = [one for one in ran if not one.fits]
    counts = (
        len(ran),
        len(wrong),
        len(ran_out),
        sum(one.fits is False for one in ran_out),
        sum(one.fits is None for one in ran_out),
    )
    named = sorted({name for one in wrong for name in open_fields(one)})
    return (*map(str, counts), ", ".join(named))
