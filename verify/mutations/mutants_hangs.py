"""Collectives that some ranks do not come to, or come to with something else: the run stops, and says who and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend.optimizers.held import Held
from ...backend.pipeline.executor import Executor
from ...backend.pipeline.messages import Lane
from ...backend.ranks import gradient_sums
from ...backend.ranks.totals import Totals
from ...backend.ranks.training_rank import TrainingRank
from ...core.plan.sections import DataParallel
from ...core.schedule.action import SENDS, Action, Kind
from .mutant import Mutant, Stops
from .mutants_more import OURS
from .patches import Patches, rank_here
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from ...backend.transport.base import Transport

MIXED = {**EXPERTS, "first_dense_layers": 1}
"""The first layer is dense."""


def skips_the_norm(stays_away: Callable[[Sequence[Held]], bool], patches: Patches) -> None:
    """A rank that has nothing of some kind leaves out the collective of the gradient norm, and all others go to it."""

    def make(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def of_ranks(totals: Totals, held: Sequence[Held], gradients: Sequence[Tensor]) -> Tensor:
            return torch.ones((), dtype=torch.float64) if stays_away(held) else norm(totals, held, gradients)

        return of_ranks

    patches.replace(Totals, "norm", make)


def counts_nothing(held: Sequence[Held]) -> bool:
    """It keeps parts of another copy only, of which none enter the norm."""
    return not any(one.counts for one in held)


def has_no_experts(held: Sequence[Held]) -> bool:
    """Its layers are all dense."""
    return not any(one.parameter.expert for one in held)


def reduces_by_own_size(patches: Patches) -> None:
    """The losses of routers are added up in a buffer of as many as the rank has routers."""

    def make(mean_aux_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def mean(totals: Totals) -> torch.Tensor:
            losses = [
                float(loss) for stage in totals._stages for router in stage.routers for loss in router.take_losses()
            ]
            return totals._mesh.model.all_reduce(torch.tensor(losses, dtype=torch.float64), "sum").sum()

        return mean

    patches.replace(Totals, "mean_aux_loss", make)


def waits_in_the_warm_up(patches: Patches) -> None:
    """Every warm-up forward has a barrier, and stages have different numbers of warm-up forwards."""
    meshes: dict[int, Any] = {}

    def make_init(init: Callable[..., None]) -> Callable[..., None]:
        def initialised(rank: TrainingRank, *given: object, **named: object) -> None:
            init(rank, *given, **named)
            meshes[rank.transport.global_rank] = rank.mesh

        return initialised

    def make_work(work: Callable[..., None]) -> Callable[..., None]:
        def run(executor: Executor, action: Action, *rest: object) -> None:
            group = meshes[rank_here()].model
            assert action.microbatch is not None
            if action.kind is Kind.F and action.microbatch < group.size - 1 - group.rank:
                group.barrier()
            work(executor, action, *rest)

        return run

    patches.replace(TrainingRank, "__init__", make_init)
    patches.replace(Executor, "_work", make_work)


def sends_the_last_first(patches: Patches) -> None:
    """Lanes send microbatches in the wrong order: the last one first, which is not there before
    the first has come back."""

    def make_init(init: Callable[..., None]) -> Callable[..., None]:
        def initialised(lane: Lane, name: str, actions: Sequence[Action], **rest: object) -> None:
            init(lane, name, actions[::-1] if actions[0].kind in SENDS else actions, **rest)

        return initialised

    patches.replace(Lane, "__init__", make_init)


def reduces_over_the_default_group(patches: Patches) -> None:
    """A reduction of a stage is not given its group, and takes that of all ranks."""
    worlds: dict[int, Any] = {}

    def make_init(init: Callable[..., None]) -> Callable[..., None]:
        def initialised(rank: TrainingRank, transport: Transport, *given: object, **named: object) -> None:
            worlds[transport.global_rank] = transport.group("default", "default", range(transport.world_size))
            init(rank, transport, *given, **named)

        return initialised

    def make_counts(reduce_counts: Callable[..., None]) -> Callable[..., None]:
        return lambda routers, groups: reduce_counts(routers, [worlds[rank_here()]])

    patches.replace(TrainingRank, "__init__", make_init)
    patches.replace(gradient_sums, "reduce_counts", make_counts)


MUTANTS = (
    Mutant(
        "HA02",
        "only ranks with something to count come to the reduction of the norm",
        "NVIDIA/Megatron-LM@90f39a3bfa",
        plan=lambda: tiny(dp=4, zero=1, sections={"data_parallel": DataParallel(shard=2)}),
        breaks=partial(skips_the_norm, counts_nothing),
        expected=Stops(
            r"rank 0 is at 0STEP .* in all_gather, call \d+ of group 'dp/0' over ranks 0, 1, 2, 3: .*rank 2 has not come"
        ),
        steps=1,  # in further steps other calls of the group take the place of those that are left out
    ),
    Mutant(
        "HA04",
        "losses of routers are reduced in buffers of different sizes",
        "NVIDIA/Megatron-LM#3401",
        plan=lambda: tiny(pp=2, model={**MIXED, "num_layers": 2}, train={"router_aux_loss": 0.01}),
        breaks=reduces_by_own_size,
        expected=Stops(r"group 'model/0' over ranks 0, 1: all_reduce expects .* from rank \d, but .* arrived"),
    ),
    Mutant(
        "HA05",
        "ranks without experts have a stub for an optimizer, which leaves out the reduction of the norm",
        "NVIDIA/Megatron-LM@e675940967",
        plan=lambda: tiny(pp=2, model={**MIXED, "num_layers": 2}),
        breaks=partial(skips_the_norm, has_no_experts),
        expected=Stops(
            r"rank 1 is at 1STEP .* in all_gather, call \d+ of group 'model/0' over ranks 0, 1: rank 0 has not come"
        ),
    ),
    Mutant(
        "HA06",
        "a barrier in the warm-up, which later stages have less of",
        "NVIDIA/Megatron-LM@08ddde0c3b",
        plan=lambda: tiny(pp=3, samples=2),
        breaks=waits_in_the_warm_up,
        expected=Stops(
            r"rank 0 is at 0F0 .* in barrier, call 1 of group 'model/0' over ranks 0, 1, 2: .*rank 2 has not come"
        ),
    ),
    Mutant(
        "HA07",
        "a reduction of one stage runs over the ranks of all",
        "NVIDIA/Megatron-LM@9a14c4ce83",
        plan=lambda: tiny(pp=2, dp=2, model={**MIXED, "num_layers": 4, "expert_bias": True}),
        breaks=reduces_over_the_default_group,
        expected=Stops(r"group 'default' over ranks 0, 1, 2, 3: all_gather expects .* from rank \d, but .* arrived"),
    ),
    Mutant(
        "XX30",
        "messages leave in another order than the schedule's, and two stages wait for each other",
        OURS,
        plan=lambda: tiny(pp=2),
        breaks=sends_the_last_first,
        expected=Stops(
            r"ranks 0, 1 wait for each other; .*\n.*rank 0 waits for 1B0 from rank 1 .*\n.*rank 1 waits for 0F0 from rank 0 to run 1F0"
        ),
    ),
)
