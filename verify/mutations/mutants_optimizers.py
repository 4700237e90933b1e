"""SGD and Muon on parts of tensors: what is forgotten between steps, and matrices that are made orthogonal in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...backend.optimizers.sharded import ShardedOptimizer
from ...backend.optimizers.whole import WholeMatrices
from ...core.plan.optimizer import Optimizer, OptimizerName, Update
from ...core.plan.parameter_groups import ParameterGroup
from ...core.plan.plan import Plan
from ..ledger.ledger import OPTIMIZER, WEIGHT
from .mutant import Expected, Mutant
from .patches import Function, Patches, rank_here
from .plans import tiny

OURS = "ours: what layer-wise optimizers on shards get wrong"


def plan_with(name: OptimizerName, **degrees: Any) -> Plan:
    """A tiny plan with this optimizer."""
    plan = tiny(samples=4, **degrees)
    return replace(plan, optimizer=Optimizer(name, clip_grad_norm=plan.optimizer.clip_grad_norm))


def plan_with_groups() -> Plan:
    """A tiny plan whose first layer has half of the learning rate."""
    plan, half = tiny(dp=2, zero=1), ParameterGroup(r"layers\.0\..*", learning_rate_multiplier=0.5)
    return replace(plan, optimizer=replace(plan.optimizer, groups=(half,)))


def forgets_groups(patches: Patches) -> None:
    """Rank 1 updates all that it keeps with the learning rate of the step."""
    patches.replace(
        Update,
        "learning_rate",
        lambda original: lambda self, of_step: of_step if rank_here() == 1 else original(self, of_step),
    )


def forgets_momentum(patches: Patches) -> None:
    """Every step begins with a momentum of zeros."""

    def step(original: Function) -> Function:
        def updated(self: ShardedOptimizer, *given: object) -> None:
            for one in self.held:
                for moment in self.moments(one).values():
                    moment.zero_()
            original(self, *given)

        return updated

    patches.replace(ShardedOptimizer, "step", step)


def orthogonalises_parts(patches: Patches) -> None:
    """Either half of a matrix is made orthogonal for itself, as by ranks that have one each."""

    def changed(original: Function) -> Function:
        def in_parts(self: WholeMatrices, tensors: list[Tensor], change: Any) -> None:
            def of_halves(name: str, whole: Tensor) -> Tensor:
                return torch.cat([change(name, half.contiguous()) for half in whole.chunk(2, dim=1)], dim=1)

            original(self, tensors, of_halves)

        return in_parts

    patches.replace(WholeMatrices, "changed", changed)


def leaves_other_parts(patches: Patches) -> None:
    """What an owner has made goes to the ranks that it has parts of, and the other copies keep what they had."""

    def sent_back(original: Function) -> Function:
        def for_others(self: WholeMatrices, tensors: list[Tensor], *given: object) -> None:
            before = [each.clone() for each in tensors]
            original(self, tensors, *given)
            if self.group.rank == self.group.size - 1:
                for tensor, own in zip(tensors, before, strict=True):
                    tensor.copy_(own)

        return for_others

    patches.replace(WholeMatrices, "_sent_back", sent_back)


MUTANTS = (
    Mutant(
        "XX70",
        "SGD's momentum is not kept from step to step",
        OURS,
        lambda: plan_with("sgd", dp=2),
        forgets_momentum,
        Expected(OPTIMIZER, "embedding.tokens.weight.momentum_buffer", ("missing",), ("STEP",), ranks=(0, 1), step=2),
    ),
    Mutant(
        "XX68",
        "Muon makes parts of matrices orthogonal, as ranks have them",
        OURS,
        lambda: plan_with("muon", tp=2),
        orthogonalises_parts,
        Expected(WEIGHT, "layers.0.*.weight", ("other values", "scaled"), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "XX69",
        "Muon's orthogonal matrices do not come back to the last rank",
        OURS,
        lambda: plan_with("muon", dp=3),
        leaves_other_parts,
        Expected(WEIGHT, "layers.0.*.weight", ("other values", "scaled"), ("STEP",), ranks=(2,)),
    ),
    Mutant(
        "XX96",
        "a rank does not know of the group with another learning rate",
        OURS,
        plan_with_groups,
        forgets_groups,
        Expected(WEIGHT, "layers.0.attention.norm.weight", ("doubled",), ("STEP",), ranks=(0, 1)),
        steps=1,
    ),
)
