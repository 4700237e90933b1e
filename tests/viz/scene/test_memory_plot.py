"""Memory curves thinned without losing a peak."""

import pytest

from shardproof.core.schedule.timeline import MemorySample
from shardproof.viz.scene.memory import memory_plot


@pytest.fixture
def with_memory(make_timeline):
    def make(samples):
        return make_timeline([(0, "compute", "0F0", 0, 10)], memory=[MemorySample(*row) for row in samples])

    return make


def test_without_samples_there_is_no_plot(tiny):
    assert memory_plot(tiny, 100) is None


def test_thinned_curve_keeps_every_peak(with_memory):
    samples = [(0, i / 100, 500 if i == 777 else i % 7) for i in range(1000)]
    (curve,) = memory_plot(with_memory(samples), 20).curves
    assert len(curve.num_bytes) == 20 and len(curve.times_s) == 21
    assert curve.num_bytes[15] == 500 == curve.peak_bytes  # 7.77 s is in column 15 of 20 over 10 s
    assert set(curve.num_bytes) == {6.0, 500.0}


def test_a_column_without_samples_keeps_the_value_it_enters_with(with_memory):
    samples = [(0, 0.0, 5)] + [(0, 9.0 + i / 1000, 1) for i in range(1, 50)]
    (curve,) = memory_plot(with_memory(samples), 10).curves
    assert curve.num_bytes == (5.0,) * 10  # the last column is entered with 5, too


def test_more_than_eight_ranks_are_a_range_and_the_worst_rank(with_memory):
    plot = memory_plot(with_memory([(rank, 0.0, 100 + 10 * (rank % 5)) for rank in range(9)]), 4)
    assert [(curve.global_rank, curve.peak_bytes) for curve in plot.curves] == [(4, 140)]
    assert (plot.span.low_bytes, plot.span.high_bytes) == ((100.0,) * 4, (140.0,) * 4)
