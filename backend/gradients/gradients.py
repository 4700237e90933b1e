"""Weight gradients outside of autograd: `WeightWork` says when they are computed, `Gradients` keeps their sums."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...core.layout.stage_parameters import Usage
from ...core.program.buckets import EXPERTS, WAITING, Bucket
from ...core.program.expert_tokens import ExpertNodes
from ..base.streams import used_here
from ..numerics import Contribution, Numerics
from ..numerics.context_gradients import ContextGradients
from ..numerics.contributions import Accumulator, by_sample
from ..numerics.copies import Copies
from ..numerics.exact_gradients import ExactAccumulator
from ..numerics.heads import OwnedPart
from ..numerics.open_sums import OpenSums
from ..transport.base import Group
from . import not_finite
from .parameter import canonical


class WeightWork:
    """Weight gradients of one stage: computed at once, or kept per microbatch while an input-gradient
    action (I) defers them."""

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
    """The ranks that hold copies of this rank's experts of a stage, and the nodes of their gradients
    that each of them has."""

    group: Group
    nodes: tuple[ExpertNodes, ...]


class EarlySums(Protocol):
    """Adds up gradients as microbatches give them, and keeps a part: `data_parallel.part_sums.PartSums`."""

    @property
    def held(self) -> list[Tensor]: ...

    def arrived(self, key: str) -> None: ...

    def finish(self) -> None: ...

    def take(self) -> Mapping[str, Tensor]: ...

    def take_not_finite(self) -> not_finite.Found: ...


class Gradients:
    """The gradient sums of one stage over a step. They are sums over tokens: divide by the global
    token count when finished.

    `add` may come in any order of microbatches. `reduce` finishes the step and starts the next one empty.
    """

    def __init__(
        self, numerics: Numerics, num_samples: int, num_blocks: int = 1, cp: Group | None = None, micro_size: int = 1
    ):
        """`num_blocks` are the token blocks of a sequence, which the leaves of expert gradients are made of; `cp` joins
        the ranks that have parts of the same sequences; `micro_size` are the samples of a microbatch."""
        self._numerics = numerics
        self._num_samples = num_samples
        self._num_blocks = num_blocks
        self._micro_size = micro_size
        # What is registered, by `Usage.key`: the gradient's shape, its first use, how many layers use it, and, where
        # this rank knows only its own tokens or heads, which part of the sum it has.
        self._shapes: dict[str, torch.Size] = {}
        # By a microbatch's first sample: the (key, use) that have contributed. Empty between microbatches.
        self._came: dict[int, set[tuple[str, int]]] = {}
        self._usages: dict[str, Usage] = {}
        self._num_uses: dict[str, int] = {}
        # Exact numerics: contributions of the uses of one parameter, until all uses of a microbatch are there and can
        # be added in the order of uses. By (key, first sample), then by use.
        self._waiting: dict[tuple[str, int], dict[int, Contribution]] = {}
        # The partial sums of the step. Replaced by empty ones when the step is reduced.
        self._sums: dict[str, Accumulator] = {}
        self._owned: dict[str, OwnedPart] = {}
        # Exact numerics under context parallelism: sums over a sequence are finished by its ranks after every
        # microbatch, and kept in `_context` instead of `_sums`.
        self._cp = cp if cp is not None and cp.size > 1 and numerics.mode == "exact" else None
        self._context = None if self._cp is None else ContextGradients(self._cp, num_samples)
        # What is reduced in one call, in order; empty means one bucket of everything.
        self._buckets: Sequence[tuple[Bucket, Sequence[str]]] = ()
        # How many contributions each gradient still waits for in a step that reduces during the backward, who hears
        # when one has all, and what is called before a bucket is reduced (`expect`).
        self._missing: dict[str, int] = {}
        self._changed: Callable[[], None] = lambda: None
        self._wait: Callable[[Bucket], None] = lambda bucket: None
        # Whether this step's sums over tensor-parallel ranks have been taken already: once a step.
        self._owned_are_finished = False
        # Who reduces after every microbatch, where that is done; and whether contributions go to another owner for
        # good.
        self._parts: EarlySums | None = None
        self._are_handed_over = False
        # Gradients already looked through for NaN in this step, and the last one that had any.
        self._looked_at: set[str] = set()
        self._not_finite: list[not_finite.Found] = []

    def begin_batches_of(self, num_samples: int) -> None:
        """From here on global batches have so many samples. A step is finished, and the next one has not begun."""
        self._num_samples = num_samples
        if self._cp is not None:
            self._context = ContextGradients(self._cp, num_samples)
        if self._numerics.mode == "exact":  # fast sums are the same for any batch, and may lie in rooms of their own
            self._start_empty()

    def register(self, usage: Usage, shape: torch.Size, owned: OwnedPart | None = None) -> None:
        """Starts a sum for the uses of a parameter, of which this rank holds a part of `shape`; with `owned` this rank
        contributes only that part of it, of its tokens or heads."""
        assert usage.use == self.num_uses(usage), (
            f"{usage.key} has {self.num_uses(usage)} uses, this is called number {usage.use}"
        )
        self._num_uses[usage.key] = usage.use + 1
        if usage.use:
            return
        self._usages[usage.key] = usage
        self._shapes[usage.key] = shape
        if owned is not None:
            self._owned[usage.key] = owned
        self._sums[usage.key] = self._empty(usage.key)

    def add(self, usage: Usage, first_sample: int, contribution: Contribution) -> None:
        """Takes one microbatch's contribution, in storage orientation; it belongs to this object now."""
        key = usage.key
        if self._numerics.observer is not None:
            contribution = self._numerics.observer.contributed(usage, first_sample, contribution)
        self._came.setdefault(first_sample, set()).add((key, usage.use))
        if self._context is not None and self._in_context(key):
            assert isinstance(contribution, (OpenSums, Sequence)), "exact numerics keep samples apart"
            self._context.add(key, usage.use, first_sample, contribution)
            return
        if self._num_uses[key] > 1 and self._numerics.mode == "exact":
            waiting = self._waiting.setdefault((key, first_sample), {})
            waiting[usage.use] = contribution
            if len(waiting) < self._num_uses[key]:
                return
            in_order = [waiting[use] for use in range(len(waiting))]
            contribution = _concatenated(in_order) if key in self._owned else _added(in_order)
            del self._waiting[key, first_sample]
        self._sums[key].add(first_sample, contribution)
        if self._missing:
            self._count(key)
        if self._parts is not None:
            self._parts.arrived(key)

    def expect(self, num_microbatches: int, *, changed: Callable[[], None], wait: Callable[[Bucket], None]) -> None:
        """A step begins in which buckets are reduced while backward passes go on: so many microbatches
        contribute to every gradient.

        `changed` hears when a gradient has all of them; `wait(bucket)` is called before a bucket is reduced.
        """
        uses = self._num_uses if self._numerics.mode == "fast" else dict.fromkeys(self._num_uses, 1)
        self._missing = {key: num_microbatches * count for key, count in uses.items()}
        self._changed, self._wait = changed, wait

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether every gradient of a bucket has all that `expect` announced."""
        return not any(self._missing.get(key) for each, keys in self._buckets if each == bucket for key in keys)

    def hand_over(self, receivers: Mapping[str, Accumulator]) -> None:
        """From now on contributions go to these, by `Usage.key`; whoever has them reduces them,
        in place of `reduce`."""
        assert self._numerics.mode == "fast", "exact numerics reduce what they add up"
        self._sums = dict(receivers)
        self._are_handed_over = True

    @property
    def usages(self) -> Mapping[str, Usage]:
        """Every gradient by `Usage.key`."""
        return self._usages

    @property
    def owned(self) -> Mapping[str, OwnedPart]:
        """The gradients that this rank knows for its own tokens or heads only, by `Usage.key`."""
        return self._owned

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of `reduce_in`, in order."""
        return [bucket for bucket, _ in self._buckets]

    def _count(self, key: str) -> None:
        if self._missing.get(key):
            self._missing[key] -= 1
            if not self._missing[key]:
                self._changed()

    def finish(self, first_sample: int) -> None:
        """Called when the microbatch that starts at `first_sample` has given everything: context-parallel ranks finish
        its sequences. A use of a parameter that it did without has zeros for a gradient."""
        came = self._came.pop(first_sample, set())
        if len(came) < sum(self._num_uses.values()):
            for key, use in self._without(came):
                self.add(replace(self._usages[key], use=use), first_sample, self._zeros(key))
            self._came.pop(first_sample, None)
        if self._context is not None:
            self._context.finish(first_sample, self._usages, self._open_buckets)
        if self._parts is not None:
            self._parts.finish()

    def _without(self, came: Container[tuple[str, int]]) -> list[tuple[str, int]]:
        """The uses of dense parameters that are not among those that came. What is handed over is its
        receiver's to fill up."""
        if self._are_handed_over:
            return []
        dense = [key for key, usage in self._usages.items() if not usage.parameter.expert]
        return [(key, use) for key in dense for use in range(self._num_uses[key]) if (key, use) not in came]

    def _zeros(self, key: str) -> Contribution:
        shape, device = tuple(self._shapes[key]), self._numerics.device
        if self._numerics.mode == "fast":
            return torch.zeros(shape, device=device)
        if (owned := self._owned.get(key)) is not None:
            shape = (len(owned.nodes(owned.member)), *shape)
        return [torch.zeros(shape, device=device) for _ in range(self._micro_size)]

    def reduce_each(self, parts: EarlySums) -> None:
        """From now on `parts` reduces gradients after every microbatch, those that it `take`s."""
        self._parts = parts

    def take(self, keys: Iterable[str]) -> dict[str, Accumulator]:
        """The sums of some gradients, which start again empty."""
        taken = {key: self._sums[key] for key in keys}
        self._sums.update({key: self._empty(key) for key in taken})
        return taken

    def reduce_in(self, buckets: Sequence[tuple[Bucket, Sequence[str]]]) -> None:
        """From now on gradients are reduced in these buckets, given with the keys of their gradients."""
        self._buckets = buckets

    @property
    def _open_buckets(self) -> list[Sequence[str]] | None:
        """The keys of the buckets whose sequences context-parallel ranks finish."""
        if not self._buckets:
            return None
        return [keys for bucket, keys in self._buckets if bucket.name not in (WAITING, EXPERTS)]

    def _in_context(self, key: str) -> bool:
        """True for a gradient whose sums over sequences are finished over context-parallel ranks
        after every microbatch."""
        return key not in self._owned and not self._usages[key].parameter.expert

    def num_uses(self, usage: Usage) -> int:
        """How many layers share a sum."""
        return self._num_uses.get(usage.key, 0)

    def want_rooms(self, copies: Group, experts: Group | None) -> None:
        """Asks for the memory that `reduce` sends sums from over `copies`, and those of experts over theirs."""
        dense = [key for key, usage in self._usages.items() if not usage.parameter.expert]
        of_experts = [key for key, usage in self._usages.items() if usage.parameter.expert]
        for keys in [keys for bucket, keys in self._buckets if not bucket.is_expert] or [dense]:
            self._numerics.want_rooms(self._elements(keys), copies, whole=True)
        if experts is not None and of_experts:
            self._numerics.want_rooms(self._elements(of_experts), experts, whole=True)

    def _elements(self, keys: Iterable[str]) -> int:
        return sum(self._shapes[key].numel() for key in keys)

    def reduce(
        self,
        copies: Group,
        samples_of: Callable[[int], tuple[int, int]],
        tp: Group | None = None,
        experts: ExpertCopies | None = None,
    ) -> dict[str, Tensor]:
        """Finished sums of this rank's slices by `Usage.key`, in the parameter's orientation, the same on
        every copy of the stage.

        The key is the parameter's name, but for a tied table, whose uses end in `@embedding` and `@output`:
        `finish_tied` adds them. `samples_of(copy)` is the interval of the global batch that a member has seen
        (`plan.copy_samples`); `tp` joins the ranks that know different tokens or heads (in exact numerics those of all
        context-parallel ranks), and is needed where there are such; `experts` are needed where there are such. Raises
        ValueError while a microbatch has not contributed.
        """
        buckets = self._buckets or [
            (Bucket("", ()), [key for key in self._sums if not self._usages[key].parameter.expert])
        ]
        if self._context is not None:
            self._look_at(self._usages)
            used_here(self._context.held)
            self._finish_owned(tp)
        by_experts = {key: each for key, each in self._sums.items() if self._usages[key].parameter.expert}
        if self._context is not None and self._cp is not None:
            whole = {
                key: each
                for key, each in self._sums.items()
                if key in self._owned and isinstance(each, ExactAccumulator)
            }
            sums = self._context.reduce(copies, samples_of, whole)
            self._context = ContextGradients(self._cp, self._num_samples)
        else:
            sums = {}
            for bucket, keys in buckets:
                if not bucket.is_expert:
                    self._begin(bucket, keys, tp)
                    with copies.recorder.layer(bucket.layer):
                        sums |= self._numerics.reduce_gradients(
                            {key: self._sums[key] for key in keys}, copies, samples_of
                        )
        if by_experts:
            assert experts is not None, "gradients of experts are added over copies of their own"
            self._wait(Bucket(EXPERTS, ()))
            self._look_at(by_experts)
            sums |= self._numerics.reduce_experts(by_experts, experts.group, experts.nodes)
        self._start_empty()
        return {key: canonical(self._usages[key].parameter, total) for key, total in sums.items()}

    def reduce_parts(
        self,
        copies: Copies,
        samples_of: Callable[[int], tuple[int, int]],
        tp: Group | None = None,
        experts: Copies | None = None,
        nodes: Sequence[ExpertNodes] = (),
    ) -> dict[str, Tensor]:
        """As `reduce`, but of each bucket of `reduce_in` this rank's part only: by the bucket's name [n]. `nodes` are
        what each copy of the experts has of their gradients (exact numerics)."""
        found: dict[str, Tensor] = {} if self._parts is None else dict(self._parts.take())
        if self._context is not None and self._buckets:  # a stage without parameters has none
            self._look_at(self._usages)
            used_here(self._context.held)
            self._finish_owned(tp)
            found = self._reduce_context(copies, samples_of)
        for bucket, keys in self._buckets:
            if bucket.name in found:
                continue
            self._begin(bucket, keys, tp)
            sums = {key: self._sums.pop(key) for key in keys}
            with copies.whole.recorder.layer(bucket.layer):
                if bucket.is_expert:
                    assert experts is not None, "gradients of experts are added over copies of their own"
                    found[bucket.name] = self._numerics.reduce_experts_part(sums, experts, nodes)
                else:
                    found[bucket.name] = self._numerics.reduce_gradients_part(sums, copies, samples_of)
        self._start_empty()
        return found

    def _reduce_context(self, copies: Copies, samples_of: Callable[[int], tuple[int, int]]) -> dict[str, Tensor]:
        """The buckets of dense gradients, of which context-parallel ranks have parts."""
        assert self._context is not None and self._cp is not None and self._open_buckets is not None
        waiting = [key for bucket, keys in self._buckets if bucket.name == WAITING for key in keys]
        sums = [each for each in (self._sums[key] for key in waiting) if isinstance(each, ExactAccumulator)]
        names = [bucket.name for bucket, _ in self._buckets if not bucket.is_expert]
        parts = self._context.reduce_owned(copies, samples_of, self._open_buckets, sums)
        self._context = ContextGradients(self._cp, self._num_samples)
        return dict(zip(names, parts, strict=True))

    def _begin(self, bucket: Bucket, keys: Sequence[str], tp: Group | None) -> None:
        """Comes before the reduction of a bucket over the copies: what it holds must be there, and be sums over
        all tokens and heads."""
        self._wait(bucket)
        self._look_at(keys)
        if any(key in self._owned for key in keys):
            self._look_at(self._owned)
            self._finish_owned(tp)

    def _look_at(self, keys: Container[str]) -> None:
        """Notes a gradient of this rank that has elements which are no numbers, before sums over ranks spread them."""
        held = {key: list(each.held) for key, each in self._sums.items() if key in keys and key not in self._looked_at}
        self._looked_at |= held.keys()
        used_here(tensor for tensors in held.values() for tensor in tensors)
        self._not_finite.append(not_finite.look(held))

    def take_not_finite(self) -> not_finite.Found:
        """The last gradient of the stage's layers that was not finite when it was reduced; it is forgotten."""
        looks, self._not_finite = self._not_finite, []
        order = list(self._usages)

        def last() -> not_finite.NotFinite | None:
            found = [each for each in (look() for look in looks) if each is not None]
            return max(found, key=lambda each: order.index(each.name), default=None)

        return last

    def _finish_owned(self, tp: Group | None) -> None:
        """Adds over tensor-parallel ranks what each knows of its own tokens or heads, all gradients
        together, once in a step."""
        if self._owned and not self._owned_are_finished:
            assert tp is not None, f"{', '.join(self._owned)} are sums over tensor-parallel ranks"
            own = {key: each for key, each in self._sums.items() if key in self._owned}
            self._sums.update(self._numerics.finish_parts(own, tp, self._owned))
            self._owned_are_finished = True

    def _start_empty(self) -> None:
        self._sums = {key: self._empty(key) for key in self._usages}
        self._owned_are_finished = False
        self._looked_at = set()

    def _empty(self, key: str) -> Accumulator:
        if self._usages[key].parameter.expert:
            return self._numerics.expert_accumulator(self._num_samples, self._num_blocks)
        return self._numerics.accumulator(self._num_samples, partial=key in self._owned)

    @property
    def held(self) -> dict[str, list[Tensor]]:
        """The partial sums held now, by the name of the parameter, in the order of the stage's layers. What
        context-parallel ranks have finished together is not among them."""
        return {key: list(accumulator.held) for key, accumulator in self._sums.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all partial sums held now; lanes that reduce may take some away meanwhile."""
        held = [tensor for accumulator in list(self._sums.values()) for tensor in accumulator.held]
        others = [each.held for each in (self._context, self._parts) if each is not None]
        return sum(tensor.nbytes for tensors in (held, *others) for tensor in tensors)


def _added(contributions: Sequence[Contribution]) -> Contribution:
    """The sum of what the uses of one parameter give, sample by sample, in the order of the uses."""
    first, *rest = contributions
    totals = list(by_sample(first))
    for other in rest:
        for total, value in zip(totals, by_sample(other), strict=True):
            total.add_(value)
    return totals


def _concatenated(contributions: Sequence[Contribution]) -> Contribution:
    """The tree nodes [nodes, n] of what the uses of one parameter give, sample by sample, those of one use after those
    of another: they are added when their sums are finished."""
    return [torch.cat(list(uses)) for uses in zip(*contributions, strict=True)]


def finish_tied(embedding: Tensor, output: Tensor) -> Tensor:
    """The gradient of a tied table from its two finished sums, embedding plus output."""
    return embedding + output
