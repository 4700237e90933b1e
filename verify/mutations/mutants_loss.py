"""Losses that are divided by the wrong number of tokens, microbatches or ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...backend.model import multi_token
from ...backend.numerics.exact_gradients import ExactAccumulator
from ...backend.pipeline.executor import Executor
from ...backend.ranks.batches import Batches
from ...backend.ranks.training_rank import TrainingRank
from ...core.plan.plan import Plan
from ...core.schedule.action import Kind
from ..ledger.ledger import ACTIVATION_GRADIENT, GRADIENT, SCALAR
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import tiny

if TYPE_CHECKING:
    from ...backend.numerics.contributions import Contribution
    from ...backend.tensor_parallel.context import LayerContext

IGNORED = 32
"""A byte that text has many of, unevenly: the blank."""


def pipeline_plan() -> Plan:
    """Two stages, three microbatches."""
    return tiny(pp=2, samples=3)


def context_plan() -> Plan:
    """Two halves of every sequence, and multi-token prediction."""
    return tiny(cp=2, dp=1, samples=3, model={"num_mtp_layers": 1})


def uneven_plan() -> Plan:
    """Two copies whose samples have other numbers of tokens that count, and multi-token prediction."""
    return tiny(dp=2, samples=4, model={"num_mtp_layers": 1}, train={"ignore_token": IGNORED})


def counts_one_microbatch(patches: Patches) -> None:
    """The loss is divided by the tokens of a microbatch of every rank, not by those of the step."""

    def training(original: Function) -> Function:
        def read(self: Batches, step: int, loss_scale: float) -> object:
            microbatches = original(self, step, loss_scale)
            self.num_counted //= len(microbatches)
            return microbatches

        return read

    patches.replace(Batches, "training", training)


def divides_the_sum_every_time(patches: Patches, *, num_microbatches: int) -> None:
    """Every microbatch divides all that was added up before it, too."""

    def add(original: Function) -> Function:
        def added(self: ExactAccumulator, first_sample: int, contribution: Contribution) -> None:
            for held in self.held:
                held.div_(num_microbatches)
            original(self, first_sample, contribution)

        return added

    patches.replace(ExactAccumulator, "add", add)


def divides_on_every_stage(patches: Patches) -> None:
    """A stage divides the gradient that it gets by the number of microbatches, as the stage behind it has done."""

    def input_of(original: Function) -> Function:
        def taken(self: Executor, action: Any, current: Any) -> Tensor | None:
            arrived = original(self, action, current)
            return (
                arrived / len(current.microbatches)
                if action.kind in (Kind.B, Kind.I) and arrived is not None
                else arrived
            )

        return taken

    patches.replace(Executor, "_input_of", input_of)


def divides_held_out_losses(patches: Patches) -> None:
    """The division by the number of microbatches that training needs is left on for held-out data."""

    def divided(original: Function) -> Function:
        def evaluated(self: Any) -> float:
            mean_loss, divisor = self.totals.mean_loss, len(self.batches.validation())
            self.totals.mean_loss = lambda *given: mean_loss(*given) / divisor
            try:
                return original(self)
            finally:
                del self.totals.mean_loss

        return evaluated

    patches.replace(TrainingRank, "evaluate", divided)


def multiplies_by_context_ranks(patches: Patches) -> None:
    """The loss of a token is multiplied by the number of context-parallel ranks although it is
    not averaged over them."""

    def microbatches(original: Function) -> Function:
        def read(self: Batches, *given: object) -> object:
            return [replace(each, loss_scale=each.loss_scale * self._plan.layout.cp) for each in original(self, *given)]

        return read

    patches.replace(Batches, "_microbatches", microbatches)


def multiplies_later_losses(patches: Patches, *, factor_of: Callable[[Any], float]) -> None:
    """The losses of multi-token prediction enter with `factor_of(context)` times their weight."""
    here = threading.local()

    def add_losses(original: Function) -> Function:
        def added(self: multi_token.MultiTokenPrediction, losses_BS: Tensor, normed_BSH: Tensor) -> Tensor:
            here.factor = factor_of(self.context)
            return original(self, losses_BS, normed_BSH)

        return added

    def apply(original: Function) -> Function:
        return lambda cls, losses_BS, weight, *others: original(cls, losses_BS, weight * here.factor, *others)

    patches.replace(multi_token.MultiTokenPrediction, "add_losses", add_losses)
    patches.replace(multi_token._AddsGradients, "apply", apply)


def global_over_own_tokens(context: LayerContext) -> float:
    """Tokens that count in an average microbatch over those of this one."""
    microbatch = context.running_microbatch
    return microbatch.counted_share * microbatch.targets.numel() / int((microbatch.targets != IGNORED).sum())


def one_over_context_ranks(context: LayerContext) -> float:
    """What a rank's share of a sequence is."""
    return 1 / context.plan.layout.cp


MUTANTS = (
    Mutant(
        "LS02",
        "the loss is divided by the tokens of one microbatch instead of those of the step",
        "huggingface/transformers#35438 (issues #35203, #37766)",
        plan=lambda: tiny(dp=2, samples=6),
        breaks=counts_one_microbatch,
        expected=Expected(SCALAR, "loss", ("scaled",), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "LS05",
        "every microbatch scales what was accumulated before it, so that sums become moving averages",
        "pytorch/torchtitan#1732",
        plan=pipeline_plan,
        breaks=partial(divides_the_sum_every_time, num_microbatches=3),
        expected=Expected(GRADIENT, "head.output.weight", ("scaled",), ("REDUCE_GRAD",), ranks=(1,)),
    ),
    Mutant(
        "LS06",
        "every pipeline stage divides by the number of microbatches what the one behind it has divided already",
        "deepspeedai/DeepSpeed#8154 (issue #8152)",
        plan=pipeline_plan,
        breaks=divides_on_every_stage,
        expected=Expected(ACTIVATION_GRADIENT, "layers.0.output", ("scaled",), ("B",), ranks=(0,)),
    ),
    Mutant(
        "LS07",
        "held-out losses are divided by the number of microbatches",
        "pytorch/torchtitan#1758",
        plan=pipeline_plan,
        breaks=divides_held_out_losses,
        expected=Expected(SCALAR, "validation_loss", ("scaled",), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "LS08",
        "losses that are summed per token are multiplied by the number of context-parallel ranks",
        "NVIDIA/Megatron-LM@5946e24b37",
        plan=context_plan,
        breaks=multiplies_by_context_ranks,
        expected=Expected(ACTIVATION_GRADIENT, "*losses", ("doubled",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "LS09",
        "losses of multi-token prediction are divided by a rank's own number of tokens",
        "NVIDIA/Megatron-LM#7452 finding 3",
        plan=uneven_plan,
        breaks=partial(multiplies_later_losses, factor_of=global_over_own_tokens),
        expected=Expected(ACTIVATION_GRADIENT, "mtp.0.losses", ("local mean",), ("B",)),
    ),
    Mutant(
        "LS10",
        "losses of multi-token prediction are divided by the number of context-parallel ranks",
        "NVIDIA/Megatron-LM#3959",
        plan=context_plan,
        breaks=partial(multiplies_later_losses, factor_of=one_over_context_ranks),
        expected=Expected(ACTIVATION_GRADIENT, "mtp.0.losses", ("scaled",), ("B",), ranks=(0, 1)),
    ),
)
