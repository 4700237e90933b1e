"""Samples that other ranks read too, and those that come after a resumption."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ...backend.data import order
from ...backend.launching.launch import private_folder
from ...backend.ranks.batches import Batches
from ...core.plan.plan import Plan
from ..ledger.ledger import ACTIVATION
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import SEQUENCE, tiny
from .scenarios import Resumed

FORWARD = ("F",)
INPUTS = "embedding.output"
"""What shows first that a rank reads other tokens."""


def seeds_each_rank(patches: Patches) -> None:
    """Every data-parallel rank shuffles for itself, so that some samples are read twice and others never."""

    def make(training: Function) -> Function:
        def read(batches: Any, step: int, loss_scale: float) -> Any:
            plan: Plan = batches._plan
            own_seed = plan.train.seed + batches._mesh.coordinates["dp"]
            batches._plan = replace(plan, train=replace(plan.train, seed=own_seed))
            try:
                return training(batches, step, loss_scale)
            finally:
                batches._plan = plan

        return read

    patches.replace(Batches, "training", make)


def reads_the_same_samples(patches: Patches) -> None:
    """The sampler does not get the rank: all read the samples of the first."""

    def make(batch: Function) -> Function:
        def first(batches: Batches, read: Function) -> object:
            return batch(batches, lambda corpus, lo, hi: read(corpus, 0, hi - lo))

        return first

    patches.replace(Batches, "_batch", make)


def forgets_the_epoch(patches: Patches) -> None:
    """After a resumption passes over the text are counted from zero: what comes is shuffled as in the first."""

    def make(permutation: Function) -> Function:
        return lambda num_items, seed, epoch: permutation(num_items, seed, 0)

    patches.replace(order, "permutation", make)


@functools.cache
def _short_text() -> str:
    """A file of eight samples, for as long as this process lives."""
    file = private_folder("text-") / "text.txt"
    file.write_bytes(bytes(32 + 7 * place % 90 for place in range(10 * SEQUENCE)))
    return str(file)


def short_epochs() -> Plan:
    """Six samples a step of a text that has eight or nine: the second step goes through the end of an epoch."""
    return tiny(dp=3, samples=6, train={"data": _short_text()})


MUTANTS = (
    Mutant(
        "DA01",
        "each rank seeds the sampler for itself, so ranks draw overlapping samples",
        "huggingface/accelerate#2694",
        plan=lambda: tiny(dp=3, samples=6),
        breaks=seeds_each_rank,
        expected=Expected(ACTIVATION, INPUTS, ("other values",), FORWARD, ranks=(1,)),
    ),
    Mutant(
        "DA01-b",
        "every rank draws the samples of the first",
        "huggingface/accelerate#2694",
        plan=lambda: tiny(dp=3, samples=6),
        breaks=reads_the_same_samples,
        expected=Expected(ACTIVATION, INPUTS, ("permuted",), FORWARD, ranks=(1,)),
    ),
    Mutant(
        "DA03",
        "a resumed run counts epochs from zero and repeats the order of the first",
        "pytorch/torchtitan#3008; huggingface/accelerate#4071",
        plan=short_epochs,
        breaks=forgets_the_epoch,
        expected=Expected(ACTIVATION, INPUTS, ("other values",), FORWARD, step=2),
        scenario=Resumed(),
    ),
)
