"""A timeline as a Chrome trace (the JSON object format that Perfetto and chrome://tracing open): a process per
rank, a thread per lane."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.schedule.action import RECEIVES, SENDS, Kind
from ..core.schedule.timeline import COMPUTE_LANE, Timeline
from ..core.schedule.waits import waits_of


def to_trace(timelines: Sequence[Timeline]) -> str:
    """Trace text: complete events (`X`) in microseconds, an arrow from every send to its receive (`s`, `f`), memory as
    counters (`C`), names as metadata (`M`). `otherData.processes` says which rank of which source each process is:
    programs read that, people the names.

    Several timelines share one clock; their processes are numbered on and named `predicted rank 0`, `measured rank 0`,
    ... Events keep the timeline's order, so the same timelines give the same bytes. A span takes some 80 bytes: its
    name is its token, which says stage and microbatch.
    """
    events: list[dict[str, Any]] = []
    first_process, first_arrow, known = 0, 0, list[dict[str, Any]]()
    for timeline in timelines:
        ranks = sorted({*timeline.global_ranks, *(sample.global_rank for sample in timeline.memory)})
        processes = {rank: first_process + index for index, rank in enumerate(ranks)}
        first_process += len(ranks)
        known += [{"pid": process, "rank": rank, "source": timeline.source} for rank, process in processes.items()]
        events += _names(timeline, processes, len(timelines) > 1)
        events += _spans(timeline, processes)
        arrows = list(_arrows(timeline, processes, first_arrow))
        first_arrow += len(arrows) // 2
        events += arrows
        events += _counters(timeline, processes)
    title = " / ".join(dict.fromkeys(timeline.title for timeline in timelines if timeline.title))
    document = {"displayTimeUnit": "ms", "otherData": {"title": title, "processes": known}, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _names(timeline: Timeline, processes: dict[int, int], with_source: bool) -> Iterator[dict[str, Any]]:
    for rank, process in processes.items():
        name = f"{timeline.source} rank {rank}" if with_source else f"rank {rank}"
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
        for thread, lane in enumerate(_threads(timeline)):
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}


def _spans(timeline: Timeline, processes: dict[int, int]) -> Iterator[dict[str, Any]]:
    threads = {lane: thread for thread, lane in enumerate(_threads(timeline))}
    for span in timeline.spans:
        action = span.action
        yield {
            "ph": "X",
            "name": str(action),
            "cat": action.kind.name,
            "pid": processes[span.global_rank],
            "tid": threads[span.lane],
            "ts": _microseconds(span.start_s),
            # of both ends as they are rounded, so that a span ends no nanosecond after the next begins
            "dur": round(_microseconds(span.end_s) - _microseconds(span.start_s), 3),
        }


def _arrows(timeline: Timeline, processes: dict[int, int], number: int) -> Iterator[dict[str, Any]]:
    """Both ends of every message, each inside its span; what was not recorded has no arrow."""
    threads, spans, known = {lane: thread for thread, lane in enumerate(_threads(timeline))}, timeline.spans, None
    for receive in np.flatnonzero(np.isin(spans.actions.kind, [int(kind) for kind in RECEIVES])).tolist():
        known = known or waits_of(timeline)
        sends = [each for each in known.of(receive) if Kind(int(spans.actions.kind[each])) in SENDS]
        for send in sends:
            begins_s = float(spans.start_s[send])
            ends_s = (max(float(spans.start_s[receive]), begins_s) + float(spans.end_s[receive])) / 2
            for phase, span, time_s in (("s", send, begins_s), ("f", receive, ends_s)):
                yield {
                    "ph": phase,
                    **({"bp": "e"} if phase == "f" else {}),
                    "id": number,
                    "name": "message",
                    "cat": "message",
                    "pid": processes[int(spans.global_rank[span])],
                    "tid": threads[spans.lanes[spans.lane[span]]],
                    "ts": _microseconds(time_s),
                }
            number += 1


def _counters(timeline: Timeline, processes: dict[int, int]) -> Iterator[dict[str, Any]]:
    for sample in timeline.memory:
        process, ts = processes[sample.global_rank], _microseconds(sample.time_s)
        yield {"ph": "C", "name": "memory", "pid": process, "tid": 0, "ts": ts, "args": {"bytes": sample.num_bytes}}


def _microseconds(seconds: float) -> float:
    """Whole nanoseconds, as trace viewers count them: digits beyond would only lengthen the file."""
    return round(seconds * 1e6, 3)


def _threads(timeline: Timeline) -> list[str]:
    """Lanes in thread order: compute first, the rest by name."""
    return sorted(timeline.spans.lanes, key=lambda lane: (lane != COMPUTE_LANE, lane))
