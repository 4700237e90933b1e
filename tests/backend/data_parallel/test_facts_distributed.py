"""Facts about Megatron-Core's data parallelism (NVIDIA/Megatron-LM d98e8a64, `distributed/`), held to ours.

Where we differ on purpose the test says so and why.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.plans import product_plan
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.stage_parameters import Usage, stage_usages
from shardproof.core.model.parameters import TOKEN_TABLE, Parameter
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics
from shardproof.core.program.buckets import bucket_sizes, filled_buckets, gradient_buckets, owned_interval
from shardproof.core.schedule.action import Kind


def tiny(layout: Layout, *, samples=4, mode="fast", tied=True, **data_parallel) -> Plan:
    return product_plan(
        layout,
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=2,
        ffn_hidden_size=32,
        tied_embeddings=tied,
        samples=samples,
        sequence=16,
        dtype="fp32",
        mode=mode,
        **data_parallel,
        steps=2,
    )


@pytest.mark.parametrize(
    ("elements", "numbers"),
    [(9000, [1] * 10), (9025, [1] * 10), (9050, [2] * 5), (18000, [2] * 5), (18050, [2] * 5), (20000, [3, 3, 3, 1])],
)
def test_a_bucket_closes_with_the_parameter_that_fills_it(elements, numbers):
    """test_param_and_grad_buffer.py::test_bucket_sizes, ten parameters of 95 x 95 elements; theirs start a parameter at
    a multiple of 64 elements, so two of them have 9088 + 9025."""
    plan = tiny(Layout(dp=8), samples=8, bucket_bytes=4 * elements)
    usages = [Usage(Parameter(f"p{index}", (95, 95))) for index in range(10)]
    assert [len(each) for _, each in filled_buckets(plan, usages)] == numbers


def test_parameters_lie_in_reverse_order_one_behind_the_other():
    """test_param_layout.py: the last parameter lies first. Theirs pad every start to 64 elements and every end to
    lcm(dp, 128), for parts of one length. Ours differ on purpose: copies keep parts that differ by an element at most,
    so nothing is padded, saved or counted in the norm beyond the parameters themselves."""
    plan = tiny(Layout(dp=3, zero=1), samples=3, tied=False, bucket_bytes=3000)
    laid = [usage.parameter.name for bucket in gradient_buckets(plan, 0) for usage in bucket.usages]
    assert laid == [usage.parameter.name for usage in reversed(stage_usages(plan.model, plan.stages[0]))]
    for bucket, size in zip(gradient_buckets(plan, 0), bucket_sizes(plan, 0, 0), strict=True):
        lengths = [hi - lo for lo, hi in (owned_interval(size.elements, 3, 1, copy) for copy in range(3))]
        assert sum(lengths) == sum(usage.parameter.num_elements for usage in bucket.usages)
        assert max(lengths) - min(lengths) <= 1


def test_a_shared_table_has_buckets_of_its_own():
    """test_param_layout.py, shared_embedding: so that first and last stage, which add up its two
    sums, cut them in the same way."""
    for stages, roles in (([0, 1], ["embedding", "output"]), ([0, 0], ["output", "embedding"])):
        plan = tiny(Layout(pp=2 if stages[1] else 1, dp=2, zero=1))
        tables = [
            bucket
            for stage in sorted(set(stages))
            for bucket in gradient_buckets(plan, stage)
            if TOKEN_TABLE in bucket.name
        ]
        assert [each.name for each in tables] == [f"{TOKEN_TABLE}@{role}" for role in roles]
        assert all(len(each.usages) == 1 for each in tables)


def spans_of(transport, plan):
    return TrainingRank(transport, plan).step(0)[1]


@pytest.mark.parametrize("samples", [2, 6])
def test_gradients_are_reduced_once_in_a_step_after_the_last_microbatch_whatever_their_number(samples):
    """grad_sync_events, schedules.py: gradients accumulate inside `no_sync`, and the last backward, which with one
    microbatch is the first, runs outside of it. Ours have no such switch to forget: REDUCE_GRAD is one action of the
    row, behind every weight gradient."""
    for spans in run_threads(MemoryWorld(2, timeout_s=60), spans_of, tiny(Layout(dp=2), samples=samples)):
        kinds = [span.action.kind for span in sorted(spans, key=lambda span: span.start_s)]
        assert kinds.count(Kind.B) == samples // 2 and kinds.count(Kind.REDUCE_GRAD) == 1
        assert kinds.index(Kind.REDUCE_GRAD) > max(index for index, kind in enumerate(kinds) if kind is Kind.B)


def gradients_of(transport, plan):
    """The finished gradients of a step, before they are divided and clipped, by name."""
    rank, seen = TrainingRank(transport, plan), {}
    update = rank.optimizer.step
    rank.optimizer.step = lambda gradients, coefficient, skip: (
        seen.update(zip((one.name for one in rank.optimizer.held), [each.clone() for each in gradients], strict=True)),
        update(gradients, coefficient),
    )
    rank.step(0)
    return seen


@pytest.mark.parametrize(("micro", "layout"), [(2, Layout()), (4, Layout()), (1, Layout(cp=2)), (1, Layout(dp=4))])
def test_gradients_are_means_over_tokens_and_no_count_of_microbatches_or_ranks_enters(micro, layout):
    """loss_scale, schedules.py: theirs multiply what a layer adds to the loss by cp / microbatches (3.0 * 4 / 2 = 6.0),
    or with a loss per token by nothing. Ours are sums over tokens that STEP divides once, so that there is no such
    factor, nor pre-scaling by 1 / dp: the bits of the gradients are the same."""
    blocks = Numerics("exact", gradient_token_block=4, reduction_token_block=4)
    one = replace(tiny(Layout()), numerics=blocks)
    plan = replace(tiny(layout), numerics=blocks, batch=Batch(4, micro, 16))
    (wanted,) = run_threads(MemoryWorld(1, timeout_s=60), gradients_of, one)
    for found in run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), gradients_of, plan):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
