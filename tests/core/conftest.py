"""Bubbles of schedules, as tests of the core measure them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.simulator.engine.engine import run_schedule


@pytest.fixture(scope="session")
def bubble() -> Callable[..., float]:
    """`bubble(schedule, F, I, W, send)`: the most that a rank idles between its first and last action."""

    def bubble_of(
        built: Schedule, forward: float = 1, backward_input: float = 1, backward_weight: float = 1, send: float = 0
    ) -> float:
        timeline = run_schedule(built, forward, backward_input, backward_weight, send)
        return max(timeline.idle_inside_s(rank) for rank in range(built.num_ranks))

    return bubble_of


@pytest.fixture(scope="session")
def peak() -> Callable[[Schedule], int]:
    """`peak(schedule)`: the most activations (of one stage and microbatch, from F to B or W) that a rank holds."""
    change = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}

    def peak_of(built: Schedule) -> int:
        return max(max(itertools.accumulate(change[each.kind] for each in row)) for row in built.rows())

    return peak_of
