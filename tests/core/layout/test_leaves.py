"""Leaf sizes: blocks belong to the problem, and every tensor-parallel rank owns whole ones."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.leaves import Leaves, degree_to_admit, leaf_sizes
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import MODEL_PRESETS, model_preset
from shardproof.core.model.parameters import parameters

FACTS = json.loads((DATA / "layout_facts.json").read_text())["facts"]


def model_of(kv_heads: int, vocab: int = 256, ffn: int = 192) -> ModelSpec:
    return ModelSpec("shape", 2, 64, ffn, kv_heads, kv_heads, 8, vocab, 128)


@pytest.mark.parametrize(
    "fact", [fact for fact in FACTS if fact["area"] == "vocab_ranges"], ids=lambda fact: str(fact["input"])
)
def test_vocabulary_of_1600_over_tp8_gives_200_rows_to_each_rank(fact):
    assert fact["expected"] == ["200r", "200(r+1)"]
    tp = fact["input"]["tp"]
    vocab = leaf_sizes(model_of(kv_heads=tp, vocab=fact["input"]["vocab"]), sequence=128).vocab
    assert [vocab.owned_items(tp, rank) for rank in range(tp)] == [(200 * rank, 200 * (rank + 1)) for rank in range(tp)]


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 8))
def test_owned_items_partition_all_items_on_block_boundaries(num_items, block, tp):
    leaves = Leaves(num_items, block)
    intervals = [leaves.owned_items(tp, rank) for rank in range(tp)]
    assert intervals[0][0] == 0 and intervals[-1][1] == num_items
    assert all(a[1] == b[0] for a, b in pairwise(intervals))
    # fewer leaves than ranks leave some without
    assert all((lo % block == 0 and lo < hi) or lo == hi for lo, hi in intervals)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_default_blocks_admit_every_degree_up_to_8_that_divides_the_heads(name):
    model = model_preset(name)
    sizes = leaf_sizes(model, sequence=128)
    for tp in range(1, 9):
        if model.num_kv_heads % tp == 0:
            sizes.check(tp)


@pytest.mark.parametrize("tp", [2, 3, 6])
@pytest.mark.parametrize("name", ["tiny-gpt-6h", "gpt3-175b"])
def test_the_slices_of_all_tensor_ranks_cover_each_cut_parameter_once(name, tp):
    model = model_preset(name)
    sizes = leaf_sizes(model, sequence=128)
    for parameter in parameters(model):
        cuts = [sizes.local_slices(parameter, tp, rank) for rank in range(tp)]
        if parameter.cut is None:
            assert all(cut == cuts[0] for cut in cuts)
        else:
            dim = parameter.cut[0]
            assert cuts[0][dim].start == 0 and cuts[-1][dim].stop == parameter.shape[dim]
            assert all(a[dim].stop == b[dim].start for a, b in pairwise(cuts))


def test_leaf_sizes_depend_on_model_and_sequence_only():
    sizes = leaf_sizes(model_of(kv_heads=6), sequence=64)
    assert (sizes.gradient_token_block, sizes.reduction_token_block) == (64, 8)
    assert sizes.ffn == Leaves(192, 32) and sizes.vocab == Leaves(256, 43)


def test_a_block_that_is_too_coarse_for_tp_names_one_that_is_not():
    sizes = leaf_sizes(model_of(kv_heads=8), sequence=128, ffn_block=96, vocab_block=200)
    with pytest.raises(LayoutError) as caught:
        sizes.check(4)
    assert len(caught.value.problems) == 2
    assert "ffn_block <= 48" in str(caught.value) and "vocab_block <= 64" in str(caught.value)


def test_leaves_of_several_heads_are_whole_on_a_rank():
    sizes = leaf_sizes(model_of(kv_heads=8), sequence=128, head_block=3)
    assert [sizes.heads.owned_items(3, rank) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert sizes.ffn == leaf_sizes(model_of(kv_heads=8), sequence=128).ffn
    sizes.check(3)
    with pytest.raises(LayoutError) as caught:
        sizes.check(4)
    (problem,) = caught.value.problems
    assert problem == (
        "tp=4 cuts num_kv_heads=8 inside a leaf of 3: there are only 3 leaves. Use tp <= 3 or numerics.head_block <= 2."
    )


def test_sums_over_heads_have_a_leaf_for_every_head_whatever_a_leaf_of_the_heads_is():
    one, three = (leaf_sizes(model_of(kv_heads=8), sequence=128, head_block=block) for block in (1, 3))
    blocks = one.tokens(128).num_leaves
    assert one.head_sums(128) == three.head_sums(128) == 8 * blocks
    nodes = [three.nodes_of("heads", 128, 3, rank) for rank in range(3)]
    assert [(own[0][0], own[-1][1]) for own in nodes] == [
        (0, 3 * blocks),
        (3 * blocks, 6 * blocks),
        (6 * blocks, 8 * blocks),
    ]


def test_fast_numerics_admit_a_tensor_parallel_degree_above_8_that_exact_ones_refuse():
    model, layout = model_of(kv_heads=32, vocab=1600, ffn=256), Layout(tp=16)
    fast = leaf_sizes(model, 64, max_degree=degree_to_admit("fast", layout))
    fast.check(16)
    assert [fast.ffn.owned_items(16, rank) for rank in range(16)] == [
        (16 * rank, 16 * (rank + 1)) for rank in range(16)
    ]
    with pytest.raises(LayoutError, match="there are only 8 leaves"):
        leaf_sizes(model, 64, max_degree=degree_to_admit("exact", layout)).check(16)


def test_fast_and_exact_numerics_have_the_same_leaves_up_to_tp8():
    model = model_of(kv_heads=8)
    assert leaf_sizes(model, 64, max_degree=degree_to_admit("fast", Layout(tp=8))) == leaf_sizes(model, 64)


def test_the_width_of_an_expert_is_cut_whatever_the_heads_are():
    model = replace(
        model_of(kv_heads=3), num_experts=4, experts_per_token=1, expert_ffn_hidden_size=64, num_shared_experts=3
    )
    sizes = leaf_sizes(model, 64)
    assert [sizes.feature("expert_ffn").owned_items(8, rank) for rank in range(8)] == [
        (8 * rank, 8 * (rank + 1)) for rank in range(8)
    ]
    assert sizes.feature("shared_ffn") == Leaves(192, 64)
    assert leaf_sizes(model_of(kv_heads=3), 64).expert_ffn is None
