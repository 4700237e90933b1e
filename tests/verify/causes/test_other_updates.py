"""A weight that is wrong after right moments names the step whose count or learning rate made it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardproof.core.model.parameters import TOKEN_TABLE, parameters
from shardproof.core.plan.optimizer import Optimizer
from shardproof.verify.causes.other_updates import explained_by_update
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run.updates import Tensors, expected_update, rate_and_decay

PLAN = replace(tiny(train={"steps": 9}), optimizer=Optimizer(warmup_steps=4))
TABLE = next(each for each in parameters(PLAN.model) if each.name == TOKEN_TABLE)
BOX = slice(3, 90), slice(0, 24)
STEP = 2


def of_update(rate: float, count: int) -> tuple[Tensors, np.ndarray]:
    rng = np.random.default_rng(0)
    weight, first = rng.normal(size=(2, *TABLE.shape))
    moments = {"exp_avg": first, "exp_avg_sq": np.square(first) * rng.uniform(1, 2, TABLE.shape)}
    tensors = Tensors(np.zeros(TABLE.shape), weight, moments, moments)
    *_, (_, expected) = expected_update(PLAN, TABLE, tensors, rate, rate_and_decay(PLAN, TABLE, STEP)[1], count)
    return tensors, expected.values.astype(np.float32)[BOX]


@pytest.mark.parametrize(
    ("of_step", "count", "words"),
    [
        (STEP, 1, "with moments corrected as in update 1"),
        (STEP, 101, "with moments corrected as in update 101"),
        (STEP, 10**6, "with moments that are not corrected"),
        (3, STEP + 1, "with the learning rate of step 4"),
        (1, STEP + 1, "with the learning rate of step 2"),
    ],
)
def test_an_update_of_another_step_is_named(of_step: int, count: int, words: str) -> None:
    tensors, found = of_update(rate_and_decay(PLAN, TABLE, of_step)[0], count)
    assert explained_by_update(PLAN, TABLE, STEP, tensors, found, BOX) == ("scaled", words)


def test_the_right_update_and_what_no_step_makes_are_not_named() -> None:
    rate, _ = rate_and_decay(PLAN, TABLE, STEP)
    for found in (of_update(rate, STEP + 1)[1], of_update(0.77 * rate, STEP + 1)[1]):
        assert explained_by_update(PLAN, TABLE, STEP, of_update(rate, STEP + 1)[0], found, BOX) is None
