"""What optimizers other than AdamW cost a step, by closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Collective
from shardproof.simulator.cost.muon import exchanges, muon, update_bytes

MATRICES = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
"""Elements of the matrices of a layer of Llama 3 8B."""


def llama(optimizer: Optimizer, *, layers: int = 2, **degrees: object) -> Plan:
    return product_plan(model="llama3-8b", cluster="dgx-h100", optimizer=optimizer, num_layers=layers, **degrees)


def test_a_moment_less_is_eight_bytes_less() -> None:
    stages = (0,)
    assert update_bytes(llama(Optimizer()), stages, 28.0) == 28.0
    assert update_bytes(llama(Optimizer("sgd")), stages, 28.0) == 20.0
    assert update_bytes(llama(Optimizer("sgd", momentum=0.0)), stages, 28.0) == 12.0
    assert 20.0 < update_bytes(llama(Optimizer("muon")), stages, 28.0) < 28.0


@pytest.mark.parametrize(("zero", "held"), [(0, 1), (1, 4)])
def test_every_part_goes_to_its_owner_once_and_comes_back_to_all_that_hold_it(zero: int, held: int) -> None:
    plan = llama(Optimizer("muon"), tp=2, dp=4, zero=zero)
    elements = 2 * MATRICES / 2
    sent, back = exchanges(plan, 0)
    assert sent == Collective("muon", "all_to_all", "dp", 4, round(4 * elements / 4 * 3 / 4))
    assert back == Collective("muon", "all_to_all", "dp", 4, round(4 * elements / held * 3 / 4))
    assert exchanges(llama(Optimizer("muon")), 0) == () == exchanges(llama(Optimizer("sgd"), dp=4), 0)


def test_owners_share_the_products_and_the_largest_matrix_is_the_least() -> None:
    free = lambda operation: 0.0  # noqa: E731
    plans = [llama(Optimizer("muon"), layers=16, dp=dp) for dp in (1, 2, 4, 64, 128)]
    one, *shared = (muon(plan, (0,), free).optimizer for plan in plans)
    assert shared[0] == pytest.approx(one / 2) and shared[1] == pytest.approx(one / 4)
    assert shared[2] == shared[3] > one / 64
    flops = 5 * (4 * 4096**2 * 14336 + 2 * 4096**3)  # of gates, up- and down-projections
    assert shared[3] > flops / 67e12
    twice = replace(plans[0], optimizer=Optimizer("muon", muon_steps=10))
    assert muon(twice, (0,), free).optimizer == pytest.approx(2 * one)
    assert muon(llama(Optimizer("sgd")), (0,), free).total_s == 0.0
