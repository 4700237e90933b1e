"""Slopes of ALiBi (Press et al. 2022, arXiv 2108.12409, section 3) and what else a model with it has."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardproof.core.model.alibi import alibi_slopes, geometric_slopes
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import embedding_parameters

BLOOM = ModelSpec("bloom", 2, 48, 96, 12, 12, 4, 101, 64, position="alibi", norm="layernorm", embedding_norm=True)


def test_slopes_of_eight_heads_are_those_of_the_paper():
    assert geometric_slopes(8) == tuple(0.5**n for n in range(1, 9))


@pytest.mark.parametrize("heads", [1, 2, 16, 64, 128])
def test_slopes_of_a_power_of_two_are_a_geometric_sequence_that_ends_at_2_to_the_minus_8(heads):
    slopes = geometric_slopes(heads)
    assert len(slopes) == heads and slopes[-1] == 2.0**-8
    assert all(after / before == pytest.approx(slopes[0], rel=1e-15) for before, after in pairwise(slopes))


@pytest.mark.parametrize("heads", [3, 6, 12, 71, 112])
def test_other_numbers_have_the_slopes_of_the_power_below_and_every_second_one_of_the_power_above(heads):
    below = 2 ** (heads.bit_length() - 1)
    expected = [*geometric_slopes(below), *geometric_slopes(2 * below)[::2]][:heads]
    assert list(geometric_slopes(heads)) == expected


@pytest.mark.parametrize("heads", [4, 12, 71])
def test_transformers_has_the_same_slopes(heads):
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(theirs, torch.tensor(geometric_slopes(heads)), rtol=1e-6)


def test_a_model_has_slopes_where_its_positions_are_alibi():
    assert alibi_slopes(replace(BLOOM, alibi_multiplier=0.5)) == tuple(each / 2 for each in geometric_slopes(12))
    assert alibi_slopes(replace(BLOOM, position="rope")) == ()


def test_embeddings_have_a_norm_and_no_table_of_positions():
    names = [each.name for each in embedding_parameters(BLOOM)]
    assert names == ["embedding.tokens.weight", "embedding.norm.weight", "embedding.norm.bias"]
