"""Loads of experts: moments against closed forms, the busiest rank against drawing token by token, prices at a load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch
from shardproof.core.program import Collective, Op, Product, Role
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.expert_load import draw_counts, draw_loads, loaded_work
from shardproof.simulator.cost.pricing import Pricing


def mixtral(layout: Layout, *, sequence: int = 2048, **fields) -> Plan:
    return product_plan(
        layout,
        model="mixtral-8x7b",
        cluster="dgx-h100",
        samples=4 * layout.dp,
        sequence=sequence,
        variation=Variation(**fields),
    )


@pytest.mark.parametrize(("num_experts", "imbalance"), [(8, 0.3), (64, 0.5), (256, 1.5)])
def test_experts_expect_tokens_with_the_relative_deviation_asked_for(num_experts, imbalance):
    """With endlessly many tokens the counts are the expectations: variance of a symmetric Dirichlet distribution."""
    tokens = 10**8
    counts = draw_counts(np.random.default_rng(1), 2000, num_experts, tokens, imbalance)
    assert (counts.sum(axis=1) == tokens).all()
    assert counts.std() / counts.mean() == pytest.approx(imbalance, rel=0.05)


def test_without_imbalance_counts_are_those_of_throwing_tokens_at_random():
    counts = draw_counts(np.random.default_rng(2), 4000, 16, 800, 0.0)
    assert counts.mean() == 50
    assert counts.var() == pytest.approx(800 * (1 / 16) * (15 / 16), rel=0.05)


def test_extreme_imbalance_gives_all_tokens_to_one_expert_and_never_divides_by_zero():
    counts = draw_counts(np.random.default_rng(3), 200, 256, 100, 15.96)
    assert (counts.sum(axis=1) == 100).all() and (counts.max(axis=1) > 90).mean() > 0.9


def test_the_busiest_rank_is_that_of_tokens_thrown_one_by_one():
    """Mixtral's 8 experts on 4 ranks, 4 x 96 tokens of 2 experts each: 768 throws."""
    plan = mixtral(Layout(dp=4, ep=4), sequence=96, expert_imbalance=0.0)
    found = draw_loads(plan, 4000, np.random.default_rng(4)).of_layers[0]
    thrown = np.random.default_rng(5).integers(4, size=(4000, 768))
    expected = np.stack([(thrown == rank).sum(axis=1) for rank in range(4)]).max(axis=0) / 192
    assert found.mean() == pytest.approx(expected.mean(), rel=0.005)
    assert np.quantile(found, 0.95) == pytest.approx(np.quantile(expected, 0.95), rel=0.01)


def test_a_rank_with_all_experts_has_all_tokens_whatever_they_choose():
    loads = draw_loads(mixtral(Layout(dp=4), expert_imbalance=1.0), 150, np.random.default_rng(6))
    assert (loads.of_layers == 1).all() and loads.dropped_share == 0 and loads.max_violation > 0


@settings(max_examples=20, deadline=None)
@given(capacity=st.floats(0.5, 2.0), imbalance=st.floats(0.0, 1.5))
def test_capacity_caps_the_load_and_counts_what_it_drops(capacity, imbalance):
    plan = mixtral(Layout(dp=8, ep=8), expert_imbalance=imbalance, expert_capacity=capacity)
    loads = draw_loads(plan, 80, np.random.default_rng(7))
    assert loads.of_layers.max() <= capacity + 1e-12
    free = draw_loads(
        replace(plan, variation=replace(plan.variation, expert_capacity=None)), 80, np.random.default_rng(7)
    )
    assert (loads.of_layers <= free.of_layers).all() and free.dropped_share == 0 <= loads.dropped_share < 1
    if capacity <= 1:
        assert loads.dropped_share >= 1 - capacity - 1e-12


def test_a_capacity_of_the_model_caps_as_one_that_is_tried_out_and_the_smaller_one_counts():
    tried = mixtral(Layout(dp=8, ep=8), expert_imbalance=0.8, expert_capacity=1.25)

    def loads(plan, own):
        return draw_loads(
            replace(plan, model=replace(plan.model, expert_capacity_factor=own)), 80, np.random.default_rng(7)
        )

    free = replace(tried, variation=replace(tried.variation, expert_capacity=None))
    expected = loads(tried, None)
    assert expected.dropped_share > 0
    for found in (loads(free, 1.25), loads(tried, 2.0)):
        assert (found.of_layers == expected.of_layers).all() and found.dropped_share == expected.dropped_share


def test_a_load_scales_the_experts_products_and_exchanges_and_nothing_else():
    plain = Product("layers.0.attention.qkv", 100, 30, 20)
    expert, transposed = (
        Product("layers.0.mlp.experts.up", 10, 30, 20, 4, grouped=True),
        Product("up", 30, 20, 10, 4, grouped=True),
    )
    exchange, gather = Collective("", "all_to_all", "ep", 8, 1000), Collective("", "all_gather", "tp", 8, 1000)
    (work,) = loaded_work(
        (Op("layers.0", Role.EXPERTS_UP, (plain, expert, exchange), (expert, gather), (plain, transposed), (expert,)),),
        1.5,
    )
    assert work.forward == (plain, replace(expert, m=15), replace(exchange, sent_bytes=1500))
    assert work.input_gradient == (replace(expert, m=15), gather)
    assert work.weight_gradient == (plain, replace(transposed, k=15))
    assert work.recomputed == (replace(expert, m=15),)


def test_prices_grow_with_the_load_of_moe_stages_only():
    plan = replace(mixtral(Layout(dp=8, ep=8)), model=replace(model_preset("mixtral-8x7b"), first_dense_layers=16))
    plan = replace(
        plan, layout=Layout(pp=2, dp=8, ep=8), cluster=cluster_preset("dgx-h100", 16), batch=Batch(32, 1, 2048)
    )
    prices = [
        [Pricing(plan, expert_load=load).seconds(Kind.F, stage).total_s for load in (1.0, 1.5, 2.0, 4.0)]
        for stage in (0, 1)
    ]
    assert prices[0] == [prices[0][0]] * 4
    assert prices[1] == sorted(prices[1]) and prices[1][3] > 1.5 * prices[1][0]
    assert prices[1][0] == Pricing(plan).seconds(Kind.F, 1).total_s
