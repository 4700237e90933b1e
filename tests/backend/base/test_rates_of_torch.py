"""Learning rates against the schedulers of torch, where those have the same schedule."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.rates import Rates
from shardproof.core.plan.sections import Batch
from shardproof.core.plan.train import Train

PEAK, STEPS = 0.3, 200


def of_torch(make) -> list[float]:
    """The rate of each step of an optimizer whose scheduler `make` gives."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def line(first: float, last: float, steps: int):
    return lambda optimizer: lr_scheduler.LinearLR(optimizer, first, last, steps)


def warmed_up(optimizer):
    """50 steps from a hundredth, then a cosine over 150 down to a tenth."""
    rise = lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 50)
    fall = lr_scheduler.CosineAnnealingLR(optimizer, 150, eta_min=PEAK / 10)
    return lr_scheduler.SequentialLR(optimizer, [rise, fall], [50])


@pytest.mark.parametrize(
    ("own", "make"),
    [
        ({"warmup_steps": 70, "initial_learning_rate": PEAK / 100}, line(0.01, 1.0, 70)),
        ({"schedule": "linear", "minimum_learning_rate": PEAK / 5}, line(1.0, 0.2, STEPS)),
        (
            {"schedule": "cosine", "minimum_learning_rate": 0.01},
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.01),
        ),
        (
            {
                "schedule": "cosine",
                "warmup_steps": 50,
                "initial_learning_rate": PEAK / 100,
                "minimum_learning_rate": PEAK / 10,
            },
            warmed_up,
        ),
    ],
    ids=("warm-up", "linear", "cosine", "warm-up-and-cosine"),
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # by which SequentialLR begins the second
def test_rates_are_those_of_torch(own, make):
    rates = Rates.of(Optimizer(**own), Train(STEPS, learning_rate=PEAK), Batch(8, 1, 16))
    assert [rates.learning_rate(step) for step in range(STEPS + 1)] == pytest.approx(of_torch(make), rel=1e-12)
