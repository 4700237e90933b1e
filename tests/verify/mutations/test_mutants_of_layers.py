"""Bugs inside of layers, on 3 and 5 tensor-parallel ranks: where they are found, what they are
called, and on which ranks."""

from __future__ import annotations

import pytest

from shardproof.verify.mutations.catalog import MUTANTS
from shardproof.verify.mutations.run import Score, judge_mutants

LAYER_SIDE = (
    *(
        "MR01",
        "MR02",
        "MR04",
        "MR05",
        "MR06",
        "MR07",
        "MR09",
        "MR10",
        "MR12",
        "MR14",
        "MR18",
        "MR19",
        "MR20",
        "MR21",
        "MR23",
    ),
    *("MX01", "MX02", "MX04", "MX05", "MX06", "RN02", "RN03", "RN04", "RN05", "RN07"),
    *("LY01", "LY02", "LY03", "LY04", "LY05", "PR01", "PR03", "PR05", "PR06", "PD01", "PD02"),
)
"""Every entry of these classes in the catalog of bugs."""


def test_every_bug_of_layers_in_the_catalog_is_here() -> None:
    assert set(LAYER_SIDE) <= {mutant.id for mutant in MUTANTS}


PLACES = {
    "MR01": ("0REDUCE_GRAD, gradient layers.0.mlp.norm.weight", "missing: only the part of tp rank 0"),
    "MR12-b": ("0B0, activation gradient layers.1.mlp.norm of sample 0", "scaled: the right values times 5, as tp is."),
}
"""Mutants on 3 x 2 and on 5 ranks, and what is to be read of them."""


@pytest.fixture(scope="module")
def score() -> Score:
    return judge_mutants([mutant for mutant in MUTANTS if mutant.id in PLACES])


@pytest.mark.parametrize("mutant_id", PLACES)
def test_a_bug_of_layers_is_located_and_named(mutant_id: str, score: Score) -> None:
    (verdict,) = (each for each in score.verdicts if each.mutant.id == mutant_id)
    assert verdict.located
    assert all(words in verdict.words for words in PLACES[mutant_id])


def test_the_same_layouts_without_a_bug_raise_no_alarm(score: Score) -> None:
    assert score.false_alarms == () and score.num_clean == 2
