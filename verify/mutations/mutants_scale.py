"""Gradients that are multiplied or divided once too often, or not at all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...backend.gradients.gradients import Gradients
from ...backend.numerics.exact import ExactNumerics
from ...backend.ranks.gradient_sums import GradientSums
from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel
from ..ledger.ledger import GRADIENT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from ...backend.numerics.copies import Copies
    from ...backend.transport.base import Group

LOSS_SCALE = 65536.0

EXPERT_GRADIENT = Expected(GRADIENT, "layers.1.mlp.experts.down.weight", ("scaled",), ("REDUCE_GRAD",))
"""Only experts are wrong, of which the last layer's are finished first."""


def experts_plan() -> Plan:
    """Experts in two parts, each with three copies."""
    return tiny(dp=6, ep=2, samples=6, model=EXPERTS)


def zero_experts_plan() -> Plan:
    """Experts in three parts, each with two copies that keep a part of the sums."""
    return tiny(dp=6, ep=3, samples=6, zero=1, model={**EXPERTS, "num_experts": 6})


def zero_buckets_plan() -> Plan:
    """Three copies that keep a part of every sum, in several buckets, the first of which has the
    output projection alone."""
    return tiny(dp=3, samples=6, zero=1, sections={"data_parallel": DataParallel(bucket_bytes=16384)})


def skips_the_mean_of_experts(patches: Patches) -> None:
    """Sums of experts' gradients are not divided by the number of copies, which all others are."""

    def reduce(original: Function) -> Function:
        def reduced(self: ExactNumerics, gradients: object, group: Group, nodes: object) -> dict[str, Tensor]:
            return {name: total * group.size for name, total in original(self, gradients, group, nodes).items()}

        return reduced

    patches.replace(ExactNumerics, "reduce_experts", reduce)


def divides_experts_twice(patches: Patches) -> None:
    """Sums of experts' gradients are divided by the number of copies before and inside the reduction."""

    def reduce(original: Function) -> Function:
        def reduced(self: ExactNumerics, gradients: object, group: Group, nodes: object) -> dict[str, Tensor]:
            return {name: total / group.size for name, total in original(self, gradients, group, nodes).items()}

        return reduced

    patches.replace(ExactNumerics, "reduce_experts", reduce)


def divides_experts_by_their_copies(patches: Patches, *, num_copies: int) -> None:
    """The mean of experts' gradients is taken over the ranks that share a part of the experts, and not over all
    `num_copies` data-parallel ranks, whose tokens are in it."""

    def reduce(original: Function) -> Function:
        def reduced(self: ExactNumerics, gradients: object, copies: Copies, nodes: object) -> Tensor:
            return original(self, gradients, copies, nodes) * (num_copies / copies.shard.size)

        return reduced

    patches.replace(ExactNumerics, "reduce_experts_part", reduce)


def leaves_experts_unscaled(patches: Patches, *, degree: int) -> None:
    """Experts see the tokens of `degree` ranks, and the layer does not divide their gradients by it."""

    def gradient(original: Function) -> Function:
        def computed(self: ExactNumerics, *given: object) -> object:
            return ((leaf, value * degree) for leaf, value in original(self, *given))

        return computed

    patches.replace(ExactNumerics, "expert_weight_gradient", gradient)


def unscales_without_scaling(patches: Patches) -> None:
    """Gradients are divided by the loss scale in a mode in which losses were not multiplied by it."""

    def finished(original: Function) -> Function:
        return lambda self: [gradient / LOSS_SCALE for gradient in original(self)]

    patches.replace(GradientSums, "finished", finished)


def scales_the_whole_buffer(patches: Patches) -> None:
    """Before a bucket is reduced all that are still to come are divided with it."""

    def begin(original: Function) -> Function:
        def begun(self: Any, bucket: Any, keys: Any, tp: Any) -> None:
            original(self, bucket, keys, tp)
            names = [each.name for each, _ in self._buckets]
            for _, later in self._buckets[names.index(bucket.name) + 1 :]:
                for held in (tensor for key in later for tensor in self._sums[key].held):
                    held.div_(3)

        return begun

    patches.replace(Gradients, "_begin", begin)


MUTANTS = (
    Mutant(
        "GS03",
        "gradients of experts are not averaged over data-parallel ranks",
        "NVIDIA/Megatron-LM@3373641ff1",
        plan=experts_plan,
        breaks=skips_the_mean_of_experts,
        expected=EXPERT_GRADIENT,
    ),
    Mutant(
        "GS04",
        "gradients of experts are averaged over the ranks that share a part of them instead of all",
        "pytorch/torchtitan#1551, #1793",
        plan=zero_experts_plan,
        breaks=partial(divides_experts_by_their_copies, num_copies=6),
        expected=EXPERT_GRADIENT,
    ),
    Mutant(
        "GS06",
        "gradients of experts are averaged twice",
        "deepspeedai/DeepSpeed#4957, #6546",
        plan=experts_plan,
        breaks=divides_experts_twice,
        expected=EXPERT_GRADIENT,
    ),
    Mutant(
        "GS07",
        "gradients are divided by a loss scale that losses were not multiplied by",
        "deepspeedai/DeepSpeed#7839 (issue #7837)",
        plan=lambda: tiny(dp=3, samples=6, dtype="bf16"),
        breaks=unscales_without_scaling,
        expected=Expected(GRADIENT, "head.output.weight", ("scaled",), ("REDUCE_GRAD",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "GS08",
        "the whole gradient buffer is scaled once for each bucket that is reduced",
        "NVIDIA/Megatron-LM#3023",
        plan=zero_buckets_plan,
        breaks=scales_the_whole_buffer,
        expected=Expected(GRADIENT, "head.norm.weight", ("scaled",), ("REDUCE_GRAD",)),
    ),
    Mutant(
        "GS09",
        "the layer of experts does not scale their gradients for the ranks whose tokens it sees",
        "huggingface/nanotron@2dd40d35",
        plan=lambda: tiny(dp=3, ep=3, samples=6, model={**EXPERTS, "num_experts": 6}),
        breaks=partial(leaves_experts_unscaled, degree=3),
        expected=EXPERT_GRADIENT,
    ),
)
