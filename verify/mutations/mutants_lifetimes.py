"""Buffers that are read before they are full, or used again while somebody still reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend.gradients.gradients import Gradients
from ...backend.numerics import exact
from ...backend.pipeline.messages import Mail
from ...backend.transport.base import Channel
from ...core.layout.stage_parameters import Usage
from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel
from ...core.program.buckets import Bucket
from ...core.schedule.action import Action, Kind
from ..ledger.ledger import ACTIVATION, GRADIENT
from .mutant import Expected, Mutant
from .patches import Function, Patches, on_ranks, rank_here
from .plans import tiny

if TYPE_CHECKING:
    from ...backend.transport.base import Group

BUCKETS = DataParallel(bucket_bytes=2000, overlap_grad_reduce=True)
"""Reduced while the last backward goes on; the output head is the first."""

FIRST = "head.output.weight"
"""All of the first bucket."""


def loses_an_addition(key: str, first_samples: Sequence[int], global_rank: int, patches: Patches) -> None:
    """What a microbatch adds to a gradient on a rank comes while the reduction reads, and is not in what was read."""
    here = on_ranks(global_rank)

    def make(add: Callable[..., None]) -> Callable[..., None]:
        def added(gradients: Gradients, usage: Usage, first_sample: int, contribution: Sequence[Tensor]) -> None:
            if usage.key == key and first_sample in first_samples and here():
                contribution = [torch.zeros_like(each) for each in contribution]
            add(gradients, usage, first_sample, contribution)

        return added

    patches.replace(Gradients, "add", make)


def refills_the_bucket(patches: Patches) -> None:
    """A rank fills its buffer with the second bucket before the first has left."""
    following: dict[int, list[Tensor]] = {}

    def make_begin(begin: Callable[..., None]) -> Callable[..., None]:
        def begun(gradients: Gradients, bucket: Bucket, keys: Sequence[str], tp: Group) -> None:
            begin(gradients, bucket, keys, tp)
            if rank_here() == 1 and FIRST in keys:
                second, second_keys = gradients._buckets[1]
                gradients._wait(second)
                following[1] = [node for key in second_keys for node in [torch.stack(list(gradients._sums[key].held))]]

        return begun

    def make_over_samples(over_samples: Function) -> Function:
        def over(trees: Any, group: Any, samples_of: Any) -> Any:
            values, *rest = over_samples(trees, group, samples_of)
            if rank_here() == 1 and FIRST in trees:
                refill = torch.cat([each.flatten(1) for each in following.pop(1)], 1)[:, : values.shape[1]]
                values[:, : refill.shape[1]] = refill
            return values, *rest

        return over

    patches.replace(Gradients, "_begin", make_begin)
    patches.replace(exact, "_over_samples", make_over_samples)


def frees_the_buffer(becomes: float, first_call: int, patches: Patches) -> None:
    """A rank lets go of the buffer of the first bucket as soon as it was handed over, and from some call on
    others write into it."""
    calls: list[int] = []

    def make(over_samples: Function) -> Function:
        def over(trees: Any, group: Any, samples_of: Any) -> Any:
            values, *rest = over_samples(trees, group, samples_of)
            if rank_here() == 1 and FIRST in trees:
                calls.append(1)
                if len(calls) >= first_call:
                    values.fill_(becomes)
            return values, *rest

        return over

    patches.replace(exact, "_over_samples", make)


def frees_partial_sums(patches: Patches) -> None:
    """Between the sum inside a group of shards and that over the groups, a rank's partial sums are overwritten."""

    def make(sum_over: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def over(group: Group, values: Tensor, *rest: object) -> Tensor:
            if group.axis.endswith("replicate") and rank_here() == 2:
                values = torch.zeros_like(values)
            return sum_over(group, values, *rest)

        return over

    patches.replace(exact, "sum_over", make)


def exchanges_slots(patches: Patches) -> None:
    """The list of what lies in a bucket is off by one for two gradients of one size: each is taken for the other."""

    def make(reduce_in: Callable[..., None]) -> Callable[..., None]:
        def reduce(gradients: Gradients, buckets: Sequence[tuple[Bucket, Sequence[str]]]) -> None:
            one, other = "layers.1.mlp.norm.weight", "layers.1.attention.norm.weight"
            swapped = {one: other, other: one}
            reduce_in(gradients, [(bucket, [swapped.get(key, key) for key in keys]) for bucket, keys in buckets])

        return reduce

    patches.replace(Gradients, "reduce_in", make)


def sends_freed_memory(patches: Patches) -> None:
    """The output of the second microbatch is let go of before its send has ended, and the third
    microbatch's is written there."""
    outputs: dict[int, Tensor] = {}
    written = threading.Event()
    sent: list[int] = []

    def make_put(put: Callable[..., None]) -> Callable[..., None]:
        def putting(mail: Mail, action: Action, tensor: Tensor) -> None:
            if action.kind is Kind.SEND_F and rank_here() == 0:
                assert action.microbatch is not None
                outputs[action.microbatch] = tensor
                if action.microbatch == 2:
                    outputs[1].copy_(tensor)
                    written.set()
            put(mail, action, tensor)

        return putting

    def make_send(send: Callable[..., None]) -> Callable[..., None]:
        def sending(channel: Channel, tensor: Tensor) -> None:
            if channel.name.startswith("F/") and rank_here() == 0:
                sent.append(1)
                if len(sent) % 4 == 2:
                    written.wait(timeout=10)
                    written.clear()
            send(channel, tensor)

        return sending

    patches.replace(Mail, "put", make_put)
    patches.replace(Channel, "send", make_send)


def bucketed(zero: int = 0) -> Plan:
    """Two microbatches on each of three ranks."""
    return tiny(dp=3, samples=6, zero=zero, sections={"data_parallel": BUCKETS})


MUTANTS = (
    Mutant(
        "RC01",
        "the reduction of a bucket waits on the wrong stream and reads it before the last microbatch",
        "NVIDIA/Megatron-LM#3693",
        plan=bucketed,
        breaks=partial(loses_an_addition, FIRST, (3,), 1),
        expected=Expected(GRADIENT, FIRST, ("missing",), ("REDUCE_GRAD",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "RC03",
        "a bucket is filled again before its reduction has ended",
        "deepspeedai/DeepSpeed#5606",
        plan=lambda: bucketed(zero=1),
        breaks=refills_the_bucket,
        expected=Expected(GRADIENT, FIRST, ("other values",), ("REDUCE_GRAD",), ranks=(0,)),
    ),
    Mutant(
        "RC04",
        "the buffer of a reduction is freed at once, and is no numbers from the second step on",
        "deepspeedai/DeepSpeed#7965",
        plan=lambda: bucketed(zero=2),
        breaks=partial(frees_the_buffer, float("nan"), 2),
        expected=Expected(GRADIENT, FIRST, ("not finite",), ("REDUCE_GRAD",), step=2),
        steps=3,
    ),
    Mutant(
        "RC04-b",
        "the buffer of a reduction is freed at once, and zeroed by whoever has it next",
        "deepspeedai/DeepSpeed#7965",
        plan=lambda: bucketed(zero=2),
        breaks=partial(frees_the_buffer, 0.0, 2),
        expected=Expected(GRADIENT, FIRST, ("missing",), ("REDUCE_GRAD",), step=2),
    ),
    Mutant(
        "RC05",
        "an output is freed before its send has ended, and holds the next microbatch's",
        "NVIDIA/Megatron-LM#4047",
        plan=lambda: tiny(pp=3, schedule="GPipe"),
        breaks=sends_freed_memory,
        expected=Expected(ACTIVATION, "layers.1.attention.norm", ("permuted",), ("F",), ranks=(1,)),
    ),
    Mutant(
        "RC08",
        "partial sums of a hybrid sharding are overwritten before they are added over its groups",
        "NVIDIA/Megatron-LM#6187",
        plan=lambda: tiny(dp=4, zero=2, sections={"data_parallel": DataParallel(shard=2)}),
        breaks=frees_partial_sums,
        expected=Expected(GRADIENT, FIRST, ("missing",), ("REDUCE_GRAD",), ranks=(0, 2)),
    ),
    Mutant(
        "RC10",
        "an addition to a bucket and its reduction run at once, and one microbatch is lost",
        "hpcaitech/ColossalAI#4404",
        plan=lambda: bucketed(zero=1),
        breaks=partial(loses_an_addition, "layers.0.mlp.up.weight", (5,), 2),
        expected=Expected(GRADIENT, "layers.0.mlp.up.weight", ("missing",), ("REDUCE_GRAD",)),
    ),
    Mutant(
        "RC10-b",
        "two gradients are taken from each other's place in a bucket",
        "hpcaitech/ColossalAI#4404",
        plan=lambda: bucketed(zero=1),
        breaks=exchanges_slots,
        expected=Expected(GRADIENT, "layers.1.mlp.norm.weight", ("permuted",), ("REDUCE_GRAD",)),
    ),
)
