"""What our own backend holds with ZeRO besides weights, sums and optimizer state: buckets on their way to the ranks
that keep parts of them.

Gradients of a bucket are copied into what is sent, one part for each rank; updated weights arrive next to what was sent
and go into their place (`backend.numerics.fast.FastNumerics.scattered`, `backend.data_parallel.buckets.FlatBucket`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.plan.plan import Plan
from ...core.program import num_copies, num_shards, weight_bytes
from ...core.program.buckets import (
    BucketSize,
    bucket_sizes,
    gathered_sizes,
    sums_are_sharded,
    waits_for_parts,
)

FP32_BYTES = 4

EXACT_SENT = 2
"""Copies of a bucket's sums that exact numerics hold besides them while they are reduced: by node, and what arrives."""

GATHERED = 2
"""Copies of a bucket's weights that a gather holds besides them: what is sent to all, and what arrives."""


def sharded_reduce_bytes(plan: Plan, stage: int, gradients_bytes: int) -> int:
    """What REDUCE_GRAD of a stage holds besides `gradients_bytes` of sums."""
    sizes = bucket_sizes(plan, stage, 0)
    if sums_are_sharded(plan):  # nothing is left but what waited, and copies that keep equal parts
        waited = sum(2 * FP32_BYTES * each.elements for each in sizes if waits_for_parts(plan, each.layer))
        replicated = num_shards(plan, stage) != num_copies(plan, stage)
        return waited + (max((_part(plan, stage, each) for each in sizes), default=0) if replicated else 0)
    most = done = 0
    left = sum(FP32_BYTES * each.elements for each in sizes)
    for each in sizes:
        part = _part(plan, stage, each)
        sent = (
            FP32_BYTES * each.elements + part
            if plan.numerics.mode == "fast"
            else EXACT_SENT * FP32_BYTES * each.elements
        )
        most = max(most, done + left + sent)
        left, done = left - FP32_BYTES * each.elements, done + part
    return max(0, most - gradients_bytes)


def gathering_bytes(plan: Plan, stage: int) -> int:
    """What UNSHARD of a stage holds besides the weights that it brings."""
    width = weight_bytes(plan.precision.dtype)
    return max(
        (_gathered(plan, stage, each) * width // FP32_BYTES for each in gathered_sizes(plan, stage, 0)), default=0
    )


def backward_bytes(plan: Plan, stage: int, tape_bytes: int) -> int:
    """The most of a backward that takes `tape_bytes` without gradients, where these are reduced after every microbatch:
    with several buckets one waits meanwhile; in the end there are those of the bucket that goes and of those that come
    after it, what is sent, and what comes of it."""
    if not sums_are_sharded(plan):
        return tape_bytes
    sizes = bucket_sizes(plan, stage, 0)
    numbered = [each for each in sizes if each.layer.startswith("bucket.")]
    others = sum(each.elements for each in sizes if each not in numbered)
    held = [each.elements + others for each in numbered] + [others]
    largest = max(sizes, key=lambda each: each.elements, default=BucketSize("", 0))
    waits = max((each.elements for each in numbered), default=0)
    return max(
        tape_bytes + FP32_BYTES * waits, FP32_BYTES * (max(held) + largest.elements) + _part(plan, stage, largest)
    )


def sharded_step_bytes(plan: Plan, stages: Sequence[int], gradients_bytes: int, *, tied_bytes: int) -> int:
    """The most that STEP holds besides `gradients_bytes`: the parts of the sums, and while they are still there what a
    tied table's sum needs, then weights that come together."""
    reduced = sum(_part(plan, stage, each) for stage in stages for each in bucket_sizes(plan, stage, 0))
    weights = [(stage, each) for stage in stages for each in gathered_sizes(plan, stage, 0)]
    held = sum(_part(plan, stage, each) for stage, each in weights)
    gathered = 0
    if plan.layout.zero < 3:
        width = weight_bytes(plan.precision.dtype)
        gathered = max((_gathered(plan, stage, each) * width // FP32_BYTES for stage, each in weights), default=0)
    return max(0, max(reduced + tied_bytes, held + gathered) - gradients_bytes)


def _gathered(plan: Plan, stage: int, size: BucketSize) -> int:
    """Bytes besides a bucket of fp32 weights while it comes together."""
    alone = num_shards(plan, stage)[size.is_expert] == 1
    return 0 if alone else GATHERED * FP32_BYTES * size.elements + _part(plan, stage, size)


def _part(plan: Plan, stage: int, size: BucketSize) -> int:
    return FP32_BYTES * -(-size.elements // num_shards(plan, stage)[size.is_expert])
