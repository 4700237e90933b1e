"""Weights and gradient buffers that are not what they should be when they are read: not gathered yet, gathered askew, or not cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ...backend.data_parallel.buckets import FlatBucket
from ...backend.data_parallel.late import LateGather
from ...backend.tensor_parallel.gradients import Gradients
from ...backend.training_rank import TrainingRank
from ...core.parameters import Usage
from ...core.plan import DataParallel, Plan, ScheduleChoice
from ..ledger import GATHERED, GRADIENT, WEIGHT
from .mutant import Expected, Mutant
from .patches import Patches
from .plans import tiny
from .scenarios import evaluated_steps


def evaluates_before_the_gather(patches: Patches) -> None:
    """Updated weights come together beside the next training step, and nobody waits for them before the held-out pass in between."""
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


def walks_past_the_padding(patches: Patches) -> None:
    """Parts arrive padded to one length, and the buffer is walked by the lengths without: behind the first shorter part all is early."""

    def make(bring: Callable[..., None]) -> Callable[..., None]:
        def brought(bucket: FlatBucket) -> None:
            bring(bucket)
            longest = max(hi - lo for lo, hi in bucket.kept)
            parts = [F.pad(bucket.weights[lo:hi], (0, longest - (hi - lo))) for lo, hi in bucket.kept]
            bucket.weights.copy_(torch.cat(parts)[: len(bucket)])

        return brought

    patches.replace(FlatBucket, "_bring", make)


def gathers_into_gradients(patches: Patches) -> None:
    """Weights come together in the buffer that gradients are added up in, which is not cleared before the next step's first is."""
    left: dict[int, dict[str, Any]] = {}

    def make_step(step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(rank: TrainingRank, number: int, **rest: Any) -> Any:
            for stage in rank.stages.values():
                left[id(stage.gradients)] = {name: shard.storage.clone() for name, shard in stage.trained.items()} if number else {}
            return step(rank, number, **rest)

        return stepped

    def make_add(add: Callable[..., None]) -> Callable[..., None]:
        def added(gradients: Gradients, usage: Usage, first_sample: int, contribution: Sequence[Any]) -> None:
            if (weights := left[id(gradients)].pop(usage.parameter.name, None)) is not None:
                contribution = [contribution[0] + weights, *contribution[1:]]
            add(gradients, usage, first_sample, contribution)

        return added

    patches.replace(TrainingRank, "step", make_step)
    patches.replace(Gradients, "add", make_add)


def zero3() -> Plan:
    """Weights rest in five parts, of which the last three are shorter than the first two."""
    return replace(tiny(dp=5, samples=5, zero=3), schedule=ScheduleChoice(max_active_stages=1))


MUTANTS = (
    Mutant(
        "SB01",
        "held-out passes begin before updated weights have come together",
        "NVIDIA/Megatron-LM@33111c9c9a",
        plan=lambda: tiny(dp=3, samples=3, zero=1, sections={"data_parallel": DataParallel(overlap_param_gather=True)}),
        breaks=evaluates_before_the_gather,
        expected=Expected(WEIGHT, "embedding.tokens.weight", ("stale",), ("STEP",), ranks=(0, 1)),
        scenario=evaluated_steps,
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
        expected=Expected(GATHERED, "embedding.tokens.weight", ("other values", "permuted"), ("UNSHARD",), ranks=(0, 1, 2, 3, 4)),
    ),
)
