"""Stages that do not come back to training when held-out data have been evaluated between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ...backend.model import block, transformer
from ...backend.model.router import Router
from ...backend.ranks.training_rank import TrainingRank
from ...core.plan.plan import Plan
from ...core.plan.runtime import Recompute
from ..ledger.ledger import ACTIVATION
from .mutant import Expected, Mutant
from .mutants_more import OURS
from .patches import Function, Patches
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from ...backend.base.microbatch import Microbatch
    from ...backend.tensor_parallel.context import LayerContext


def stays_in_evaluation(stage: int, patches: Patches) -> None:
    """A stage is not put back from `eval()`, and what training adds goes by that, as in torch: dropout and the jitter
    of routers, which go by the step here, too."""
    left: set[int] = set()

    def make_evaluating(evaluating: Function) -> Function:
        @contextmanager
        def inside(rank: TrainingRank) -> Iterator[None]:
            with evaluating(rank):
                yield
            if stage in rank.stages:
                rank.stages[stage].eval()
                left.add(id(rank.stages[stage].context))

        return inside

    def make_dropout(dropout: Function) -> Function:
        def dropped(context: LayerContext, operation: str, x_BSH: Tensor) -> Tensor:
            return x_BSH if id(context) in left else dropout(context, operation, x_BSH)

        return dropped

    def make_jittered(jittered: Function) -> Function:
        def scaled(router: Router, x_BSH: Tensor, microbatch: Microbatch) -> Tensor:
            return x_BSH if id(router.context) in left else jittered(router, x_BSH, microbatch)

        return scaled

    patches.replace(TrainingRank, "_evaluating", make_evaluating)
    for module in (block, transformer):
        patches.replace(module, "hidden_dropout", make_dropout)
    patches.replace(Router, "_jittered", make_jittered)


def recomputed_plan() -> Plan:
    """Two pipeline ranks with two stages each, which drop elements and run every layer again for its backward."""
    sections = {"recompute": Recompute("full")}
    return tiny(pp=2, vpp=2, schedule="Interleaved1F1B", model={"hidden_dropout": 0.1}, sections=sections)


MUTANTS = (
    Mutant(
        "XX31",
        "one of a rank's two stages stays in eval mode after held-out data, and drops nothing",
        OURS,
        plan=recomputed_plan,
        breaks=partial(stays_in_evaluation, 2),
        expected=Expected(ACTIVATION, "layers.2.mlp.norm", ("other values",), ("F",), ranks=(0,), step=2),
    ),
    Mutant(
        "XX31-b",
        "the last stage stays in eval mode after held-out data, and its routers see their input as it is",
        OURS,
        plan=lambda: tiny(pp=2, model=EXPERTS, train={"router_jitter": 0.1}),
        breaks=partial(stays_in_evaluation, 1),
        expected=Expected(ACTIVATION, "layers.1.mlp.router", ("other values",), ("F",), ranks=(1,), step=2),
    ),
    Mutant(
        "XX31-c",
        "the last stage stays in eval mode after held-out data, and smoothes no labels",
        OURS,
        plan=lambda: tiny(tp=2, pp=2, train={"label_smoothing": 0.2}),
        breaks=partial(stays_in_evaluation, 1),
        expected=Expected(ACTIVATION, "head.losses", ("other values",), ("F",), ranks=(2, 3), step=2),
    ),
)
