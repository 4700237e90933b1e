"""Gradients of several microbatches that are lost, kept too long or added at the wrong time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend.gradients.gradients import Gradients
from ...backend.numerics.exact import ExactNumerics
from ...backend.numerics.exact_gradients import ExactAccumulator
from ...backend.ranks.gradient_sums import GradientSums
from ...core.base.reduction import cut
from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel
from ..ledger.ledger import GRADIENT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import tiny

if TYPE_CHECKING:
    from ...backend.numerics.contributions import Contribution
    from ...backend.numerics.copies import Copies
    from ...backend.transport.base import Group

SAMPLES = 6
HEAD_BYTES = 259 * 24 * 4
"""The output projection of `plans.DENSE`."""


def zero_plan() -> Plan:
    """Three copies that keep a part of every sum, two microbatches each."""
    return tiny(dp=3, samples=SAMPLES, zero=1)


def whole_plan() -> Plan:
    """Three copies that keep everything, two microbatches each."""
    return tiny(dp=3, samples=SAMPLES)


def one_bucket_each_plan() -> Plan:
    """As `whole_plan`, reduced in buckets, the first of which the output projection fills to the byte."""
    return tiny(dp=3, samples=SAMPLES, sections={"data_parallel": DataParallel(bucket_bytes=HEAD_BYTES)})


def keeps_the_first_microbatch(patches: Patches) -> None:
    """Only the first microbatch of a step enters the sum."""

    def add(original: Function) -> Function:
        def added(self: Any, first_sample: int, contribution: Any) -> None:
            if self.tree.nodes:
                contribution = [value.zero_() for value in contribution]
            original(self, first_sample, contribution)

        return added

    patches.replace(ExactAccumulator, "add", add)


def keeps_the_last_microbatch(patches: Patches) -> None:
    """Every microbatch overwrites the sum."""

    def add(original: Function) -> Function:
        def added(self: ExactAccumulator, first_sample: int, contribution: Contribution) -> None:
            for held in self.held:
                held.zero_()
            original(self, first_sample, contribution)

        return added

    patches.replace(ExactAccumulator, "add", add)


def adds_the_last_after_the_reduction(patches: Patches) -> None:
    """The last microbatch of a step is added when the sum over ranks is done: it stays on its rank."""
    aside: dict[int, list[Tensor]] = {}

    def add(original: Function) -> Function:
        def added(self: Any, first_sample: int, contribution: Any) -> None:
            if self.tree.nodes:
                aside[id(self)] = [value.clone() for value in contribution]
                contribution = [value.zero_() for value in contribution]
            original(self, first_sample, contribution)

        return added

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: Any, copies: Copies, samples_of: Callable[[int], tuple[int, int]]
        ) -> Tensor:
            late = torch.cat([value.reshape(-1) for each in gradients.values() for value in aside.pop(id(each))])
            return (
                original(self, gradients, copies, samples_of)
                + late[slice(*cut(len(late), copies.shard.size, copies.shard.rank))]
            )

        return reduced

    patches.replace(ExactAccumulator, "add", add)
    patches.replace(ExactNumerics, "reduce_gradients_part", reduce)


def adds_a_shared_dummy(patches: Patches) -> None:
    """The gradient of one weight is a placeholder that is never cleared, and is added: it still
    holds the other layer's."""
    name, other = "layers.0.mlp.up.weight", "layers.1.mlp.up.weight"

    def add(original: Function) -> Function:
        dummies: dict[int, list[Tensor]] = {}

        def added(self: Any, usage: Any, first_sample: int, contribution: Any) -> None:
            if usage.parameter.name == other:
                dummies[id(self)] = [value.clone() for value in contribution]
            if usage.parameter.name == name:
                contribution = [value + dummy for value, dummy in zip(contribution, dummies[id(self)], strict=True)]
            original(self, usage, first_sample, contribution)

        return added

    patches.replace(Gradients, "add", add)


def reduces_every_microbatch(patches: Patches) -> None:
    """Ranks add their gradients after every microbatch, and each adds up the sums."""

    def reduce(original: Function) -> Function:
        def reduced(self: object, gradients: Any, group: Any, samples_of: object) -> Any:
            totals: dict[str, Tensor] = {}
            for microbatch in zip(*(owned.pop(id(each)) for each in gradients.values()), strict=True):
                for name, value in zip(gradients, microbatch, strict=True):
                    over_ranks = torch.stack(group.all_gather(value)).sum(0)
                    totals[name] = totals[name] + over_ranks if name in totals else over_ranks
            return totals

        return reduced

    owned: dict[int, list[Tensor]] = {}

    def add(original: Function) -> Function:
        def added(self: Any, first_sample: int, contribution: Any) -> None:
            owned.setdefault(id(self), []).extend(value.clone() for value in contribution)
            original(self, first_sample, contribution)

        return added

    patches.replace(ExactAccumulator, "add", add)
    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def own_sums(gradients: Any, names: Any) -> dict[str, Tensor]:
    """What a rank itself has of some gradients."""
    return {name: sum(held.clone() for held in gradients[name].held) for name in gradients if name in names}


def never_reduces(patches: Patches) -> None:
    """The loop over gradients passes over those that it should reduce."""

    def reduce(original: Function) -> Function:
        return lambda self, gradients, group, samples_of: own_sums(gradients, gradients)

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def passes_over_full_buckets(patches: Patches) -> None:
    """A gradient exactly as large as a bucket fits neither the test for buckets nor that for single gradients."""

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: Any, group: Group, samples_of: Callable[[int], tuple[int, int]]
        ) -> object:
            full = [name for name, each in gradients.items() if each.held[0].nbytes == HEAD_BYTES]
            return {**original(self, gradients, group, samples_of), **own_sums(gradients, full)}

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def never_clears(patches: Patches) -> None:
    """Gradients of a step are added to those of the step before."""

    def finished(original: Function) -> Function:
        before: dict[int, list[Tensor]] = {}

        def found(self: GradientSums) -> list[Tensor]:
            gradients = original(self)
            if (old := before.get(id(self))) is not None:
                gradients = [new + owned for new, owned in zip(gradients, old, strict=True)]
            before[id(self)] = [each.clone() for each in gradients]
            return gradients

        return found

    patches.replace(GradientSums, "finished", finished)


def _of_the_head(*kinds: str, ranks: tuple[int, ...] | None = (0, 1, 2), step: int = 1) -> Expected:
    """All gradients are wrong, of which the last parameter's is the first that is finished."""
    return Expected(GRADIENT, "head.output.weight", kinds, ("REDUCE_GRAD",), ranks=ranks, step=step)


MUTANTS = (
    Mutant(
        "AL01",
        "the last microbatch is added to the sum after ranks have added theirs",
        "deepspeedai/DeepSpeed#7985",
        plan=zero_plan,
        breaks=adds_the_last_after_the_reduction,
        expected=_of_the_head("missing", ranks=None),
    ),
    Mutant(
        "AL02",
        "the last microbatch overwrites the sum of those before",
        "deepspeedai/DeepSpeed#7981",
        plan=zero_plan,
        breaks=keeps_the_last_microbatch,
        expected=_of_the_head("missing", ranks=None),
    ),
    Mutant(
        "AL03",
        "only the first microbatch enters the sum",
        "deepspeedai/DeepSpeed#6550, #7967",
        plan=zero_plan,
        breaks=keeps_the_first_microbatch,
        expected=_of_the_head("missing", ranks=None),
    ),
    Mutant(
        "AL07",
        "a placeholder gradient that nobody clears is added to a weight's sum",
        "NVIDIA/Megatron-LM#6565",
        plan=whole_plan,
        breaks=adds_a_shared_dummy,
        expected=Expected(GRADIENT, "layers.0.mlp.up.weight", ("other values",), ("REDUCE_GRAD",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "AL08",
        "a gradient that fills a bucket to the byte is never reduced",
        "deepspeedai/DeepSpeed#4321",
        plan=one_bucket_each_plan,
        breaks=passes_over_full_buckets,
        expected=_of_the_head("missing"),
    ),
    Mutant(
        "AL10",
        "the guard of the reduction is the wrong way round: no gradient is ever added over ranks",
        "NVIDIA/Megatron-LM#3754",
        plan=whole_plan,
        breaks=never_reduces,
        expected=_of_the_head("missing"),
    ),
    Mutant(
        "AL12",
        "gradients are reduced after every microbatch instead of once",
        "huggingface/accelerate#3762; NVIDIA/cosmos-framework#162",
        plan=whole_plan,
        breaks=reduces_every_microbatch,
        expected=_of_the_head("order only"),
    ),
    Mutant(
        "GS07-b",
        "gradients are not cleared between steps",
        "deepspeedai/DeepSpeed#7839 (issue #7837)",
        plan=whole_plan,
        breaks=never_clears,
        expected=_of_the_head("stale", step=2),
    ),
)
