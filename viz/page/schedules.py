"""What a page of schedules holds: the lists of their ranks, which the page's script puts into time with durations that
its reader chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.base.errors import ScheduleError
from ...core.base.findings import Finding
from ...core.schedule import CATALOG, build, lower
from ...core.schedule.schedule import Schedule

RANKS = (2, 3, 4, 5, 6, 8)
CHUNKS = (1, 2, 3, 4)
MICROBATCHES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
"""Sizes of the catalog's page."""


class Sized(NamedTuple):
    """A lowered schedule with its sizes, what is found in it, and the share of the reader's durations that one of its
    stages takes."""

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    schedule: Schedule
    findings: tuple[Finding, ...] = ()
    share: float = 1.0


def catalog(names: Iterable[str] = tuple(CATALOG)) -> list[Sized]:
    """Every schedule of the catalog in every size of the page that it has. Durations are of 1/p of the model, so that
    schedules with more chunks to a rank do the same work."""
    found = []
    for name in names:
        for pp in RANKS:
            for vpp in CHUNKS:
                if CATALOG[name].vpp_problem(pp, vpp):
                    continue
                for count in MICROBATCHES:
                    try:
                        schedule = lower(build(name, pp=pp, vpp=vpp, num_microbatches=count))
                    except ScheduleError:  # it has no such size
                        continue
                    found.append(Sized(name, pp, vpp, count, schedule, share=pp / schedule.num_stages))
    return found


def sized(schedule: Schedule, findings: Iterable[Finding] = ()) -> Sized:
    """A schedule of one's own, lowered where it is not. Durations are of its actions."""
    lowered = schedule if schedule.is_lowered else lower(schedule)
    vpp = -(-lowered.num_stages // lowered.num_ranks)
    return Sized(
        schedule.name or "schedule", lowered.num_ranks, vpp, lowered.num_microbatches, lowered, tuple(findings)
    )


def library(schedules: Sequence[Sized], columns: list[np.ndarray]) -> dict[str, Any]:
    """The schedules in a page's header; the columns of all, one behind the other, are added to the others."""
    names = list(dict.fromkeys(each.name for each in schedules))
    entries, first = [], 0
    for each in schedules:
        lengths = np.diff(each.schedule.offsets).tolist()
        sizes = {"p": each.pp, "v": each.vpp, "m": each.num_microbatches, "share": each.share}
        entries.append({"name": names.index(each.name), **sizes, "first": first, "lengths": lengths})
        entries[-1]["findings"] = [finding.to_dict() for finding in each.findings]
        first += sum(lengths)
    kinds = {"kind": "int8", "stage": "int32", "microbatch": "int32", "pair_stage": "int32", "pair_microbatch": "int32"}
    places = {}
    for name, dtype in kinds.items():
        parts = [getattr(each.schedule.actions, name) for each in schedules]
        columns.append(np.concatenate(parts).astype(np.dtype(dtype).newbyteorder("<")))
        places[name] = len(columns) - 1
    return {"names": names, "entries": entries, "columns": places}
