"""Text, character by character."""

import re

import pytest

from shardproof import draw

TINY = """\
tiny

Predicted: 9 units, bubble 33.3% on every rank
rank 0 |F0-F1-......B0====...B1====| 33.3%
rank 1 |...F0-B0====F1-B1====......| 33.3%
        '              '
        0              5 units

F- forward   B= backward   . idle (bubble)
"""

FULL = """\
tiny

Predicted: 9 s, bubble 33.3% on every rank
rank 0 |F0-F1-......B0====...B1====| 33.3%
           >
rank 1 |...F0-B0====F1-B1====......| 33.3%
                    <<       RRR
        '              '
        0              5 s
memory  tenths of 3 GiB (rank 0)
rank 0 |333333999999999999666666666| 3 GiB
rank 1 |666666666666666666666666666| 2 GiB

F- forward   B= backward
> send activations   < send gradients
R reduce gradients   . idle (bubble)
"""


def test_tiny_schedule_is_drawn_exactly(tiny):
    assert draw(tiny, width=50, time_unit="unit") == TINY


def test_messages_and_memory_are_drawn_exactly(full):
    assert draw(full, width=50) == FULL


def test_without_colour_only_ascii_is_used(full):
    assert draw(full, width=60).isascii()


@pytest.mark.parametrize("width", [40, 61, 100, 240])
@pytest.mark.parametrize("color", [False, True])
def test_rows_keep_to_the_width(full, width, color):
    plain = re.sub(r"\x1b\[[0-9;]*m", "", draw(full, width=width, color=color))
    assert max(map(len, plain.splitlines()[3:])) <= width


def test_colour_says_the_same_microbatches(tiny):
    text = draw(tiny, width=50, color=True)
    row = re.sub(r"\x1b\[[0-9;]*m", "", text.splitlines()[3])
    assert row == "rank 0  \u258f0 \u258f1       \u258f0       \u258f1      33.3%"
    assert text.splitlines()[3].endswith("\x1b[0m  33.3%")


def test_thin_actions_appear_as_often_as_they_take_time(long):
    (row,) = [line for line in draw(long, width=100).splitlines() if line.startswith("rank 1")]
    letters = row.split("|")[1]
    assert letters.count("F") / len(letters) == pytest.approx(1 / 3, abs=0.05)
    assert letters.count("B") / len(letters) == pytest.approx(2 / 3, abs=0.05)


def test_second_chunk_is_lower_case(make_timeline):
    timeline = make_timeline([(0, "compute", "0F0", 0, 2), (0, "compute", "1F0", 2, 4), (0, "compute", "1B0", 4, 6)])
    text = draw(timeline, width=42)
    assert "F0------f0------b0======" in text and "lower case: odd chunks" in text


def test_a_pair_that_runs_together_is_one_box(make_timeline):
    assert "|F3B2+++" in draw(make_timeline([(0, "compute", "(0F3;0B2)OVERLAP_F_B", 0, 2)]), width=40)


def test_labels_that_do_not_fit_leave_the_letter(make_timeline):
    rows = [(0, "compute", f"0F{i}", i, i + 1) for i in range(98, 108)]
    row = draw(make_timeline(rows), width=250).splitlines()[3]
    assert row.endswith("F-F-F-F-F-F-F-F-F-F-| 90.7%")
