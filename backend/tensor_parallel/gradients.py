"""Weight gradients outside of autograd: `WeightWork` says when they are computed, `Gradients` keeps their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.expert_tokens import ExpertNodes
from ...core.parameters import Usage
from ..numerics import Contribution, Numerics
from ..numerics.base import Accumulator
from ..numerics.context_gradients import ContextGradients
from ..numerics.exact_gradients import ExactAccumulator
from ..numerics.heads import OwnedPart
from ..transport.base import Group
from .parameter import canonical


class WeightWork:
    """Weight gradients of one stage: computed at once, or kept per microbatch while an input-gradient action (I) defers them."""

    def __init__(self) -> None:
        self._deferring: int | None = None
        self._pending: dict[int, list[Callable[[], None]]] = {}

    @property
    def deferring(self) -> bool:
        """Whether weight gradients are being kept for later."""
        return self._deferring is not None

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


@dataclass(frozen=True)
class ExpertCopies:
    """The ranks that hold copies of this rank's experts of a stage, and the nodes of their gradients that each of them has."""

    group: Group
    nodes: tuple[ExpertNodes, ...]


class Gradients:
    """The gradient sums of one stage over a step. They are sums over tokens: divide by the global token count when finished.

    `add` may come in any order of microbatches. `reduce` finishes the step and starts the next one empty.
    """

    def __init__(self, numerics: Numerics, num_samples: int, num_blocks: int = 1, cp: Group | None = None):
        """`num_blocks` are the token blocks of a sequence, which the leaves of expert gradients are made of; `cp` joins the ranks that have
        parts of the same sequences."""
        self._numerics = numerics
        self._num_samples = num_samples
        self._num_blocks = num_blocks
        self._usages: dict[str, Usage] = {}
        self._num_uses: dict[str, int] = {}
        self._waiting: dict[tuple[str, int], dict[int, Contribution]] = {}
        self._sums: dict[str, Accumulator] = {}
        self._owned: dict[str, OwnedPart] = {}
        self._cp = cp if cp is not None and cp.size > 1 and numerics.mode == "exact" else None
        self._context = None if self._cp is None else ContextGradients(self._cp, num_samples)

    def register(self, usage: Usage, owned: OwnedPart | None = None) -> None:
        """Starts a sum for the uses of a parameter; with `owned` this rank contributes only that part of it, of its tokens or heads."""
        assert usage.use == self.num_uses(usage), f"{usage.key} has {self.num_uses(usage)} uses, this is called number {usage.use}"
        self._num_uses[usage.key] = usage.use + 1
        if usage.use:
            return
        self._usages[usage.key] = usage
        if owned is not None:
            self._owned[usage.key] = owned
        self._sums[usage.key] = self._empty(usage.key)

    def add(self, usage: Usage, first_sample: int, contribution: Contribution) -> None:
        """Takes one microbatch's contribution, in storage orientation; it belongs to this object now."""
        if self._context is not None and self._in_context(usage.key):
            assert not isinstance(contribution, Tensor), "exact numerics keep samples apart"
            self._context.add(usage.key, usage.use, first_sample, contribution)
            return
        if self.num_uses(usage) > 1 and self._numerics.mode == "exact":
            waiting = self._waiting.setdefault((usage.key, first_sample), {})
            waiting[usage.use] = contribution
            if len(waiting) < self.num_uses(usage):
                return
            contribution = _added([waiting[use] for use in range(len(waiting))])
            del self._waiting[usage.key, first_sample]
        self._sums[usage.key].add(first_sample, contribution)

    def finish(self, first_sample: int) -> None:
        """Called when the microbatch that starts at `first_sample` has given everything: context-parallel ranks finish its sequences."""
        if self._context is not None:
            self._context.finish(first_sample, self._usages)

    def _in_context(self, key: str) -> bool:
        """True for a gradient whose sums over sequences are finished over context-parallel ranks after every microbatch."""
        return key not in self._owned and not self._usages[key].parameter.expert

    def num_uses(self, usage: Usage) -> int:
        """How many layers share a sum."""
        return self._num_uses.get(usage.key, 0)

    def reduce(
        self,
        copies: Group,
        samples_of: Callable[[int], tuple[int, int]],
        tp: Group | None = None,
        experts: ExpertCopies | None = None,
    ) -> dict[str, Tensor]:
        """Finished sums of this rank's slices by `Usage.key`, in the parameter's orientation, the same on every copy of the stage.

        The key is the parameter's name, but for a tied table, whose uses end in `@embedding` and `@output`: `finish_tied` adds them.
        `samples_of(copy)` is the interval of the global batch that a member has seen (`plan.copy_samples`); `tp` joins the ranks that
        know different tokens or heads (in exact numerics those of all context-parallel ranks), and is needed where there are such;
        `experts` are needed where there are such. Raises ValueError while a microbatch has not contributed.
        """
        if self._owned:
            assert tp is not None, f"{', '.join(self._owned)} are sums over tensor-parallel ranks"
            own = {key: each for key, each in self._sums.items() if key in self._owned}
            self._sums.update(self._numerics.finish_parts(own, tp, self._owned))
        by_experts = {key: each for key, each in self._sums.items() if self._usages[key].parameter.expert}
        if self._context is not None and self._cp is not None:
            whole = {key: each for key, each in self._sums.items() if key in self._owned and isinstance(each, ExactAccumulator)}
            sums = self._context.reduce(copies, samples_of, whole)
            self._context = ContextGradients(self._cp, self._num_samples)
        else:
            others = {key: each for key, each in self._sums.items() if key not in by_experts}
            sums = self._numerics.reduce_gradients(others, copies, samples_of)
        if by_experts:
            assert experts is not None, "gradients of experts are added over copies of their own"
            sums |= self._numerics.reduce_experts(by_experts, experts.group, experts.nodes)
        self._sums = {key: self._empty(key) for key in self._usages}
        return {key: canonical(self._usages[key].parameter, total) for key, total in sums.items()}

    def _empty(self, key: str) -> Accumulator:
        if self._usages[key].parameter.expert:
            return self._numerics.expert_accumulator(self._num_samples, self._num_blocks)
        return self._numerics.accumulator(self._num_samples, partial=key in self._owned)

    @property
    def num_bytes(self) -> int:
        """Bytes of all partial sums held now."""
        held = [tensor for accumulator in self._sums.values() for tensor in accumulator.held]
        return sum(tensor.nbytes for tensor in held + ([] if self._context is None else self._context.held))


def _added(contributions: Sequence[Contribution]) -> Contribution:
    """The sum of what the uses of one parameter give, sample by sample, in the order of the uses."""
    first, *rest = contributions
    for other in rest:
        for total, value in zip(first, other, strict=True):
            total.add_(value)
    return first


def finish_tied(embedding: Tensor, output: Tensor) -> Tensor:
    """The gradient of a tied table from its two finished sums, embedding plus output."""
    return embedding + output
