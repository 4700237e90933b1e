"""`load`: traces of torch's profiler (Kineto), and Chrome traces of ours, as timelines: what ran when. Actions are
those that a trace names, else those of a schedule whose pattern of computing and sending is found in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import FileError, TimelineError
from ..base.files import read_packed
from ..base.parsing import parse_json
from ..base.units import format_s
from ..schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from ..schedule.timeline import COMPUTE_LANE, Span, Timeline, message_lane
from .annotated import annotated
from .communication import Communication, communication_of
from .events import RankTrace, is_trace, read_rank
from .ours import is_ours, read_ours
from .recognised import RowOf, recognised

TRACE_BYTES = 2**30
"""Of one rank's trace: a step of torchtitan with stacks has some 300 MB."""

_APART = 10
"""How many times as long as all ranks' steps the time between two of them has to be to be no wait."""

SUFFIXES = (".json", ".json.gz")


@dataclass(frozen=True)
class Recording:
    """A timeline from a file, and by rank the communication of its step, where a profiler recorded it."""

    timeline: Timeline
    communication: Mapping[int, Communication]


def load(path: str | Path) -> Timeline:
    """The timeline of `read_recording`, of files that name their actions or have one stage."""
    return read_recording(path).timeline


def read_recording(path: str | Path, row_of: RowOf | None = None) -> Recording:
    """A recorded timeline, or the last whole step in a trace, or in the traces of a folder, a file for each rank; with
    the rows of a lowered schedule also of traces that name no actions. Raises `TimelineError` for any other file, and
    where no action is named or recognised."""
    files = [Path(path)]
    if Path(path).is_dir():
        files = sorted((each for each in Path(path).iterdir() if each.name.endswith(SUFFIXES)), key=_by_numbers)
        if not files:
            raise TimelineError(f"{path}: no {' or '.join(SUFFIXES)} in this folder. Give that of a run's traces.")
    documents: dict[str, Any] = {}
    for file in files:
        try:
            documents[str(file)] = parse_json(read_packed(file, most_bytes=TRACE_BYTES), str(file))
        except FileError as error:
            raise TimelineError(str(error)) from error
    if len(documents) == 1 and not is_trace(*documents.values()):
        return Recording(Timeline.load(*documents), {})
    return recording_of(documents, row_of)


def _by_numbers(file: Path) -> list[str | int]:
    """An order in which rank 2 comes before rank 10: of traces that do not say their rank the name does."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", file.name)]


def recording_of(documents: Mapping[str, Any], row_of: RowOf | None = None) -> Recording:
    """The last whole step of traces by file name."""
    traces: dict[int, RankTrace] = {}
    for name, document in documents.items():
        if not is_trace(document):
            raise TimelineError(f"{name}: this is no trace: it has no list traceEvents. Give what a profiler exported.")
        if is_ours(document):
            return Recording(read_ours(document, name), {})
        trace = read_rank(name, document, traces)
        traces[trace.global_rank] = trace
    found = {rank: annotated(trace) for rank, trace in traces.items()}
    if not any(found.values()):
        found = recognised(traces, row_of)
    communication = {rank: communication_of(traces[rank], own) for rank, own in found.items() if own}
    return Recording(_together(traces, found), communication)


def _together(traces: Mapping[int, RankTrace], found: Mapping[int, Sequence[Span]]) -> Timeline:
    """The ranks' actions on one clock and on their lanes, the first of them at 0."""
    holders, spans = _holders(found), []
    first_ns = min(trace.base_ns for trace in traces.values())
    for rank, own in found.items():
        # the difference alone: seconds since 1970 would lose their last digits
        later_s = (traces[rank].base_ns - first_ns) * 1e-9
        spans += [
            Span(rank, _lane(each.action, rank, holders), each.action, each.start_s + later_s, each.end_s + later_s)
            for each in own
        ]
    _same_clock(spans)
    begin_s = min(span.start_s for span in spans)
    spans = [replace(span, start_s=span.start_s - begin_s, end_s=span.end_s - begin_s) for span in spans]
    count = sum(map(bool, found.values()))
    title = f"{count} rank{'s' if count != 1 else ''} of a profiler's trace"
    return Timeline.from_spans(_one_by_one(spans), "measured", title=title)


def _same_clock(spans: Sequence[Span]) -> None:
    """Raises `TimelineError` where ranks lie apart by many times what all of them take: of one step they do not."""
    times: dict[int, tuple[float, float]] = {}
    for span in spans:
        low, high = times.get(span.global_rank, (span.start_s, span.end_s))
        times[span.global_rank] = min(low, span.start_s), max(high, span.end_s)
    late, early = max(times, key=lambda rank: times[rank][0]), min(times, key=lambda rank: times[rank][1])
    apart_s = times[late][0] - times[early][1]
    if apart_s > _APART * sum(high - low for low, high in times.values()):
        raise TimelineError(
            f"rank {late} begins its step {format_s(apart_s)} after rank {early} has ended its own: these traces are "
            "of different runs or steps, or by clocks that differ. Give traces of one step, by clocks that agree."
        )


def _holders(found: Mapping[int, Sequence[Span]]) -> dict[int, list[int]]:
    """Stage -> the ranks that compute it, ascending."""
    holders: dict[int, list[int]] = {}
    for rank in sorted(found):
        for part in (part for span in found[rank] if span.action.kind in COMPUTE for part in span.action.parts):
            if rank not in holders.setdefault(part.stage, []):
                holders[part.stage].append(rank)
    return holders


def _lane(action: Action, rank: int, holders: Mapping[int, Sequence[int]]) -> str:
    """The lane of an action; a message's names the rank at its other end, in the same place among its replicas."""
    if action.kind in COMPUTE or action.kind is Kind.STEP:
        return COMPUTE_LANE
    if action.kind not in SENDS | RECEIVES:
        return "dp"
    forward, sending = action.kind in (Kind.SEND_F, Kind.RECV_F), action.kind in SENDS
    own, others = holders.get(action.stage, []), holders.get(action.stage + (1 if forward == sending else -1), [])
    place = own.index(rank) if rank in own else 0
    peer = others[place] if place < len(others) else others[0] if others else 0
    return message_lane("F" if forward else "B", sending, peer)


def _one_by_one(spans: Sequence[Span]) -> list[Span]:
    """The spans with those of one lane one after the other: of two that overlap the first ends when the next begins."""
    ordered = sorted(spans, key=lambda span: (span.global_rank, span.lane, span.start_s, span.end_s))
    found = []
    for span, after in zip(ordered, [*ordered[1:], None], strict=True):
        same = after is not None and (after.global_rank, after.lane) == (span.global_rank, span.lane)
        end_s = min(span.end_s, after.start_s) if same and after is not None else span.end_s
        found.append(Span(span.global_rank, span.lane, span.action, span.start_s, end_s))
    return found
