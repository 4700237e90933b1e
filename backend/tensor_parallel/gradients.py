"""Weight gradients outside of autograd: `WeightWork` says when they are computed, `Gradients` keeps their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.parameters import Usage
from ..numerics import Contribution, Numerics
from ..numerics.base import Accumulator
from ..transport.base import Group
from .parameter import canonical


class WeightWork:
    """Weight gradients of one stage: computed at once, or kept per microbatch while an input-gradient action (I) defers them."""

    def __init__(self) -> None:
        self._deferring: int | None = None
        self._pending: dict[int, list[Callable[[], None]]] = {}

    def submit(self, microbatch: int, work: Callable[[], None]) -> None:
        """Runs `work` now, or keeps it for `run(microbatch)`."""
        if self._deferring is None:
            work()
        else:
            assert self._deferring == microbatch, (self._deferring, microbatch)
            self._pending[microbatch].append(work)

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        """Inside, the weight gradients of `microbatch` are kept as work for later."""
        self._deferring = microbatch
        self._pending.setdefault(microbatch, [])  # an empty stage submits nothing, and its W comes all the same
        try:
            yield
        finally:
            self._deferring = None

    def run(self, microbatch: int) -> None:
        """Computes what was deferred for a microbatch, in the order it was submitted."""
        with torch.no_grad():
            for work in self._pending.pop(microbatch):
                work()


class Gradients:
    """The gradient sums of one stage over a step. They are sums over tokens: divide by the global token count when finished.

    `add` may come in any order of microbatches. `reduce` finishes the step and starts the next one empty.
    """

    def __init__(self, numerics: Numerics, num_samples: int):
        self._numerics = numerics
        self._num_samples = num_samples
        self._usages: dict[str, Usage] = {}
        self._sums: dict[str, Accumulator] = {}

    def register(self, usage: Usage) -> None:
        """Starts a sum for one use of a parameter."""
        assert usage.key not in self._usages, f"{usage.key} is used twice"
        self._usages[usage.key] = usage
        self._sums[usage.key] = self._numerics.accumulator(self._num_samples)

    def add(self, usage: Usage, first_sample: int, contribution: Contribution) -> None:
        """Takes one microbatch's contribution, in storage orientation; it belongs to this object now."""
        self._sums[usage.key].add(first_sample, contribution)

    def reduce(self, copies: Group, samples_of: Callable[[int], tuple[int, int]]) -> dict[str, Tensor]:
        """Finished sums of this rank's slices by `Usage.key`, in the parameter's orientation, the same on every copy of the stage.

        The key is the parameter's name, but for a tied table, whose uses end in `@embedding` and `@output`: `finish_tied` adds them.
        `samples_of(copy)` is the interval of the global batch that a member has seen (`plan.copy_samples`). Raises ValueError while a
        microbatch has not contributed.
        """
        sums = self._numerics.reduce_gradients(self._sums, copies, samples_of)
        self._sums = {key: self._numerics.accumulator(self._num_samples) for key in self._usages}
        return {key: canonical(self._usages[key].parameter, total) for key, total in sums.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all partial sums held now."""
        return sum(tensor.nbytes for accumulator in self._sums.values() for tensor in accumulator.held)


def finish_tied(embedding: Tensor, output: Tensor) -> Tensor:
    """The gradient of a tied table from its two finished sums, embedding plus output."""
    return embedding + output
