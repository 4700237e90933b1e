"""What a page holds of timelines: a JSON header and columns of numbers, packed together."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.base.findings import Finding
from ...core.schedule.action import Kind
from ...core.schedule.timeline import Timeline
from ...core.schedule.waits import gaps_of, waits_of
from ..scene import palette
from ..scene.axis import TimeUnit
from ..scene.lanes import chunks_of, compare_lanes, order_note, role_of, sorted_lanes
from ..scene.scene import OWN_SCALE_FROM, Scale
from .schedules import Sized, library


@dataclass(frozen=True)
class Extra:
    """What is known of a timeline besides its spans: usable bytes of a device; findings, whose ranks are places among
    the timeline's ranks; by such a place the bytes at the rank's peak by component; and `[samples, components]` the
    bytes of each of the timeline's memory samples."""

    capacity_bytes: int | None = None
    findings: tuple[Finding, ...] = ()
    peaks: tuple[Mapping[str, int], ...] = ()
    samples: np.ndarray | None = None


def packed(timelines: Sequence[Timeline], extras: Sequence[Extra], time_unit: TimeUnit, scale: Scale = "auto") -> bytes:
    """The compressed content of a page of timelines, whose axes of time begin as `scale` says; the same bytes for the
    same timelines."""
    columns: list[np.ndarray] = []
    entries = [_entry(each, extra, columns) for each, extra in zip(timelines, extras, strict=True)]
    num_chunks = max((entry.pop("num_chunks") for entry in entries), default=1)
    note = order_note(compare_lanes(*timelines)) if len(timelines) > 1 else ""
    return _joined(_header(time_unit, num_chunks, timelines=entries, note=note, scale=scale), columns)


def packed_schedules(schedules: Sequence[Sized]) -> bytes:
    """The compressed content of a page of schedules."""
    columns: list[np.ndarray] = []
    known = library(schedules, columns)
    num_chunks = max(each.vpp if each.schedule.num_stages > each.pp else 2 for each in schedules)
    return _joined(_header("unit", num_chunks, timelines=[], note="", scale="auto", library=known), columns)


def _header(time_unit: TimeUnit, num_chunks: int, **more: Any) -> dict[str, Any]:
    """What every page knows: names and colours."""
    return {
        "unit": time_unit,
        "own_scale_from": OWN_SCALE_FROM,
        "kinds": [kind.name for kind in Kind],
        "names": {kind.name: name for kind, name in palette.NAMES.items()},
        "fills": {
            kind.name: [palette.fill(kind, chunk, num_chunks) for chunk in range(num_chunks)]
            for kind in Kind
            if kind in palette.FILLS
        },
        "dark_fills": {kind.name: [color] for kind, color in palette.DARK_FILLS.items()},
        "causes": palette.CAUSES,
        "cause_words": palette.CAUSE_WORDS,
        "components": palette.COMPONENTS,
        **more,
    }


def _joined(header: dict[str, Any], columns: Sequence[np.ndarray]) -> bytes:
    """The header's length (uint32, little endian), the header, and columns that begin at multiples of 8 bytes."""
    places, offset = [], 0
    for column in columns:
        places.append({"type": column.dtype.name, "offset": offset, "length": len(column)})
        offset += -(-column.nbytes // 8) * 8
    text = json.dumps({**header, "columns": places}, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    parts = [struct.pack("<I", len(text)), text]
    parts += [column.tobytes() + bytes(-column.nbytes % 8) for column in columns]
    return gzip.compress(b"".join(parts), mtime=0)


def _entry(timeline: Timeline, extra: Extra, columns: list[np.ndarray]) -> dict[str, Any]:
    """A timeline in the header; its columns are added to the others. Spans lie by rank, lane and time."""
    spans, ranks = timeline.spans, timeline.global_ranks
    lanes = sorted_lanes(spans.lanes)
    place = np.array([lanes.index(lane) for lane in spans.lanes], dtype=np.int64)
    order = np.lexsort((spans.end_s, spans.start_s, place[spans.lane], spans.global_rank))
    number = np.empty(len(order) + 1, dtype=np.int32)  # of a span its place in that order; -1 stays -1
    number[order], number[-1] = np.arange(len(order)), -1
    known, actions = waits_of(timeline), spans.actions
    counts = np.diff(known.offsets)[order]
    wait_offsets = np.concatenate([[0], np.cumsum(counts)])
    places = np.repeat(known.offsets[order] - wait_offsets[:-1], counts) + np.arange(wait_offsets[-1])
    gaps = list(gaps_of(timeline, known))
    causes = list(palette.CAUSES)
    chunk, pair_chunk = chunks_of(timeline)

    def column(values: Any, dtype: str) -> int:
        columns.append(np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<")))
        return len(columns) - 1

    rank_place = np.searchsorted(np.array(ranks, dtype=np.int64), spans.global_rank)
    memory_ranks = {rank: i for i, rank in enumerate(ranks)}
    samples = sorted(
        (memory_ranks[each.global_rank], each.time_s, each.num_bytes, index)
        for index, each in enumerate(timeline.memory)
        if each.global_rank in memory_ranks
    )
    names = list(extra.peaks[0]) if extra.samples is not None and extra.peaks else []
    by_component = extra.samples[[index for *_, index in samples]] if extra.samples is not None else None
    return {
        "source": timeline.source,
        "title": timeline.title,
        "makespan_s": timeline.makespan_s,
        "ranks": list(ranks),
        "bubbles": [timeline.bubble_fraction(rank) for rank in ranks],
        "lanes": [{"name": lane, "role": role_of(lane)} for lane in lanes],
        "num_spans": len(spans),
        "num_chunks": int(max(chunk.max(initial=0), pair_chunk.max(initial=0))) + 1,
        "capacity_bytes": extra.capacity_bytes,
        "components": [dict(each) for each in extra.peaks],
        "findings": [_finding(each, number, timeline) for each in extra.findings],
        "columns": {
            "rank": column(rank_place[order], "int32"),
            "lane": column(place[spans.lane][order], "int32"),
            "kind": column(actions.kind[order], "int8"),
            "stage": column(actions.stage[order], "int32"),
            "microbatch": column(actions.microbatch[order], "int32"),
            "pair_stage": column(actions.pair_stage[order], "int32"),
            "pair_microbatch": column(actions.pair_microbatch[order], "int32"),
            "chunk": column(chunk[order], "int32"),
            "pair_chunk": column(pair_chunk[order], "int32"),
            "start": column(spans.start_s[order], "float64"),
            "end": column(spans.end_s[order], "float64"),
            "wait_offsets": column(wait_offsets, "int32"),
            "wait_sources": column(number[known.sources[places]], "int32"),
            "gap_rank": column([memory_ranks[gap.global_rank] for gap in gaps], "int32"),
            "gap_start": column([gap.start_s for gap in gaps], "float64"),
            "gap_end": column([gap.end_s for gap in gaps], "float64"),
            "gap_cause": column([causes.index(gap.cause) for gap in gaps], "int8"),
            "gap_span": column([number[gap.span] for gap in gaps], "int32"),
            "memory_rank": column([rank for rank, *_ in samples], "int32"),
            "memory_time": column([time_s for _, time_s, *_ in samples], "float64"),
            "memory_bytes": column([num_bytes for _, _, num_bytes, _ in samples], "float64"),
        },
        "memory_parts": [
            {"name": name, "column": column(by_component[:, number], "float64")}
            for number, name in enumerate(names)
            if by_component is not None
        ],
    }


def _finding(finding: Finding, number: np.ndarray, timeline: Timeline) -> dict[str, Any]:
    """A finding, and the span it is about, -1 where it is about none."""
    ranks, spans = timeline.global_ranks, timeline.spans
    span = -1
    if finding.rank is not None and finding.action is not None and finding.rank < len(ranks):
        own = np.flatnonzero(spans.global_rank == ranks[finding.rank]).tolist()
        span = next((i for i in own if str(spans.actions[i]) == finding.action), -1)
    return {
        "span": int(number[span]),
        "severity": finding.severity,
        "rule": finding.rule,
        "where": finding.where,
        "what": finding.what,
        "hint": finding.hint,
    }
