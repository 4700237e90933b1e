"""Goodput against Daly's published optima, against searching the best interval, and against
failures drawn one by one."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.plans import product_plan
from shardproof.core.machine.variation import Variation
from shardproof.core.plan.plan import Plan
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.variation.goodput import (
    daly_interval_s,
    expected_s,
    goodput_of,
    young_interval_s,
)

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("mtbf_s", "optimum_min"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_best_intervals_are_those_of_dalys_figures_3_to_5(mtbf_s, optimum_min):
    """Checkpoints of 5 minutes, restarts of 10."""
    digits = 1 if optimum_min < 10 else 0
    assert round(daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE, digits) == optimum_min


@pytest.mark.parametrize("mtbf_s", [HOUR, 6 * HOUR, 100 * HOUR])
def test_no_interval_is_expected_to_be_better_than_dalys_by_more_than_a_thousandth(mtbf_s):
    def overhead(interval_s: float) -> float:
        return expected_s(interval_s, checkpoint_s=MINUTE, restart_s=5 * MINUTE, mtbf_s=mtbf_s) / interval_s

    best = min(overhead(interval_s) for interval_s in np.geomspace(10, 100 * HOUR, 2000))
    assert overhead(daly_interval_s(MINUTE, mtbf_s)) <= best * 1.001
    assert best <= overhead(young_interval_s(MINUTE, mtbf_s))


def test_the_expected_time_is_that_of_failures_drawn_one_by_one():
    """Work of 1,000 s and a checkpoint of 100, restarts of 300, a failure every 2,000 s: 20,000 intervals."""
    rng = np.random.default_rng(8)
    spent_s, intervals = 0.0, 20_000
    for _ in range(intervals):
        needed_s = 1_100.0
        while (failed_s := rng.exponential(2_000.0)) < needed_s:
            spent_s += failed_s
            needed_s = 1_400.0  # the restart comes first, and can fail too
        spent_s += needed_s
    expected = expected_s(1_000.0, checkpoint_s=100.0, restart_s=300.0, mtbf_s=2_000.0)
    assert spent_s / intervals == pytest.approx(expected, rel=0.03)


def llama(**fields) -> Plan:
    return product_plan(
        model="llama3-8b", cluster="dgx-h100", samples=32, sequence=4096, variation=Variation(**fields), tp=8, dp=2
    )


def test_a_run_on_16_devices_fails_16_times_as_often_as_one():
    found = goodput_of(llama(device_mtbf_s=1.6e7, checkpoint_s=50.0), 2.0)
    assert found.job_mtbf_s == 1e6
    assert found.young_interval_s == 1e4
    assert found.tokens_per_s == pytest.approx(found.share * 32 * 4096 / 2.0)


@pytest.mark.parametrize(
    ("checkpoint_s", "restart_s", "reaches"), [(20.0, 5 * MINUTE, True), (60.0, 10 * MINUTE, False)]
)
def test_llama_3s_419_failures_in_54_days_leave_its_90_percent_with_fast_checkpoints_only(
    checkpoint_s, restart_s, reaches
):
    """The Llama 3 Herd of Models (2024), section 3.3.4: 16,384 devices, more than 90% effective training time."""
    mtbf_s = 54 * 24 * HOUR / 419
    interval_s = daly_interval_s(checkpoint_s, mtbf_s)
    assert (
        interval_s / expected_s(interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s) > 0.9
    ) is reaches


def test_the_report_has_goodput_only_where_devices_fail():
    report = simulate(llama(device_mtbf_s=1.6e7, checkpoint_s=50.0, restart_s=100.0)).report
    plain = simulate(llama()).report
    assert "goodput" not in plain and report["step_time_s"] == plain["step_time_s"]
    assert report["goodput"]["tokens_per_s"] == pytest.approx(report["goodput"]["goodput"] * plain["tokens_per_s"])
    assert 0.98 < report["goodput"]["goodput"] < 1


def test_checkpoints_longer_than_failures_allow_leave_nothing():
    assert expected_s(1e6, checkpoint_s=0.0, restart_s=0.0, mtbf_s=1.0) == float("inf")
