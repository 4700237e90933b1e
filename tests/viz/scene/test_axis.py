"""Ticks at round numbers with one unit per axis."""

import pytest

from shardproof.viz.scene.axis import bytes_axis, format_time, time_axis


def labels(axis):
    return [tick.label for tick in axis.ticks]


@pytest.mark.parametrize(
    ("end_s", "unit", "expected"),
    [
        (33.0, "s", ["0", "5", "10", "15", "20", "25", "30"]),
        (0.0033, "ms", ["0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        (0.8, "ms", ["0", "100", "200", "300", "400", "500", "600", "700", "800"]),
        (4.2e-7, "ns", ["0", "100", "200", "300", "400"]),
    ],
)
def test_time_axis_has_about_eight_round_ticks(end_s, unit, expected):
    axis = time_axis(end_s)
    assert (axis.unit, labels(axis)) == (unit, expected)


def test_tick_values_are_in_seconds_whatever_the_unit():
    assert [tick.value for tick in time_axis(0.05, num_ticks=5).ticks] == pytest.approx(
        [0, 0.01, 0.02, 0.03, 0.04, 0.05]
    )


def test_made_up_durations_are_units_and_not_seconds():
    assert time_axis(33.0, "unit").unit == "units"
    assert (format_time(33.0, "unit"), format_time(1.0, "unit"), format_time(33.0)) == ("33 units", "1 unit", "33 s")


def test_bytes_axis_uses_binary_units():
    axis = bytes_axis(26 * 2**30, num_ticks=4)
    assert (axis.unit, labels(axis), axis.ticks[1].value) == ("GiB", ["0", "10", "20"], 10 * 2**30)


def test_axis_of_nothing_has_one_tick():
    assert labels(time_axis(0.0)) == ["0"]
