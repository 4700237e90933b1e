"""Traces of torch's profiler (Kineto) and Chrome traces of ours as timelines: what ran when, by the names of actions in
them. Nothing in a trace is executed."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ..base.errors import FileError, ScheduleError, TimelineError
from ..base.files import read_packed
from ..base.parsing import parse_json
from .action import COMPUTE, RECEIVES, SENDS, Action, Kind
from .timeline import COMPUTE_LANE, Source, Span, Timeline, message_lane

TRACE_BYTES = 2**30
"""Of one rank's trace: a step of torchtitan with stacks has some 300 MB."""

SUFFIXES = (".json", ".json.gz")

_NAMED = re.compile(r"(?:PP:)?(\d.*|\(.*)")
"""An action as torch.distributed.pipelining annotates it (`PP:2F3`), or as we do (`2F3`)."""

_OTHER = ("c10d::", "gloo:", "nccl:", "record_param_comms", "PP:", "ProfilerStep", "autograd::engine")
"""Operations that move data or only enclose others: an action computes from the first to the last of the rest."""


class Event(NamedTuple):
    """One complete event: its name and category, its thread, and seconds."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start_s: float
    end_s: float


def is_trace(document: Any) -> bool:
    """Whether a JSON value is a trace: an object with `traceEvents`."""
    return isinstance(document, dict) and isinstance(document.get("traceEvents"), list)


def load(path: str | Path) -> Timeline:
    """A recorded timeline, or the last whole step in a trace, or in the traces of a folder, a file for each rank.
    Raises `TimelineError` for any other file, and where traces name no actions."""
    files = [Path(path)]
    if Path(path).is_dir():
        files = sorted(each for each in Path(path).iterdir() if each.name.endswith(SUFFIXES))
        if not files:
            raise TimelineError(f"{path}: no {' or '.join(SUFFIXES)} in this folder. Give that of a run's traces.")
    documents: dict[str, Any] = {}
    for file in files:
        try:
            documents[str(file)] = parse_json(read_packed(file, most_bytes=TRACE_BYTES), str(file))
        except FileError as error:
            raise TimelineError(str(error)) from error
    if len(documents) == 1 and not is_trace(*documents.values()):
        return Timeline.load(*documents)
    return timeline_of(documents)


def timeline_of(documents: Mapping[str, Any]) -> Timeline:
    """The last whole step of traces by file name."""
    found: dict[int, list[Span]] = {}
    bases: dict[int, int] = {}
    for name, document in documents.items():
        if not is_trace(document):
            raise TimelineError(f"{name}: this is no trace: it has no list traceEvents. Give what a profiler exported.")
        if _is_ours(document):
            return _of_ours(document, name)
        rank = _rank_of(document, name, found)
        found[rank], bases[rank] = _last_step([*_annotated(name, document)]), _base_ns(document)
    if not any(found.values()):
        raise TimelineError(
            f"{', '.join(documents)}: no event names an action, such as PP:2F3 or 2F3. torch.distributed.pipelining "
            "names them where a schedule has several stages a rank or was loaded from CSV; around your own calls write "
            'torch.profiler.record_function("2F3").'
        )
    holders, spans = _holders(found), []
    first = min(bases.values())
    for rank, own in found.items():
        later_s = (bases[rank] - first) * 1e-9  # the difference alone: seconds since 1970 would lose their last digits
        spans += [
            Span(rank, _lane(each.action, rank, holders), each.action, each.start_s + later_s, each.end_s + later_s)
            for each in own
        ]
    begin_s = min(span.start_s for span in spans)
    spans = [replace(span, start_s=span.start_s - begin_s, end_s=span.end_s - begin_s) for span in spans]
    title = f"{len(found)} rank{'s' if len(found) != 1 else ''} of a profiler's trace"
    return Timeline.from_spans(_one_by_one(spans), "measured", title=title)


def _events(name: str, document: Any) -> Iterator[Event]:
    """The complete events."""
    for event in document["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        start, length = event.get("ts"), event.get("dur", 0)
        if not (
            isinstance(start, int | float) and isinstance(length, int | float) and isinstance(event.get("name"), str)
        ):
            raise TimelineError(f"{name}: an event has no name, ts or dur that could be read: {str(event)[:80]}.")
        thread = (event.get("pid"), event.get("tid"))
        yield Event(event["name"], str(event.get("cat", "")), thread, start * 1e-6, (start + length) * 1e-6)


def _base_ns(document: Any) -> int:
    """What Kineto's microseconds are counted from, in nanoseconds since 1970."""
    base = document.get("baseTimeNanoseconds", 0)
    return base if type(base) is int else 0


def _action(name: str) -> Action | None:
    """The action that a name is."""
    found = _NAMED.fullmatch(name)
    if not found:
        return None
    try:
        return Action.from_str(found[1])
    except ScheduleError:
        return None


def _annotated(name: str, document: Any) -> Iterator[Span]:
    """The actions of a rank by time. Where kernels of a device are annotated these count, else what the host does
    inside of an annotation: it waits for its inputs there too, so an action that computes begins with its first
    operation."""
    events = list(_events(name, document))
    on_device = any(event.category == "gpu_user_annotation" and _action(event.name) for event in events)
    wanted = "gpu_user_annotation" if on_device else "user_annotation"
    operations: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        if event.category == "cpu_op" and not event.name.startswith(_OTHER):
            operations.setdefault(event.thread, []).append(event)
    for own in operations.values():
        own.sort(key=lambda event: event.start_s)
    starts = {thread: [event.start_s for event in own] for thread, own in operations.items()}
    for event in sorted(events, key=lambda event: event.start_s):
        action = _action(event.name) if event.category in (wanted, "") else None
        if action is None:
            continue
        begin_s, end_s = event.start_s, event.end_s
        if not on_device and action.kind in COMPUTE and event.thread in operations:
            own = operations[event.thread]
            inside = own[
                bisect.bisect_left(starts[event.thread], begin_s) : bisect.bisect_right(starts[event.thread], end_s)
            ]
            if inside:
                begin_s, end_s = inside[0].start_s, min(end_s, max(each.end_s for each in inside))
        yield Span(0, "", action, begin_s, end_s)


def _last_step(spans: Sequence[Span]) -> list[Span]:
    """The spans of the last whole step: a step ends where one of its actions comes again. One that was recorded in part
    has fewer actions than the one before."""
    steps: list[dict[Action, Span]] = [{}]
    for span in spans:
        if span.action in steps[-1]:
            steps.append({})
        steps[-1][span.action] = span
    most = max(map(len, steps))
    return list(next(step for step in reversed(steps) if len(step) == most).values())


def _rank_of(document: Any, name: str, known: Mapping[int, object]) -> int:
    """The global rank that a trace says it is of; else the next."""
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    rank = rank if type(rank) is int and 0 <= rank < 2**31 else len(known)
    if rank in known:
        raise TimelineError(f"{name}: another trace is of rank {rank} too. Give one of each rank.")
    return rank


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


def _is_ours(document: Any) -> bool:
    """Whether `draw` wrote a trace: it says which process is which rank."""
    return isinstance(document.get("otherData"), dict) and isinstance(document["otherData"].get("processes"), list)


def _of_ours(document: Any, name: str) -> Timeline:
    """The first timeline of a trace that `draw` wrote, in its nanoseconds."""
    other = document["otherData"]
    source, ranks = _own_ranks(other["processes"], name)
    lanes = {
        (event.get("pid"), event.get("tid")): str((event.get("args") or {}).get("name", ""))
        for event in document["traceEvents"]
        if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    spans = []
    for event in _events(name, document):
        action = _action(event.name)
        if action is not None and event.thread[0] in ranks and lanes.get(event.thread):
            spans.append(Span(ranks[event.thread[0]], lanes[event.thread], action, event.start_s, event.end_s))
    title = other.get("title", "")
    return Timeline.from_spans(spans, source, title=title if isinstance(title, str) else "")


def _own_ranks(processes: Sequence[Any], name: str) -> tuple[Source, dict[int, int]]:
    """The source of the first timeline in a trace, and its ranks by process. A rank that comes again, or another
    source, begins the next timeline."""
    source: Source | None = None
    ranks: dict[int, int] = {}
    for each in processes:
        process, rank, said = (each.get(key) if isinstance(each, dict) else None for key in ("pid", "rank", "source"))
        if type(process) is not int or type(rank) is not int or rank < 0 or said not in get_args(Source):
            raise TimelineError(
                f"{name}: an entry of otherData.processes has no pid, rank or source that could be read: "
                f"{str(each)[:80]}. Write the trace again with draw."
            )
        if rank in ranks.values() or said != (source or said):
            break
        source, ranks[process] = said, rank
    if source is None:
        raise TimelineError(f"{name}: otherData.processes names no rank. Write the trace again with draw.")
    return source, ranks
