"""Batches and rates that change from step to step, and who goes by another step's or by the largest."""

from __future__ import annotations

from dataclasses import replace

from ...backend.ranks import batches
from ...backend.ranks.batches import Batches
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.optimizer import Optimizer
from ...core.plan.plan import Plan
from ...core.plan.rates import Rates
from ..ledger.ledger import ACTIVATION, SCALAR, WEIGHT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import tiny

OURS = "none: of the kinds of the catalog"


def growing() -> Plan:
    """Two sequences in the first step, then four."""
    plan = tiny(dp=2, samples=4)
    return replace(plan, batch=replace(plan.batch, rampup=(2, 2, 2)))


def warmed_up() -> Plan:
    """The rate of the first step is half of that of the second."""
    plan = tiny(dp=2, samples=4)
    rates = Optimizer(
        clip_grad_norm=plan.optimizer.clip_grad_norm, warmup_steps=2, initial_learning_rate=5e-3, weight_decay=0.0
    )
    return replace(plan, optimizer=rates)


def counts_whole_batches(patches: Patches) -> None:
    """Where a step begins in the data is its number times the full batch."""
    patches.replace(batches, "samples_before", lambda _: lambda batch, step: step * batch.global_size)


def divides_by_the_full_batch(patches: Patches) -> None:
    """The mean of a step's loss and gradients is over the tokens of the batch that the ramp ends with."""

    def num_tokens(_: Function) -> Function:
        def full(self: Batches) -> int:
            return self._sizes.global_size * self._sizes.sequence

        return full

    patches.replace(Batches, "num_tokens", num_tokens)


def is_a_step_ahead(patches: Patches) -> None:
    """The scheduler steps before the optimizer: every step has the rate of the next."""
    patches.replace(Rates, "learning_rate", lambda original: lambda self, step: original(self, step + 1))


MUTANTS = (
    Mutant(
        "XX67",
        "samples are counted as steps times the full batch, so that a ramp leaves some out",
        OURS,
        growing,
        counts_whole_batches,
        Expected(ACTIVATION, "embedding.output", ("permuted",), ("F",), step=2),
    ),
    Mutant(
        "XX67-b",
        "the mean of a small batch is over the tokens of the full one",
        OURS,
        growing,
        divides_by_the_full_batch,
        Expected(SCALAR, "loss", ("scaled",), ("STEP",), ranks=(0, 1)),
    ),
    Mutant(
        "XX67-c",
        "the learning rate is that of the next step",
        OURS,
        warmed_up,
        is_a_step_ahead,
        Expected(WEIGHT, TOKEN_TABLE, ("doubled", "scaled"), ("STEP",), ranks=(0, 1)),
    ),
)
