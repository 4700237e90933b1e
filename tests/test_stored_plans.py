"""Of 200 stored plans every byte, count and second is what it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardproof.tests.helpers.stored_plans import NUM_PLANS, STORED, numbers_of, stored, write

SECONDS = 1e-12
"""Relative difference up to which seconds are the same: sums may be made in another order."""

PARTS = 8
"""The table in so many tests, so that several workers share it."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_stored_plan_has_the_same_bytes_counts_and_seconds(part: int, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-goldens") and part == 0:
        write([json.loads(line)["plan"] for line in STORED.read_text(encoding="utf-8").splitlines()])
    for plan, expected in stored(slice(part, None, PARTS)):
        assert different(expected, json.loads(json.dumps(numbers_of(plan)))) == [], plan.to_toml()


def test_the_table_has_all_kinds_of_plans() -> None:
    plans = [plan for plan, _ in stored()]
    assert len(plans) == NUM_PLANS
    for kind in (
        lambda plan: plan.model.is_mla,
        lambda plan: plan.model.is_moe and plan.layout.ep > 1,
        lambda plan: plan.model.num_mtp_layers,
        lambda plan: plan.layout.cp > 1,
        lambda plan: plan.layout.sequence_parallel,
        lambda plan: plan.layout.zero == 3,
        lambda plan: plan.layout.vpp > 1,
        lambda plan: plan.recompute.mode == "selective",
        lambda plan: plan.recompute.mode == "full",
        lambda plan: plan.precision.dtype == "fp8",
        lambda plan: plan.numerics.mode == "exact",
        lambda plan: plan.cluster.kernel_curve,
    ):
        assert sum(map(bool, map(kind, plans))) >= 5


def different(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where two values differ: numbers and texts at all, seconds (keys that end in `_s`) beyond rounding."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [each for key in expected for each in different(expected[key], found[key], f"{path}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [each for number, (old, new) in pairs for each in different(old, new, f"{path}[{number}]")]
    if "_s" in path and isinstance(expected, float) and isinstance(found, float):
        return [] if abs(expected - found) <= SECONDS * abs(expected) else [f"{path}: {expected!r} is {found!r}"]
    return [] if expected == found else [f"{path}: {expected!r} is {found!r}"]


def test_a_difference_is_found() -> None:
    assert different({"step_time_s": 1.0, "bytes": [1, 2]}, {"step_time_s": 1.0 + 1e-15, "bytes": [1, 2]}) == []
    assert different({"step_time_s": 1.0}, {"step_time_s": 1.0 + 1e-9}) == ["/step_time_s: 1.0 is 1.000000001"]
    assert different({"bytes": [1, 2]}, {"bytes": [1, 3]}) == ["/bytes[1]: 2 is 3"]
