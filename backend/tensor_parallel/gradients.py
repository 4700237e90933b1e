"""Weight gradients outside of autograd: `WeightWork` says when they are computed, `Gradients` keeps their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.parameters import Usage
from ..numerics import Contribution, Numerics
from ..numerics.base import Accumulator
from ..numerics.tokens import OwnedTokens
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

    `add` may come in any order of microbatches. `reduce` finishes the step and starts the next one empty. `tokens` is the cut of the
    sequence over tensor-parallel ranks, where there is one.
    """

    def __init__(self, numerics: Numerics, num_samples: int, tokens: OwnedTokens | None = None):
        self._numerics = numerics
        self._num_samples = num_samples
        self._tokens = tokens
        self._usages: dict[str, Usage] = {}
        self._sums: dict[str, Accumulator] = {}
        self._by_tokens: set[str] = set()

    def register(self, usage: Usage, *, own_tokens: bool = False) -> None:
        """Starts a sum for one use of a parameter; with `own_tokens` this rank contributes its own tokens' part of it."""
        assert usage.key not in self._usages, f"{usage.key} is used twice"
        self._usages[usage.key] = usage
        if own_tokens:
            self._by_tokens.add(usage.key)
        self._sums[usage.key] = self._empty(usage.key)

    def add(self, usage: Usage, first_sample: int, contribution: Contribution) -> None:
        """Takes one microbatch's contribution, in storage orientation; it belongs to this object now."""
        self._sums[usage.key].add(first_sample, contribution)

    def reduce(self, copies: Group, samples_of: Callable[[int], tuple[int, int]], tp: Group | None = None) -> dict[str, Tensor]:
        """Finished sums of this rank's slices by `Usage.key`, in the parameter's orientation, the same on every copy of the stage.

        The key is the parameter's name, but for a tied table, whose uses end in `@embedding` and `@output`: `finish_tied` adds them.
        `samples_of(copy)` is the interval of the global batch that a member has seen (`plan.copy_samples`); `tp` joins the ranks that
        know different tokens, and is needed with sequence parallelism only. Raises ValueError while a microbatch has not contributed.
        """
        if self._tokens is not None and self._by_tokens:
            assert tp is not None, "sequence parallelism sums norms and biases over tensor-parallel ranks"
            own = {key: each for key, each in self._sums.items() if key in self._by_tokens}
            self._sums.update(self._numerics.finish_tokens(own, tp, self._tokens))
        sums = self._numerics.reduce_gradients(self._sums, copies, samples_of)
        self._sums = {key: self._empty(key) for key in self._usages}
        return {key: canonical(self._usages[key].parameter, total) for key, total in sums.items()}

    def _empty(self, key: str) -> Accumulator:
        return self._numerics.accumulator(self._num_samples, own_tokens=key in self._by_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all partial sums held now."""
        return sum(tensor.nbytes for accumulator in self._sums.values() for tensor in accumulator.held)


def finish_tied(embedding: Tensor, output: Tensor) -> Tensor:
    """The gradient of a tied table from its two finished sums, embedding plus output."""
    return embedding + output
