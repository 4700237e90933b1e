"""Timelines made by hand, so that every expected number can be read off the list of spans."""

import pytest

from shardproof.core.schedule.action import Action
from shardproof.core.schedule.timeline import MemorySample, Span, Timeline

GIB = 2**30


def spans_of(rows):
    """Spans from `(rank, lane, action, start, end)`."""
    return [
        Span(rank, lane, Action.from_str(action), float(start), float(end)) for rank, lane, action, start, end in rows
    ]


TWO_RANKS = [
    (0, "compute", "0F0", 0, 1),
    (0, "compute", "0F1", 1, 2),
    (0, "compute", "0B0", 4, 6),
    (0, "compute", "0B1", 7, 9),
    (1, "compute", "1F0", 1, 2),
    (1, "compute", "1B0", 2, 4),
    (1, "compute", "1F1", 4, 5),
    (1, "compute", "1B1", 5, 7),
]
"""1F1B with p = 2, m = 2, a forward of one second and a backward of two: the step takes 9 s and each
rank idles 3 s of them."""

MESSAGES = [
    (0, "F>1", "0SEND_F0", 1, 1.5),
    (0, "B<1", "0RECV_B0", 3.5, 4),
    (1, "F<0", "1RECV_F0", 1, 1.5),
    (1, "B>0", "1SEND_B0", 4, 4.5),
    (1, "dp", "1REDUCE_GRAD", 7, 8),
    (0, "F>1", "0SEND_F1", 2, 2),
]


@pytest.fixture
def make_timeline():
    """Timeline from rows, with any further fields."""

    def make(rows, source="predicted", memory=(), title="tiny"):
        return Timeline.from_spans(spans_of(rows), source, memory, title)

    return make


@pytest.fixture
def tiny(make_timeline):
    """Compute only."""
    return make_timeline(TWO_RANKS)


@pytest.fixture
def full(make_timeline):
    """Compute, messages, one reduction and memory: rank 0 holds 1, then 3, then 2 GiB, rank 1
    holds 2 GiB all the time."""
    memory = [
        MemorySample(0, 0.0, GIB),
        MemorySample(0, 2.0, 3 * GIB),
        MemorySample(0, 6.0, 2 * GIB),
        MemorySample(1, 0.0, 2 * GIB),
    ]
    return make_timeline(TWO_RANKS + MESSAGES, memory=memory)


@pytest.fixture
def long(make_timeline):
    """Three ranks of 1,000 microbatches each, forward one second and backward two, back to back on [0, 3000]."""
    rows = []
    for rank in range(3):
        for i in range(1000):
            rows += [
                (rank, "compute", f"{rank}F{i}", 3 * i, 3 * i + 1),
                (rank, "compute", f"{rank}B{i}", 3 * i + 1, 3 * i + 3),
            ]
    return make_timeline(rows, title="long")
