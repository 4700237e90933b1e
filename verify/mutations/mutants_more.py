"""Bugs of the same kinds that are in no list: what goes wrong between gradients and weights when
ranks share the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend.data_parallel.buckets import FlatBucket
from ...backend.numerics.exact import ExactNumerics
from ...backend.numerics.exact_gradients import ExactAccumulator
from ...backend.optimizers.sharded import ShardedOptimizer
from ...backend.ranks import held_parts
from ...backend.ranks.batches import Batches
from ...backend.ranks.totals import Totals
from ...backend.ranks.training_rank import TrainingRank
from ...core.base.reduction import cut
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel
from ..ledger.ledger import ACTIVATION_GRADIENT, GRADIENT, OPTIMIZER, SCALAR, WEIGHT
from .mutant import Expected, Mutant
from .mutants_accumulation import whole_plan, zero_plan
from .mutants_loss import IGNORED
from .mutants_norm import MOMENT, norm_is
from .patches import Function, Patches, rank_here
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from ...backend.base.microbatch import Microbatch
    from ...backend.numerics.copies import Copies
    from ...backend.transport.base import Group, Transport

OURS = "of the same kinds, in no list"


def five_plan() -> Plan:
    """Five copies that keep everything, one microbatch each."""
    return tiny(dp=5, samples=5)


def of_the_head(kind: str, *ranks: int) -> Expected:
    """All gradients are wrong, of which the last parameter's is finished first."""
    return Expected(GRADIENT, "head.output.weight", (kind,), ("REDUCE_GRAD",), ranks=ranks)


def scales_sums(patches: Patches) -> None:
    """Sums are divided by the number of copies, as if losses were means of their own."""

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: object, group: Group, samples_of: Callable[[int], tuple[int, int]]
        ) -> dict[str, Tensor]:
            return {name: total / group.size for name, total in original(self, gradients, group, samples_of).items()}

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def adds_own_twice(patches: Patches) -> None:
    """Rank 2 adds its own gradients to sums that they are in already."""

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: Any, group: Group, samples_of: Callable[[int], tuple[int, int]]
        ) -> dict[str, Tensor]:
            totals = original(self, gradients, group, samples_of)
            if rank_here() != 2:
                return totals
            return {name: total + sum(held.clone() for held in gradients[name].held) for name, total in totals.items()}

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def comes_without_gradients(patches: Patches) -> None:
    """Rank 1 takes part in the reduction with gradients that were cleared too early."""

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: Any, group: Group, samples_of: Callable[[int], tuple[int, int]]
        ) -> dict[str, Tensor]:
            if rank_here() == 1:
                for held in (tensor for each in gradients.values() for tensor in each.held):
                    held.zero_()
            return original(self, gradients, group, samples_of)

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def takes_a_microbatch_twice(patches: Patches) -> None:
    """Rank 0 adds its first microbatch again in place of its second."""

    def add(original: Function) -> Function:
        first: dict[int, list[Tensor]] = {}

        def added(self: Any, first_sample: int, contribution: Any) -> None:
            if rank_here() == 0:
                if first_sample == 0:
                    first[id(self)] = [value.clone() for value in contribution]
                else:
                    contribution = first.pop(id(self))
            original(self, first_sample, contribution)

        return added

    patches.replace(ExactAccumulator, "add", add)


def norm_of_one_rank(patches: Patches) -> None:
    """The norm is the root of a rank's own sum of squares: nobody adds those of the others."""

    def norm(original: Function) -> Function:
        def computed(self: Totals, held: object, gradients: Any) -> Tensor:
            original(self, held, gradients)
            return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()

        return computed

    patches.replace(Totals, "norm", norm)


def counts_tables_twice(patches: Patches) -> None:
    """Both ends of a tied table count in the norm."""

    def second(original: Function) -> Function:
        return lambda plan, stage, name: False

    patches.replace(held_parts, "_is_second_table", second)


def clips_twice(patches: Patches) -> None:
    """The coefficient is applied to gradients that it was applied to already."""

    def step(original: Function) -> Function:
        return lambda self, gradients, coefficient, skip: original(self, gradients, coefficient * coefficient, skip)

    patches.replace(ShardedOptimizer, "step", step)


def forgets_a_rank_in_the_loss(patches: Patches) -> None:
    """Ranks report the mean over their own samples."""

    def mean_loss(original: Function) -> Function:
        def computed(self: Totals, token_losses: Any, num_counted: int) -> torch.Tensor:
            original(self, token_losses, num_counted)
            own = torch.stack([losses.double().sum() for losses in token_losses.values()]).sum()
            return own / (num_counted / self._plan.layout.dp)

        return computed

    patches.replace(Totals, "mean_loss", mean_loss)


def decays_everything(patches: Patches) -> None:
    """Norms are decayed like matrices."""

    def init(original: Function) -> Function:
        def made(self: object, held: Any, *given: Any, **how: Any) -> None:
            original(self, [replace(one, parameter=replace(one.parameter, decay=True)) for one in held], *given, **how)

        return made

    patches.replace(ShardedOptimizer, "__init__", init)


def steps_without_correction(patches: Patches) -> None:
    """The update counter stands where training has begun at: corrections of moments are those of step 100."""

    def step(original: Function) -> Function:
        def updated(self: ShardedOptimizer, *given: object) -> None:
            for one in self.held:
                if not self.saved_state(one)["step"]:
                    self.saved_state(one)["step"].fill_(100.0)
            original(self, *given)

        return updated

    patches.replace(ShardedOptimizer, "step", step)


def other_rate_on_one_rank(patches: Patches) -> None:
    """The schedule of the learning rate is a step ahead on rank 2."""

    def step(original: Function) -> Function:
        def updated(self: ShardedOptimizer, *given: object) -> None:
            if rank_here() == 2:
                self.learning_rate = 0.5e-2
            original(self, *given)

        return updated

    patches.replace(ShardedOptimizer, "step", step)


def leaves_the_last_part_stale(patches: Patches) -> None:
    """The gather of updated weights leaves out what the last rank keeps."""

    def bring(original: Function) -> Function:
        def brought(self: FlatBucket) -> None:
            first, last = self.owned[-1]
            before = self.weights[first:last].clone()
            original(self)
            if self.group.rank != self.group.size - 1:
                self.weights[first:last] = before

        return brought

    patches.replace(FlatBucket, "_bring", bring)


def leaves_out_other_groups(patches: Patches) -> None:
    """Sums are finished inside a group that shares the optimizer state, and not over the groups."""

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: Any, copies: Copies, samples_of: Callable[[int], tuple[int, int]]
        ) -> Tensor:
            total = original(self, gradients, copies, samples_of)
            own = torch.cat([sum(held.clone() for held in each.held).reshape(-1) for each in gradients.values()])
            own = torch.stack(copies.shard.all_gather(own)).sum(0)
            lo, hi = cut(len(own), copies.shard.size, copies.shard.rank)
            return own[lo:hi].view_as(total)

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients_part", reduce)


def keeps_own_experts(patches: Patches) -> None:
    """Gradients of experts stay with the copy that computed them."""

    def whole_samples(tree: Any) -> Tensor:
        return sum(tree.samples.value(node).clone() for node in tree.samples.nodes)

    def reduce(original: Function) -> Function:
        def reduced(self: ExactNumerics, gradients: Any, group: Group, nodes: object) -> dict[str, Tensor]:
            original(self, gradients, group, nodes)
            return {name: whole_samples(each.tree) for name, each in gradients.items()}

        return reduced

    patches.replace(ExactNumerics, "reduce_experts", reduce)


def averages_means(patches: Patches) -> None:
    """The loss is the mean of the means over microbatches, which have other numbers of tokens that count."""

    def microbatches(original: Function) -> Function:
        def read(self: Batches, *given: object) -> object:
            return [
                replace(each, loss_scale=each.loss_scale * global_over_own(each)) for each in original(self, *given)
            ]

        return read

    patches.replace(Batches, "_microbatches", microbatches)


def global_over_own(microbatch: Microbatch) -> float:
    """Tokens that count in an average microbatch over those of this one."""
    return microbatch.counted_share * microbatch.targets.numel() / int((microbatch.targets != IGNORED).sum())


def rounds_before_adding(patches: Patches) -> None:
    """Gradients are sent as bfloat16."""

    def reduce(original: Function) -> Function:
        def reduced(
            self: ExactNumerics, gradients: Any, group: Group, samples_of: Callable[[int], tuple[int, int]]
        ) -> dict[str, Tensor]:
            for held in (tensor for each in gradients.values() for tensor in each.held):
                held.copy_(held.bfloat16())
            return original(self, gradients, group, samples_of)

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def starts_apart(patches: Patches) -> None:
    """Copies draw their first weights each for itself, and nobody sends those of the first to the others."""

    def init(original: Function) -> Function:
        def made(self: ShardedOptimizer, transport: Transport, plan: Plan, **how: object) -> None:
            original(
                self,
                transport,
                replace(plan, train=replace(plan.train, seed=plan.train.seed + transport.global_rank)),
                **how,
            )

        return made

    patches.replace(TrainingRank, "__init__", init)


MUTANTS = (
    Mutant(
        "XX01",
        "sums of gradients are averaged, too",
        OURS,
        five_plan,
        scales_sums,
        of_the_head("scaled", 0, 1, 2, 3, 4),
    ),
    Mutant(
        "XX02", "a rank adds its own gradients once more", OURS, five_plan, adds_own_twice, of_the_head("doubled", 2)
    ),
    Mutant(
        "XX03",
        "a rank comes without its gradients",
        OURS,
        five_plan,
        comes_without_gradients,
        of_the_head("missing", 0, 1, 2, 3, 4),
    ),
    Mutant(
        "XX04",
        "a microbatch enters twice, in place of another",
        OURS,
        whole_plan,
        takes_a_microbatch_twice,
        Expected(GRADIENT, "head.output.weight", ("doubled", "missing", "permuted"), ("REDUCE_GRAD",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "XX05",
        "the norm is that of one rank's parts",
        OURS,
        zero_plan,
        norm_of_one_rank,
        norm_is("missing", ranks=(0, 1, 2)),
    ),
    Mutant(
        "XX06",
        "a tied table counts twice in the norm",
        OURS,
        lambda: tiny(pp=2, samples=3, model={"tied_embeddings": True}),
        counts_tables_twice,
        norm_is("doubled", ranks=(0, 1)),
    ),
    Mutant(
        "XX07",
        "gradients are clipped twice",
        OURS,
        whole_plan,
        clips_twice,
        Expected(OPTIMIZER, MOMENT, ("scaled",), ("STEP",)),
    ),
    Mutant(
        "XX08",
        "ranks report the loss of their own samples",
        OURS,
        whole_plan,
        forgets_a_rank_in_the_loss,
        Expected(SCALAR, "loss", ("missing",), ("STEP",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "XX09",
        "norms are decayed like matrices",
        OURS,
        whole_plan,
        decays_everything,
        Expected(WEIGHT, "*norm.weight", ("scaled", "other values"), ("STEP",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "XX10",
        "moments are corrected for another number of steps",
        OURS,
        whole_plan,
        steps_without_correction,
        Expected(WEIGHT, TOKEN_TABLE, ("scaled",), ("STEP",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "XX11",
        "one rank has another learning rate",
        OURS,
        whole_plan,
        other_rate_on_one_rank,
        Expected(WEIGHT, TOKEN_TABLE, ("scaled",), ("STEP",), ranks=(2,)),
    ),
    Mutant(
        "XX12",
        "updated weights of the last rank do not come",
        OURS,
        zero_plan,
        leaves_the_last_part_stale,
        Expected(WEIGHT, "*", ("stale",), ("STEP",)),
    ),
    Mutant(
        "XX13",
        "gradients are added inside the groups of hybrid sharding and not over them",
        OURS,
        lambda: tiny(dp=4, samples=4, zero=1, sections={"data_parallel": DataParallel(shard=2)}),
        leaves_out_other_groups,
        Expected(GRADIENT, "head.output.weight", ("missing",), ("REDUCE_GRAD",)),
    ),
    Mutant(
        "XX14",
        "gradients of experts are not added over their copies",
        OURS,
        lambda: tiny(dp=4, ep=2, samples=4, model=EXPERTS),
        keeps_own_experts,
        Expected(GRADIENT, "layers.1.mlp.experts.down.weight", ("missing",), ("REDUCE_GRAD",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "XX15",
        "microbatches with fewer tokens that count weigh as much as others",
        OURS,
        lambda: tiny(dp=2, samples=4, train={"ignore_token": IGNORED}),
        averages_means,
        Expected(ACTIVATION_GRADIENT, "head.losses", ("local mean",), ("B",)),
    ),
    Mutant(
        "XX16",
        "gradients are sent in bfloat16",
        OURS,
        whole_plan,
        rounds_before_adding,
        of_the_head("order only", 0, 1, 2),
    ),
    Mutant(
        "XX17",
        "copies start from other weights",
        OURS,
        whole_plan,
        starts_apart,
        Expected(WEIGHT, TOKEN_TABLE, ("other values",), ("STEP",), ranks=(1, 2), step=0),
    ),
)
