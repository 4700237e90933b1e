"""Weights and gradient buffers that are not what they should be when they are read: not gathered yet, gathered
askew, or not cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ...backend.data_parallel.buckets import FlatBucket
from ...backend.data_parallel.late import LAST, LateGather, _shared
from ...backend.gradients.gradients import Gradients
from ...backend.ranks.training_rank import TrainingRank
from ...core.layout.stage_parameters import Usage
from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel, ScheduleChoice
from ..ledger.ledger import GATHERED, GRADIENT, WEIGHT
from .mutant import Expected, Mutant
from .mutants_more import OURS
from .patches import Function, Patches
from .plans import tiny


def evaluates_before_the_gather(patches: Patches) -> None:
    """Updated weights are gathered during the next training step, and nobody waits for them before the
    held-out pass in between."""
    held: dict[int, list[FlatBucket]] = {}

    def make_start(start: Callable[..., None]) -> Callable[..., None]:
        def later(late: LateGather, buckets: Iterable[FlatBucket]) -> None:
            held[id(late)] = list(buckets)

        return later

    def make_wait(wait_for: Callable[..., None]) -> Callable[..., None]:
        def wait(late: LateGather, part: str) -> None:
            if torch.is_grad_enabled() and id(late) in held:
                start(late, held.pop(id(late)))
            wait_for(late, part)

        return wait

    start = LateGather.start
    patches.replace(LateGather, "wait_for", make_wait)
    patches.replace(LateGather, "start", make_start)
    patches.replace(TrainingRank, "settle", lambda settle: lambda rank: None)


def trains_before_the_gather(forgotten: Sequence[str], patches: Patches) -> None:
    """A training forward does not wait for the updated weights of some parts. They come when somebody does: another
    part that has weights in their bucket, a held-out pass, the next update, the end of training."""
    held: dict[int, list[FlatBucket]] = {}

    def make_start(start: Callable[..., None]) -> Callable[..., None]:
        def later(late: LateGather, buckets: Sequence[FlatBucket]) -> None:
            waiting = [each for each in buckets if each.parts & set(forgotten)]
            start(late, [each for each in buckets if each not in waiting])
            held[id(late)] = waiting

        return later

    def make_wait(wait_for: Callable[..., None]) -> Callable[..., None]:
        def wait(late: LateGather, part: str) -> None:
            if part in forgotten and torch.is_grad_enabled():
                return
            needed = [each for each in held.get(id(late), []) if part in each.parts or part == LAST]
            for each in needed:
                held[id(late)].remove(each)
                late._under_way.append((each.parts, late._lane.start(_shared(each), each.updated)))
            wait_for(late, part)

        return wait

    def make_finish(finish: Callable[..., None]) -> Callable[..., None]:
        def finished(late: LateGather) -> None:
            with torch.no_grad():
                finish(late)

        return finished

    patches.replace(LateGather, "wait_for", make_wait)
    patches.replace(LateGather, "start", make_start)
    patches.replace(LateGather, "finish", make_finish)


def walks_past_the_padding(patches: Patches) -> None:
    """Parts arrive padded to one length, and the buffer is walked by the lengths without: behind the first
    shorter part all is early."""

    def make(bring: Callable[..., None]) -> Callable[..., None]:
        def brought(bucket: FlatBucket) -> None:
            bring(bucket)
            longest = max(hi - lo for lo, hi in bucket.owned)
            parts = [F.pad(bucket.weights[lo:hi], (0, longest - (hi - lo))) for lo, hi in bucket.owned]
            bucket.weights.copy_(torch.cat(parts)[: len(bucket)])

        return brought

    patches.replace(FlatBucket, "_bring", make)


def gathers_into_gradients(patches: Patches) -> None:
    """Weights come together in the buffer that gradients are added up in, which is not cleared before the
    next step's first is."""
    left: dict[int, dict[str, Any]] = {}

    def make_step(step: Function) -> Function:
        def stepped(rank: TrainingRank, number: int, **rest: object) -> object:
            for stage in rank.stages.values():
                left[id(stage.gradients)] = (
                    {name: shard.storage.clone() for name, shard in stage.trained.items()} if number else {}
                )
            return step(rank, number, **rest)

        return stepped

    def make_add(add: Callable[..., None]) -> Callable[..., None]:
        def added(gradients: Gradients, usage: Usage, first_sample: int, contribution: Sequence[object]) -> None:
            if (weights := left[id(gradients)].pop(usage.parameter.name, None)) is not None:
                contribution = [contribution[0] + weights, *contribution[1:]]
            add(gradients, usage, first_sample, contribution)

        return added

    patches.replace(TrainingRank, "step", make_step)
    patches.replace(Gradients, "add", make_add)


def zero3() -> Plan:
    """Weights rest in five parts, of which the last three are shorter than the first two."""
    return replace(tiny(dp=5, samples=5, zero=3), schedule=ScheduleChoice(max_active_stages=1))


def late_plan(bucket_bytes: int | None = None) -> Plan:
    """Updated weights are gathered during the next forward."""
    return tiny(
        dp=3,
        samples=3,
        zero=1,
        sections={"data_parallel": DataParallel(overlap_param_gather=True, bucket_bytes=bucket_bytes)},
    )


MUTANTS = (
    Mutant(
        "SB01",
        "held-out passes begin before updated weights have come together",
        "NVIDIA/Megatron-LM@33111c9c9a",
        plan=late_plan,
        breaks=evaluates_before_the_gather,
        expected=Expected(WEIGHT, "embedding.tokens.weight", ("stale",), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "SB02",
        "gradients of a step begin with the weights that came together in their buffer",
        "NVIDIA/Megatron-LM#4609",
        plan=lambda: tiny(dp=3, samples=3, zero=1),
        breaks=gathers_into_gradients,
        expected=Expected(GRADIENT, "head.output.weight", ("other values",), ("REDUCE_GRAD",), step=2),
    ),
    Mutant(
        "SB05",
        "parts of weights come together by padded lengths and are cut by lengths without padding",
        "deepspeedai/DeepSpeed#8158",
        plan=zero3,
        breaks=walks_past_the_padding,
        expected=Expected(
            GATHERED, "embedding.tokens.weight", ("other values", "permuted"), ("UNSHARD",), ranks=(0, 1, 2, 3, 4)
        ),
    ),
    Mutant(
        "XX32",
        "a training forward does not wait for updated weights",
        OURS,
        plan=late_plan,
        breaks=partial(trains_before_the_gather, ("embedding", "layers.0", "layers.1", LAST)),
        expected=Expected(WEIGHT, "embedding.tokens.weight", ("stale",), ("STEP",), ranks=(0, 1), step=2),
        steps=3,
    ),
    Mutant(
        "XX32-b",
        "a training forward does not wait for the updated weights of its second layer",
        OURS,
        plan=lambda: late_plan(bucket_bytes=2000),
        breaks=partial(trains_before_the_gather, ("layers.1",)),
        expected=Expected(WEIGHT, "layers.1.*", ("stale",), ("STEP",), step=2),
        steps=3,
    ),
)
