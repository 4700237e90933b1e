"""Facts about Megatron-Core's tensor_parallel folder (NVIDIA/Megatron-LM d98e8a64) that an independent
implementation can be held to.

Each test names the source of its numbers. Where we differ on purpose, because theirs is a trap, the test
says so and shows the trap.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from helpers.plans import product_plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.numerics import ExactNumerics, FastNumerics, OwnedLeaves
from shardproof.backend.numerics.dropout import dropout_mask
from shardproof.backend.numerics.random import normal
from shardproof.backend.tensor_parallel import LayerContext, mappings, recomputed_layer
from shardproof.backend.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from shardproof.backend.tensor_parallel.data import TensorSpec, broadcast, context_part
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.leaves import LeafSizes, Leaves, leaf_sizes
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan

VOCABULARY = Leaves(128, 8)
SIZES = LeafSizes(Leaves(1, 1), Leaves(1, 1), VOCABULARY, 8, 4)
NUMERICS = {"exact": ExactNumerics(SIZES, torch.device("cpu")), "fast": FastNumerics(torch.device("cpu"))}

both_numerics = pytest.mark.parametrize("mode", NUMERICS)


def mappings_job(transport, mode):
    """World 8, tp 4: every rank brings its global rank."""
    layout = Layout(tp=4, dp=2)
    members = layout.group_of(transport.global_rank, "tp")
    group = transport.group(f"tp/{members[0]}", "tp", members)
    here = torch.full((3, 1), float(transport.global_rank))
    return mappings.reduce(here, group, NUMERICS[mode]), mappings.gather(here, group, dim=-1)


@both_numerics
def test_all_reduce_and_gather_in_two_groups_of_four(mode):
    """tests/unit_tests/tensor_parallel/test_mappings.py: sums of ranks are 6 and 22; gathered along the last
    dimension 0-3 and 4-7."""
    for global_rank, (total, gathered) in enumerate(run_threads(MemoryWorld(8, timeout_s=60), mappings_job, mode)):
        assert total.tolist() == [[6.0 if global_rank < 4 else 22.0]] * 3
        assert gathered.tolist() == [[0.0, 1.0, 2.0, 3.0] if global_rank < 4 else [4.0, 5.0, 6.0, 7.0]] * 3


def in_place_job(transport, _):
    group = transport.group("tp", "tp", range(transport.world_size))
    x = torch.ones(4)
    mappings.reduce(x, group, NUMERICS["fast"])
    return x.tolist()


def test_a_reduction_does_not_write_into_its_argument():
    """Trap in mappings.py: their all-reduce overwrites a contiguous input. We differ."""
    assert run_threads(MemoryWorld(2, timeout_s=60), in_place_job, None) == [[1.0] * 4] * 2


def cross_entropy_job(transport, mode):
    group = transport.group("tp", "tp", range(4))
    logits = torch.arange(8.0).repeat(4).expand(1, 4, 32).contiguous()
    targets = torch.tensor([[0, 2, 4, 6]])
    leaves = OwnedLeaves(VOCABULARY, 1, 4, group.rank)
    return vocab_parallel_cross_entropy(logits, targets, leaves=leaves, group=group, numerics=NUMERICS[mode])


@both_numerics
def test_cross_entropy_over_128_ids_on_4_ranks(mode):
    """tests/unit_tests/tensor_parallel/test_cross_entropy.py: ln(16 * sum of e^i below 8) = 10.230928348718786
    minus the target's logit."""
    log_sum = math.log(16 * sum(math.exp(i) for i in range(8)))
    assert log_sum == pytest.approx(10.230928348718786, abs=1e-14)
    for losses in run_threads(MemoryWorld(4, timeout_s=60), cross_entropy_job, mode):
        assert losses.tolist()[0] == pytest.approx([10.2309, 8.2309, 6.2309, 4.2309], abs=5e-5)
        assert losses.tolist()[0] == pytest.approx([log_sum - target for target in (0, 2, 4, 6)], rel=1e-6)


def test_vocabulary_ranges_of_1600_rows_over_8_ranks():
    """tests/unit_tests/tensor_parallel/test_tensor_parallel_utils.py: rank r has [200 r, 200 (r + 1))."""
    leaves = leaf_sizes(ModelSpec("gpt", 1, 64, 256, 8, 8, 8, 1600, 32), 32).vocab
    assert [OwnedLeaves(leaves, 1, 8, rank).items for rank in range(8)] == [
        (200 * rank, 200 * (rank + 1)) for rank in range(8)
    ]


def test_a_vocabulary_that_the_degree_does_not_divide_is_cut_between_leaves():
    """We differ: theirs must divide (layers.py, utils.py) and is padded for that."""
    leaves = leaf_sizes(ModelSpec("gpt", 1, 64, 256, 8, 8, 8, 1601, 32), 32).vocab
    ranges = [OwnedLeaves(leaves, 1, 8, rank).items for rank in range(8)]
    assert ranges[0][0] == 0 and ranges[-1][1] == 1601
    assert all(ours[1] == theirs[0] and ours[0] < ours[1] for ours, theirs in itertools.pairwise(ranges))


def megatron_seeds(seed: int, tp_rank: int, ep_rank: int, etp_rank: int) -> dict[str, int]:
    return {
        "data_parallel": seed,
        "model_parallel": seed + 2718 + tp_rank,
        "expert_parallel": seed + 1024 + 100 * ep_rank + etp_rank,
    }


def test_random_numbers_are_keyed_by_name_and_element_instead_of_seeds_per_rank():
    """random.py: data 1234, model 3953, expert 2259 for tp_rank 1, ep_rank 0, etp_rank 1. We differ on
    purpose: no rank has a seed.

    Theirs make weights and masks depend on the layout, and their seed spaces meet: expert rank 17 draws
    what tensor rank 6 draws.
    """
    assert megatron_seeds(1234, 1, 0, 1) == {"data_parallel": 1234, "model_parallel": 3953, "expert_parallel": 2259}
    assert megatron_seeds(1234, 6, 17, 0)["model_parallel"] == megatron_seeds(1234, 6, 17, 0)["expert_parallel"]

    whole = normal(1234, "layers.0.mlp.up.weight", (12, 8), (slice(0, 12), slice(0, 8)), 0.02)
    for tp in (2, 3, 4):
        cuts = [(slice(12 // tp * rank, 12 // tp * (rank + 1)), slice(0, 8)) for rank in range(tp)]
        assert torch.equal(
            torch.cat([normal(1234, "layers.0.mlp.up.weight", (12, 8), cut, 0.02) for cut in cuts]), whole
        )
    names = [
        "layers.0.mlp.up.weight",
        "layers.1.mlp.up.weight",
        *(f"layers.0.mlp.experts.{expert}" for expert in range(200)),
    ]
    draws = {tuple(normal(1234, name, (2, 4), (slice(0, 2), slice(0, 4)), 1.0).flatten().tolist()) for name in names}
    assert len(draws) == len(names)
    index = torch.arange(64)
    masks = {tuple(dropout_mask(1234, name, step, index, 0.5).tolist()) for name in names[:20] for step in range(3)}
    assert len(masks) == 60


def stored_activation_job(transport, _):
    group = transport.group("tp", "tp", range(2))
    context = LayerContext(distributing_plan(), tp=group, numerics=NUMERICS["exact"], recorder=transport.recorder)
    activation = torch.arange(16.0).view(4, 4).requires_grad_()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with context.running(Microbatch(0, 0, ids, ids)):
        y = recomputed_layer(context, 0, lambda x: x.square(), activation)
    (stored,) = y.grad_fn.saved_tensors
    y.sum().backward()
    return tuple(stored.shape), stored.untyped_storage().nbytes(), torch.equal(activation.grad, 2 * activation.detach())


def distributing_plan() -> Plan:
    model = ModelSpec("gpt", 1, 64, 256, 8, 8, 8, 1600, 32)
    return product_plan(tp=2, model=model, samples=1, sequence=4, recompute="full", distribute=True, mode="exact")


def test_a_saved_activation_of_4_by_4_spread_over_2_ranks_keeps_8_elements():
    """tests/unit_tests/tensor_parallel/test_random.py, distribute_saved_activations: the flattened
    input, one part per rank."""
    assert run_threads(MemoryWorld(2, timeout_s=60), stored_activation_job, None) == [((8,), 32, True)] * 2


def broadcast_job(transport, _):
    """Their trap in data.py: sizes end at the first 0, all keys have one dtype, and another group's sizes go
    over the default one."""
    members = (1, 2) if transport.global_rank in (1, 2) else (0, 3)
    group = transport.group(f"pair/{members[0]}", "tp", members)
    tensors = {
        "text": torch.tensor([[members[0], 7]]),
        "none": torch.empty(2, 0, 3),
        "mask": torch.tensor([True, False]),
    }
    found = broadcast(tensors if group.rank == 0 else None, group)
    return {name: (TensorSpec(tuple(each.shape), each.dtype), each.tolist()) for name, each in found.items()}


def test_a_batch_of_mixed_dtypes_and_an_empty_dimension_arrives_in_any_group():
    """tensor_parallel/data.py, whose traps we avoid: zero-sized dimensions, dtypes and groups are all
    as the caller has them."""
    for global_rank, found in enumerate(run_threads(MemoryWorld(4, timeout_s=60), broadcast_job, None)):
        assert found["text"] == (TensorSpec((1, 2), torch.int64), [[1 if global_rank in (1, 2) else 0, 7]])
        assert found["none"] == (TensorSpec((2, 0, 3), torch.float32), [[], []])
        assert found["mask"] == (TensorSpec((2,), torch.bool), [True, False])


def test_16_tokens_over_2_context_ranks():
    """tests/unit_tests/data/test_get_batch.py: rank r of cp takes chunks r and 2cp - 1 - r."""
    tokens = torch.arange(16).unsqueeze(0)
    parts = [context_part(tokens, 2, rank)[0].tolist() for rank in range(2)]
    assert parts == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


def reduce_scatter_job(transport, _):
    group = transport.group("tp", "tp", range(transport.world_size))
    own = torch.randn(4, 30, generator=torch.Generator().manual_seed(group.rank)).bfloat16() / 2**3
    narrow = mappings.reduce_scatter(own, group, NUMERICS["exact"], dim=1)
    wide = mappings.reduce_scatter(own.float(), group, NUMERICS["exact"], dim=1)
    return narrow, wide, torch.stack(group.all_gather(own))


def test_a_bf16_reduce_scatter_is_the_fp32_one_rounded_once():
    """tests/unit_tests/distributed/test_reduce_scatter_with_fp32_accumulation.py: equal to the cast of the fp32
    sum, unlike a bf16 sum."""
    differing = 0
    for rank, (narrow, wide, everyone) in enumerate(
        run_threads(MemoryWorld(5, timeout_s=60), reduce_scatter_job, None)
    ):
        assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide.bfloat16())
        one_by_one = everyone[0]
        for other in everyone[1:]:
            one_by_one = one_by_one + other
        differing += int((narrow != one_by_one[:, 6 * rank : 6 * (rank + 1)]).sum())
    assert differing > 10
