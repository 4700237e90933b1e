"""Facts about Megatron-Core's context parallelism, packed sequences and norms (NVIDIA/Megatron-LM
d98e8a64), held to ours.

Where we differ on purpose the test says so and why.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shardproof.backend.model.attention_blocks import Block
from shardproof.backend.numerics import ExactNumerics, FastNumerics
from shardproof.backend.tensor_parallel import context_positions
from shardproof.core.layout.chunks import Chunks
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.leaves import LeafSizes, Leaves
from shardproof.core.model.model import ModelSpec

DOCUMENT_ENDS, NUM_TOKENS = (5, 7, 11), 16
DOCUMENT_OF_TOKEN = [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]


def test_tokens_see_their_own_document_and_padding_behind_the_last_is_one_more():
    """packed_seq_params.py: boundaries 0, 5, 7, 11 of 16 tokens give document ids 0, 1, 2, and 3 for what follows. Ours
    say for every token where its document begins; what a token sees is the same."""
    starts = [max((end for end in DOCUMENT_ENDS if end <= token), default=0) for token in range(NUM_TOKENS)]
    ids = torch.tensor([starts]).unique_consecutive(return_inverse=True)[1]
    assert ids.tolist() == [DOCUMENT_OF_TOKEN]
    mask = Block(0, 0, NUM_TOKENS, 0).mask(torch.tensor([starts]), torch.float32, torch.device("cpu"))[0, 0]
    for query, key in itertools.product(range(NUM_TOKENS), repeat=2):
        sees = key <= query and DOCUMENT_OF_TOKEN[key] == DOCUMENT_OF_TOKEN[query]
        assert (mask[query, key] == 0) == sees, (query, key)


def test_levels_of_hierarchical_groups_are_axes_of_the_grid():
    """parallel_state.py, hierarchical context-parallel groups of sizes 4 and 2 over ranks 0 to 7: neighbours, then
    strides of 4. Ours need no groups of another kind: a level is an axis of its own, here a ring of 4 context-parallel
    ranks and 2 copies of it."""
    layout = Layout(cp=4, dp=2)
    assert [layout.groups("cp"), layout.groups("dp")] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ]


@pytest.mark.parametrize("length", [8192, 4096, 2048, 1024, 512, 16])
def test_every_sequence_is_cut_over_the_same_ranks_and_none_of_them_waits(length):
    """hybrid_cp_schedule.py gives 8 GPUs groups of 2, 4 or 8 for samples of up to 8192 tokens (1 to 8 GPUs each, by
    length), packs samples of equal cost into them and fills GPUs that are left with wider groups. We differ on purpose:
    a rank's part of a sequence is a function of the layout alone, never of what else is in the batch, or the bits of a
    sample would depend on its neighbours. With the zig-zag cut, ranks need no packing to be equally busy: all have as
    many pairs of a query and a key it sees."""
    cp = 8
    positions = [context_positions(length, cp, cp_rank) for cp_rank in range(cp)]
    assert torch.cat(positions).sort().values.tolist() == list(range(length))
    assert (
        [len(own) for own in positions]
        == [Chunks(length, cp, cp_rank).num_own for cp_rank in range(cp)]
        == [length // cp] * cp
    )
    assert {int((own + 1).sum()) for own in positions} == {length * (length + 1) // 2 // cp}


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_norm_of_a_100_by_100_tensor_of_ones_is_100_however_it_is_cut(mode):
    """tests/unit_tests/test_utils.py, param_norm; with tensor parallelism theirs counts a cut tensor everywhere
    and a whole one once."""
    sizes, cpu = LeafSizes(Leaves(1, 1), Leaves(1, 1), Leaves(1, 1), 8, 4), torch.device("cpu")
    numerics = ExactNumerics(sizes, cpu) if mode == "exact" else FastNumerics(cpu)
    ones = torch.ones(100, 100)
    for parts in ([ones], ones.split(30), ones.split([1, 99], 1)):
        assert math.sqrt(float(numerics.sum_of_squares(parts))) == (
            100.0 if mode == "exact" else pytest.approx(100.0, rel=1e-14)
        )


def test_nothing_but_the_number_of_tokens_scales_a_loss(run_stage):
    """tests/unit_tests/pipeline_parallel/test_schedules.py: 3.0 becomes 3 * cp / m = 6.0 for cp=4 and m=2
    microbatches, or stays 3.0 where losses are summed per token. We differ on purpose: gradients are always sums
    over tokens, divided once by the tokens of the global batch, so two microbatches or six give the same gradients
    and there is nothing to scale back."""
    model = ModelSpec("tiny", 1, 24, 32, 2, 2, 8, 64, 32)
    six, two = run_stage(model, samples=6, micro=1), run_stage(model, samples=6, micro=3)
    assert six.loss == two.loss and all(torch.equal(six.gradients[name], two.gradients[name]) for name in six.gradients)
