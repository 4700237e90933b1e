"""Chrome traces that `draw` wrote, read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from ..base.errors import TimelineError
from ..schedule.timeline import Source, Span, Timeline
from .annotated import action_of
from .events import complete_events


def is_ours(document: Any) -> bool:
    """Whether `draw` wrote a trace: it says which process is which rank."""
    return isinstance(document.get("otherData"), dict) and isinstance(document["otherData"].get("processes"), list)


def read_ours(document: Any, name: str) -> Timeline:
    """The first timeline of a trace that `draw` wrote, in its nanoseconds. Raises `TimelineError` where its ranks
    cannot be read."""
    other = document["otherData"]
    source, ranks = _own_ranks(other["processes"], name)
    lanes = {
        (event.get("pid"), event.get("tid")): str((event.get("args") or {}).get("name", ""))
        for event in document["traceEvents"]
        if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    spans = []
    for event in complete_events(name, document):
        action = action_of(event.name)
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
