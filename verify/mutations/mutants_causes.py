"""Bugs of which the first cause is easily given a wrong name: small numbers, parts of tensors, and what
is made a second time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...backend.data_parallel.buckets import FlatBucket
from ...backend.model.attention_core import AttentionCore
from ...backend.model.mlp import MLP
from ...backend.ranks import gradient_sums
from ...backend.ranks.batches import Batches
from ...backend.ranks.gradient_sums import GradientSums
from ...backend.ranks.totals import Totals
from ...backend.tensor_parallel import Norm
from ...core.model.parameters import Parameter, parameters
from ...core.plan.plan import Plan
from ...core.plan.runtime import Recompute
from ...core.plan.sections import ScheduleChoice
from ..ledger.ledger import ACTIVATION, GATHERED, GRADIENT, RECOMPUTED, SCALAR, WEIGHT
from .mutant import Expected, Mutant
from .mutants_loss import IGNORED
from .mutants_scale import zero_buckets_plan
from .patches import Function, Patches, on_ranks, rank_here
from .plans import EXPERTS, tiny

OURS = "none: of the kinds of the catalog"


def uneven_plan() -> Plan:
    """Two copies whose samples have other numbers of tokens that count."""
    return tiny(dp=2, samples=4, train={"ignore_token": IGNORED})


def equal_plan() -> Plan:
    """Two tensor-parallel and two data-parallel ranks; those that cut experts are two, too."""
    return tiny(tp=2, dp=2, etp=2, sequence_parallel=True, model=EXPERTS)


def gathering_plan(dtype: str = "fp32") -> Plan:
    """Three copies that keep their weights in parts, on two stages."""
    plan = tiny(dp=3, pp=2, samples=6, zero=3, dtype=dtype)
    return replace(plan, schedule=ScheduleChoice("1F1B", max_active_stages=2))


def flips_a_bit(name: str, bit: int, global_rank: int, patches: Patches) -> None:
    """One bit of one element of a finished gradient is another on one rank."""
    here = on_ranks(global_rank)

    def norm(original: Function) -> Function:
        def flipped(self: Totals, held: Any, gradients: Any) -> float:
            for one, gradient in zip(held, gradients, strict=True):
                if one.name == name and here():
                    words = gradient.contiguous().view(torch.int32).reshape(-1)
                    words[7] ^= 1 << bit
                    gradient.copy_(words.view(torch.float32).reshape(gradient.shape))
            return original(self, held, gradients)

        return flipped

    patches.replace(Totals, "norm", norm)


def counts_alone(patches: Patches) -> None:
    """Ranks do not add up how many tokens went to each expert: every one balances by its own."""
    patches.replace(gradient_sums, "reduce_counts", lambda original: lambda routers, groups: original(routers, []))


def divides_by_own_tokens(patches: Patches) -> None:
    """A rank divides by the tokens that count in its own samples, not by those of the global batch."""

    def training(original: Function) -> Function:
        def read(self: Batches, step: int, loss_scale: float) -> object:
            microbatches = original(self, step, loss_scale)
            self.num_counted = sum(int((each.targets != IGNORED).sum()) for each in microbatches)
            return microbatches

        return read

    patches.replace(Batches, "training", training)


def averages_means(patches: Patches) -> None:
    """The loss that is reported is the mean of the ranks' means."""

    def mean_loss(original: Function) -> Function:
        def averaged(self: Any, token_losses: Any, num_counted: int) -> Tensor:
            own = sum(int((losses != 0).sum()) for losses in token_losses.values())
            means = {microbatch: losses.double() / own for microbatch, losses in token_losses.items()}
            of_ranks = self._mesh.dp.all_gather(sum(losses.sum() for losses in means.values()).reshape(1))
            return torch.cat([*of_ranks]).mean()

        return averaged

    patches.replace(Totals, "mean_loss", mean_loss)


def brings_an_old_part(member: int, patches: Patches, *, updates_late: int) -> None:
    """One copy's part of a bucket comes to the others as it was some updates before."""
    before: dict[int, list[Tensor]] = {}

    def bring(original: Function) -> Function:
        def brought(self: FlatBucket) -> None:
            original(self)
            lo, hi = self.owned[member]
            held = before.setdefault(id(self), [])
            if not held or not torch.equal(held[-1], self.weights[lo:hi]):
                held.append(self.weights[lo:hi].clone())
            late = len(held) - 1 - updates_late
            if self.group.rank != member and "head.output.weight" in self.keys and late >= 0:
                self.weights[lo:hi] = held[late]

        return brought

    patches.replace(FlatBucket, "_bring", bring)


def averages_gradients(is_averaged: Callable[[Any], bool], axis: str, patches: Patches) -> None:
    """Sums of gradients are divided by the ranks of an axis, although losses are divided by all tokens."""

    def reduce(original: Function) -> Function:
        def reduced(self: GradientSums, stage: int) -> None:
            original(self, stage)
            known = {parameter.name: parameter for parameter in parameters(self.plan.model)}
            for key, total in self.reduced[stage].items():
                if is_averaged(known[key.partition("@")[0]]):
                    total.div_(self.plan.layout.sizes[axis])

        return reduced

    patches.replace(GradientSums, "reduce", reduce)


def is_held_by_all(parameter: Parameter) -> bool:
    """Whether tensor-parallel ranks hold it in whole."""
    return parameter.cut is None


def is_any(parameter: Parameter) -> bool:
    """Every parameter."""
    return True


def halves_own_layer(patches: Patches) -> None:
    """On the first data-parallel rank the output of each MLP is averaged over its tensor-parallel
    ranks, and not added up."""

    def forward(original: Function) -> Function:
        def averaged(self: MLP, x_BSH: Tensor) -> Tensor:
            y_BSH = original(self, x_BSH)
            return y_BSH / self.context.tp.size if rank_here() < self.context.tp.size else y_BSH

        return averaged

    patches.replace(MLP, "forward", forward)


def repeats_other_numbers(owner: type, patches: Patches, *, number: int, factor: float) -> None:
    """What rank 1 computes in a layer for a microbatch is other numbers from its second time on."""
    calls: dict[tuple[int, Any], int] = {}

    def forward(original: Function) -> Function:
        def repeated(self: MLP, *given: object) -> object:
            result = original(self, *given)
            at = id(self), self.context.running_microbatch.first_sample
            calls[at] = calls.get(at, 0) + 1
            return result * factor if calls[at] >= number and rank_here() == 1 else result

        return repeated

    patches.replace(owner, "forward", forward)


def repeats_norms_of_other_rows(patches: Patches) -> None:
    """A norm that is made again for a backward is made of an input that something else has written into."""

    def make(original: Function) -> Function:
        def again(self: Norm, x_BSH: Tensor) -> Tensor:
            return original(self, x_BSH.roll(1, 1) if rank_here() == 1 else x_BSH)

        return again

    patches.replace(Norm, "_again", make)


MUTANTS = (
    Mutant(
        "XX60",
        "one bit of one element of a gradient is flipped on one rank",
        OURS,
        plan=lambda: tiny(dp=3, samples=3),
        breaks=partial(flips_a_bit, "layers.1.mlp.up.weight", 9, 1),
        expected=Expected(GRADIENT, "layers.1.mlp.up.weight", ("bit flip",), ("REDUCE_GRAD",), ranks=(1,)),
    ),
    Mutant(
        "XX61",
        "the tokens of experts are not counted over all ranks, and biases go by the counts of each",
        OURS,
        plan=lambda: tiny(model={**EXPERTS, "expert_bias": True}, dp=2),
        breaks=counts_alone,
        expected=Expected(WEIGHT, "layers.*.mlp.router.expert_bias", ("other values",), ("STEP",)),
    ),
    Mutant(
        "XX62",
        "one copy's part of the updated weights comes to the others two steps late",
        OURS,
        plan=zero_buckets_plan,
        breaks=partial(brings_an_old_part, 1, updates_late=2),
        expected=Expected(WEIGHT, "head.output.weight", ("stale",), ("STEP",), ranks=(0, 2), step=3),
        steps=3,
    ),
    Mutant(
        "XX63",
        "every rank divides by the tokens that count in its own samples",
        OURS,
        plan=uneven_plan,
        breaks=divides_by_own_tokens,
        expected=Expected(SCALAR, "loss", ("local mean",), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "XX63-b",
        "the loss that is reported is the mean of the ranks' means",
        OURS,
        plan=uneven_plan,
        breaks=averages_means,
        expected=Expected(SCALAR, "loss", ("local mean",), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "XX64",
        "gradients of what tensor-parallel ranks hold in whole are averaged over them, where dp is equal",
        OURS,
        plan=equal_plan,
        breaks=partial(averages_gradients, is_held_by_all, "tp"),
        expected=Expected(GRADIENT, "head.norm.weight", ("scaled",), ("REDUCE_GRAD",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "XX64-b",
        "gradients are averaged over data-parallel ranks, where tp is equal",
        OURS,
        plan=equal_plan,
        breaks=partial(averages_gradients, is_any, "dp"),
        expected=Expected(GRADIENT, "head.output.weight", ("scaled",), ("REDUCE_GRAD",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "XX64-c",
        "one group of tensor-parallel ranks averages the output of a layer, where dp is equal",
        OURS,
        plan=lambda: tiny(tp=2, dp=2),
        breaks=halves_own_layer,
        expected=Expected(ACTIVATION, "layers.0.mlp", ("scaled",), ("F",), ranks=(0, 1)),
    ),
    Mutant(
        "XX65",
        "one copy's part of the weights is gathered as it was two steps before",
        OURS,
        plan=gathering_plan,
        breaks=partial(brings_an_old_part, 1, updates_late=2),
        expected=Expected(GATHERED, "layers.1.mlp.up.weight", ("stale",), ("UNSHARD",), ranks=(3, 5), step=3),
        steps=3,
    ),
    Mutant(
        "XX65-b",
        "the weights that are gathered for the layers in bf16 are two steps old in one copy's part",
        OURS,
        plan=partial(gathering_plan, dtype="bf16"),
        breaks=partial(brings_an_old_part, 1, updates_late=2),
        expected=Expected(GATHERED, "layers.1.mlp.up.weight", ("stale",), ("UNSHARD",), ranks=(3, 5), step=3),
        steps=3,
    ),
    Mutant(
        "XX66",
        "attention that is computed again for a backward is scaled otherwise",
        OURS,
        plan=lambda: tiny(tp=2, sections={"recompute": Recompute("selective")}),
        breaks=partial(repeats_other_numbers, AttentionCore, number=2, factor=0.7),
        expected=Expected(RECOMPUTED, "layers.1.attention.core", ("scaled",), ("B",), ranks=(1,)),
        steps=1,
    ),
    Mutant(
        "XX66-b",
        "in a layer that is computed again for its backward the MLP is doubled",
        OURS,
        plan=lambda: tiny(tp=2, sections={"recompute": Recompute("full")}),
        breaks=partial(repeats_other_numbers, MLP, number=2, factor=2.0),
        expected=Expected(RECOMPUTED, "layers.1.mlp", ("doubled",), ("B",), ranks=(1,)),
        steps=1,
    ),
    Mutant(
        "XX66-c",
        "norms that are made again for a backward are made of other rows",
        OURS,
        plan=lambda: tiny(tp=2, sections={"recompute": Recompute("selective", modules=("norm",))}),
        breaks=repeats_norms_of_other_rows,
        expected=Expected(RECOMPUTED, "layers.1.*.norm", ("permuted",), ("B",), ranks=(1,)),
        steps=1,
    ),
)
