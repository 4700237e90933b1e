"""Schedules with whole backwards: bubbles of Narayanan et al. 2021, and what `idle_inside_s` measures."""

from __future__ import annotations

import pytest

from shardproof.core.schedule import build
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.timeline import Span, Timeline
from shardproof.simulator.engine.engine import run_schedule

TIMES = [(1, 1, 1), (4, 5, 3), (2, 7, 5)]
SIZES = [(1, 4), (2, 2), (3, 3), (3, 8), (4, 8), (5, 12), (6, 6), (8, 16)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "num_microbatches"), SIZES)
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_gpipe_and_1f1b_idle_p_minus_1_forwards_and_backwards(name, pp, num_microbatches, times, bubble) -> None:
    """Section 2.2.1: (p-1)(t_f+t_b), for rank 0 inside its own actions and for every rank of the whole step."""
    built = build(name, pp=pp, num_microbatches=num_microbatches)
    assert bubble(built, *times) == (pp - 1) * sum(times)
    assert run_schedule(built, *times).makespan_s == (num_microbatches + pp - 1) * sum(times)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (3, 6), (4, 8), (5, 10), (6, 18)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp, vpp, num_microbatches, times, bubble) -> None:
    """Section 2.2.2: with v chunks of a v-th of the time, (p-1)(t_f+t_b)/v; here `times` are those of one chunk."""
    built = build("Interleaved1F1B", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    plain = build("1F1B", pp=pp, num_microbatches=num_microbatches)
    assert bubble(built, *times) == (pp - 1) * sum(times) == bubble(plain, *(vpp * time for time in times)) / vpp


@pytest.mark.parametrize(("pp", "num_microbatches"), SIZES)
def test_gpipe_holds_m_and_1f1b_min_of_p_and_m_activations(pp, num_microbatches, peak) -> None:
    assert peak(build("GPipe", pp=pp, num_microbatches=num_microbatches)) == num_microbatches
    assert peak(build("1F1B", pp=pp, num_microbatches=num_microbatches)) == min(pp, num_microbatches)


def test_idle_inside_counts_gaps_between_forwards_and_backwards_only() -> None:
    """Waits of 2 s before the first action, 3 s in the middle and 4 s before STEP: 3 s count, 9 s (of 15)
    are the bubble fraction."""
    spans = [
        Span(0, "compute", Action(0, Kind.F, 0), 2, 4),
        Span(0, "compute", Action(0, Kind.B, 0), 7, 10),
        Span(0, "compute", Action(0, Kind.STEP), 14, 15),
        Span(0, "dp", Action(0, Kind.REDUCE_GRAD), 10, 14),
    ]
    timeline = Timeline.from_spans(spans, "predicted")
    assert timeline.idle_inside_s(0) == 3
    assert timeline.bubble_fraction(0) == 1 - 6 / 15
    assert timeline.idle_inside_s(1) == 0
    assert Timeline.from_spans(spans[3:], "predicted").idle_inside_s(0) == 0
