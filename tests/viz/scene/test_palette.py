"""Colours that stand next to each other are apart for everybody.

Colours as people with one kind of cones missing see them: Machado, Oliveira & Fernandes 2009, the matrices of severity
1. Their distance is that of CIELAB (CIE 1976).
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from shardproof.core.schedule.action import Kind
from shardproof.viz.curves_picture import COLORS
from shardproof.viz.layout_picture import FIRST_GROUP
from shardproof.viz.scene import palette

SEEN = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color, seen):
    """A colour in CIELAB, as it is seen."""
    coded = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(coded > 0.04045, ((coded + 0.055) / 1.055) ** 2.4, coded / 12.92)
    xyz = TO_XYZ @ np.clip(np.array(seen) @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colors, seen):
    """The least distance between two of several colours."""
    places = [lab(color, SEEN[seen]) for color in colors]
    return min(np.linalg.norm(one - other) for one, other in combinations(places, 2))


@pytest.mark.parametrize("seen", SEEN)
def test_components_of_memory_are_apart(seen):
    assert nearest(palette.COMPONENTS.values(), seen) > 15


@pytest.mark.parametrize("seen", SEEN)
def test_what_computes_is_apart(seen):
    """Zero-bubble schedules have input gradients next to weight gradients all the time."""
    assert nearest([palette.FILLS[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP)], seen) > 14


@pytest.mark.parametrize("seen", SEEN)
def test_causes_of_idle_time_are_apart_on_paper_and_on_a_dark_ground(seen):
    pairs = [pair for cause, pair in palette.CAUSES.items() if cause != "end"]  # which has the colour of warm-up
    for ground in (0, 1):
        assert nearest([pair[ground] for pair in pairs], seen) > 9


@pytest.mark.parametrize("seen", SEEN)
def test_curves_of_runs_are_apart(seen):
    assert nearest(COLORS, seen) > 20


@pytest.mark.parametrize("seen", SEEN)
def test_the_first_group_is_apart_from_every_place(seen):
    ramp = [lab(palette.ramp(i / 63), SEEN[seen]) for i in range(64)]
    assert min(np.linalg.norm(lab(FIRST_GROUP, SEEN[seen]) - place) for place in ramp) > 20


@pytest.mark.parametrize("seen", SEEN)
def test_places_of_an_axis_become_lighter(seen):
    lightness = [lab(palette.ramp(i / 15), SEEN[seen])[0] for i in range(16)]
    assert all(one < other for one, other in pairwise(lightness))
