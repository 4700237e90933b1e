"""Keys of `[optimizer]` that the chosen optimizer does not use are refused where they are given."""

from __future__ import annotations

import pytest

from shardproof import Plan
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.optimizer import Optimizer

PLAN = '[model]\npreset = "tiny-gpt"\n[batch]\nglobal = 4\nsequence = 32\n[cluster]\nnum_devices = 1\n[optimizer]\n'


@pytest.mark.parametrize(
    ("keys", "line", "sentence"),
    [
        (
            'name = "sgd"\nbetas = [0.8, 0.9]',
            10,
            'betas has no meaning with optimizer.name="sgd": it is a key of adamw and muon',
        ),
        ('name = "sgd"\neps = 1e-8', 10, 'eps has no meaning with optimizer.name="sgd"'),  # its default, but given
        ("momentum = 0.9", 9, 'momentum has no meaning with optimizer.name="adamw": it is a key of sgd and muon'),
        ('nesterov = false\nname = "adamw"', 9, 'nesterov has no meaning with optimizer.name="adamw"'),
        ('name = "sgd"\nmuon_steps = 5', 10, 'muon_steps has no meaning with optimizer.name="sgd"'),
        ('name = "sgd"\nnesterov = true\nmomentum = 0.0', 10, "nesterov=true needs a momentum, and momentum=0"),
    ],
)
def test_a_key_that_the_optimizer_does_not_use_is_refused_on_its_line(keys: str, line: int, sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.from_toml(PLAN + keys)
    (problem,) = refused.value.problems
    assert sentence in problem and problem.place.line == line


def test_an_optimizer_is_written_with_its_own_keys_alone() -> None:
    plan = Plan.from_toml(PLAN + 'name = "sgd"\nmomentum = 0.5\n')
    assert Plan.from_toml(plan.to_toml()) == plan and plan.optimizer == Optimizer(name="sgd", momentum=0.5)
    assert '[optimizer]\nname = "sgd"\nmomentum = 0.5\n' in plan.to_toml()
