"""Keys of `[optimizer]` that the chosen optimizer does not use are refused where they are given."""

from __future__ import annotations

import pytest

from shardproof import Plan
from shardproof.core.base.errors import PlanError
from shardproof.core.model.parameters import parameters
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


GROUPS = """name = "adamw"
[[optimizer.groups]]
match = "embedding.*"
frozen = true

[[optimizer.groups]]
match = '.*\\.norm\\.weight'
weight_decay = 0.05
learning_rate_multiplier = 2.0
"""


def test_the_first_group_that_matches_a_whole_name_says_how_it_is_trained() -> None:
    plan = Plan.from_toml(PLAN + GROUPS)
    assert Plan.from_toml(plan.to_toml()) == plan
    updates = {each.name: plan.optimizer.update_of(each) for each in parameters(plan.model)}
    frozen = {name for name, update in updates.items() if update.is_frozen}
    assert frozen == {"embedding.tokens.weight", "embedding.positions.weight"}
    assert not any(updates[name].states for name in frozen)
    norm, other = updates["layers.1.mlp.norm.weight"], updates["layers.1.mlp.norm.bias"]
    assert (norm.learning_rate(0.5), norm.weight_decay(0.1)) == (1.0, 0.05)
    assert (other.learning_rate(0.5), other.weight_decay(0.1)) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ("frozen = true", "a group of [[optimizer.groups]] has no match"),
        ('match = "layers.(0"', "is no regular expression"),
        ('match = "layers.0.*"\nfrozen = 1', "frozen = 1 must be true or false"),
        ('match = "layers.0.*"\nweight_deacy = 0.1', "unknown key 'weight_deacy'; did you mean 'weight_decay'?"),
        ('match = "layers.0.*"\nweight_decay = -0.1', "weight_decay = -0.1 must be from 0"),
        ('match = "layers.0.*"\nfrozen = true\nweight_decay = 0.1', "is frozen, so it has no weight_decay"),
        ('match = "layers.0"', "which matches the whole name of no parameter"),
        ('match = ".*"\nfrozen = true', "groups freeze all parameters"),
        ('match = ".*"\n[[optimizer.groups]]\nmatch = "head.*"', "groups before it match all of its parameters"),
    ],
)
def test_groups_that_mean_nothing_are_refused(group: str, sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.from_toml(f"{PLAN}[[optimizer.groups]]\n{group}")
    assert any(sentence in problem for problem in refused.value.problems), refused.value.problems
