"""Draws: quantiles against Python's own, the largest of n against drawing n, moments against closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from shardproof.simulator.variation.draws import (
    add_pauses,
    pareto_exponent,
    slowest,
    upper_quantile,
)


def test_quantiles_are_those_of_pythons_statistics_to_1e_14():
    tails = np.concatenate([np.linspace(0.001, 0.999, 401), 10.0 ** -np.arange(3, 300, 7)])
    expected = [-NormalDist().inv_cdf(tail) for tail in tails.tolist()]
    assert upper_quantile(tails) == pytest.approx(expected, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("distribution", ["lognormal", "normal", "pareto"])
@pytest.mark.parametrize("devices", [2, 8])
def test_the_largest_of_n_draws_is_distributed_as_drawing_n(distribution, devices):
    """Deciles of 200,000 draws each, two ways: agreement within 1% where the density is not thin."""
    size, kind = 200_000, {"spread": 0.3, "distribution": distribution}
    at_once = slowest(np.random.default_rng(1), (size,), devices=devices, **kind)
    one_by_one = slowest(np.random.default_rng(2), (devices, size), devices=1, **kind).max(axis=0)
    deciles = np.arange(1, 10) / 10
    assert np.quantile(at_once, deciles) == pytest.approx(np.quantile(one_by_one, deciles), rel=0.01)


@pytest.mark.parametrize(("distribution", "within"), [("lognormal", 0.02), ("normal", 0.02)])
def test_single_draws_have_mean_1_and_the_spread_asked_for(distribution, within):
    draws = slowest(np.random.default_rng(3), (400_000,), spread=0.25, distribution=distribution, devices=1)
    assert draws.mean() == pytest.approx(1.0, abs=0.002)
    assert draws.std() == pytest.approx(0.25, rel=within)
    assert draws.min() >= 0


def test_pareto_jitter_has_mean_1_and_the_tail_of_its_exponent():
    exponent = pareto_exponent(0.25)
    assert exponent / ((exponent - 1) ** 2 * (exponent - 2)) * ((exponent - 1) / exponent) ** 2 == pytest.approx(
        0.25**2
    )
    draws = slowest(np.random.default_rng(4), (400_000,), spread=0.25, distribution="pareto", devices=1)
    least = (exponent - 1) / exponent
    assert draws.min() >= least and draws.mean() == pytest.approx(1.0, abs=0.002)
    assert (draws > 2.0).mean() == pytest.approx((least / 2.0) ** exponent, rel=0.1)


def test_no_spread_draws_nothing():
    rng = np.random.default_rng(5)
    assert (slowest(rng, (3, 4), spread=0.0, distribution="lognormal", devices=8) == 1).all()
    assert rng.random() == np.random.default_rng(5).random()


def test_pauses_come_as_often_and_last_as_long_as_their_distributions_say():
    """2 devices, 0.01 a second, 40,000 s of work: 800 pauses, each 3 s times a Pareto with exponent
    4, whose mean is 4/3."""
    duration_s = np.full((4_000, 10), 1.0)
    add_pauses(np.random.default_rng(6), duration_s, per_s=0.01, least_s=3.0, exponent=4.0, devices=2)
    added_s = duration_s - 1
    hit = added_s > 0
    assert hit.sum() == pytest.approx(800, abs=5 * math.sqrt(800))
    assert added_s[hit].min() >= 3 - 1e-9
    assert added_s.sum() == pytest.approx(800 * 4, rel=0.15)


def test_longer_actions_are_paused_more_often():
    duration_s = np.repeat([[1.0], [9.0]], 20_000, axis=1)
    before = duration_s.copy()
    add_pauses(np.random.default_rng(7), duration_s, per_s=0.01, least_s=1.0, exponent=3.0, devices=1)
    short, long = ((duration_s - before) > 0).sum(axis=1)
    assert long / short == pytest.approx(9, rel=0.25)
