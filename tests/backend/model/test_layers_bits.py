"""Exact numerics: the gradients of one step are equal to the last bit between one device and every cut of it."""

from __future__ import annotations

import pytest
import torch

from shardproof.core.model.model import ModelSpec

GPT = ModelSpec(
    "gpt",
    2,
    48,
    96,
    6,
    6,
    8,
    101,
    64,
    activation="gelu",
    norm="layernorm",
    position="learned",
    tied_embeddings=True,
    bias=True,
)
# ffn leaves of 17 and a last one of 15, vocabulary leaves of 17 and 16
LLAMA = ModelSpec("llama-gqa", 2, 48, 100, 12, 6, 8, 101, 64)
MIXED = ModelSpec("mixed", 1, 40, 60, 20, 20, 2, 64, 64, activation="gelu_tanh", position="learned", bias=True)
SQUARED = ModelSpec(
    "squared", 1, 40, 52, 4, 4, 10, 37, 64, activation="relu_squared", norm="layernorm", tied_embeddings=True
)


def assert_same_bits(one, many):
    assert one.loss == many.loss
    assert torch.equal(one.losses, many.losses)
    assert one.gradients.keys() == many.gradients.keys()
    for name, gradient in one.gradients.items():
        assert torch.equal(gradient, many.gradients[name]), (
            f"{name}: {int((gradient != many.gradients[name]).sum())} elements differ"
        )


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("tp", "dp", "micro"),
    [
        (1, 1, 2),
        (1, 1, 3),
        (1, 1, 6),
        (2, 1, 1),
        (3, 1, 2),
        (6, 1, 1),
        (1, 2, 1),
        (1, 3, 2),
        (1, 2, 3),
        (1, 6, 1),
        (2, 3, 1),
        (3, 2, 3),
    ],
)
def test_six_heads_and_six_samples_in_any_layout_equal_one_device(run_stage, model, tp, dp, micro):
    assert_same_bits(run_stage(model), run_stage(model, tp=tp, dp=dp, micro=micro))


@pytest.mark.parametrize("tp", [2, 4, 5])
def test_twenty_heads_over_4_and_5_ranks_equal_one_device(run_stage, tp):
    assert_same_bits(run_stage(MIXED), run_stage(MIXED, tp=tp, micro=2))


def test_squared_relu_with_a_tied_table_over_4_ranks_equals_one_device(run_stage):
    assert_same_bits(run_stage(SQUARED), run_stage(SQUARED, tp=4, micro=3))


@pytest.mark.parametrize(("dp", "micro"), [(5, 1), (5, 2), (2, 5), (1, 10)])
def test_ten_samples_over_5_ranks_cut_the_tree_inside_its_halves(run_stage, dp, micro):
    assert_same_bits(run_stage(GPT, samples=10), run_stage(GPT, samples=10, dp=dp, micro=micro))


@pytest.mark.parametrize("sequence", [1, 7, 33])
def test_odd_sequences_equal_one_device(run_stage, sequence):
    assert_same_bits(run_stage(LLAMA, sequence=sequence), run_stage(LLAMA, sequence=sequence, tp=3, dp=2, micro=3))


@pytest.mark.parametrize(("model", "head_block", "degrees"), [(MIXED, 5, (2, 3, 4)), (LLAMA, 2, (2, 3))])
def test_leaves_of_several_heads_equal_one_device(run_stage, model, head_block, degrees):
    one = run_stage(model, head_block=head_block)
    for tp in degrees:
        assert_same_bits(one, run_stage(model, head_block=head_block, tp=tp, micro=2))


def test_leaf_sizes_are_part_of_the_problem_so_other_blocks_give_other_bits(run_stage):
    one = run_stage(GPT)
    for finer in ({"gradient_token_block": 16}, {"head_block": 3}):
        other = run_stage(GPT, **finer)
        assert any(not torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


def test_fast_numerics_do_depend_on_the_layout(run_stage):
    one, many = run_stage(GPT, mode="fast"), run_stage(GPT, mode="fast", tp=3, dp=2)
    assert any(not torch.equal(one.gradients[name], many.gradients[name]) for name in one.gradients)
