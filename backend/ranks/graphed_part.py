"""`GraphedPart`: a part of a layer, forward and backward, as graphs that read and write the same memory each time.

Forward, backward (B, or I and W of a schedule that splits it) are graphs of their own, captured where a schedule comes
to them first. What they compute of a weight gradient is added to the sums after each replay, outside of graphs, so sums
know nothing of them: a contribution that is computed into its sum (`AddedInPlace`, `SampleSums`) is computed then, of
operands that lie in a graph; another one is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...core.base.errors import InternalError
from ...core.layout.stage_parameters import Usage
from ...core.program import Operation
from ...core.schedule.action import Action
from ..base.microbatch import Microbatch
from ..numerics import Contribution
from ..numerics.open_sums import OpenSums
from ..numerics.sample_sums import SampleSums
from ..numerics.token_product import AddedInPlace
from ..tensor_parallel.context import LayerContext

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Work = tuple[str, Usage, Callable[[], Contribution]]
"""A layer's name, the use of a parameter, and what computes its gradient of a microbatch."""

Given = list[tuple[str, Usage, Contribution]]
"""What a backward gives to sums: the layer, the use of a parameter and its gradient of a microbatch."""


class Graphs(Protocol):
    """What captures; `layer_graphs.LayerGraphs` is one."""

    def captured(self, kind: str, pool: _POOL_HANDLE) -> AbstractContextManager[torch.cuda.CUDAGraph]: ...

    def shown(self) -> tuple[Callable[[], None], ...]: ...


class Slot(Protocol):
    """Whose memory it is; `layer_graphs` has one."""

    @property
    def own(self) -> Microbatch: ...

    @property
    def addresses(self) -> set[int]: ...

    @property
    def pool(self) -> _POOL_HANDLE: ...


@dataclass(frozen=True)
class _Recorded:
    """A graph, what the recorder saw of it, and what shows an observer a replay."""

    graph: torch.cuda.CUDAGraph
    operations: tuple[Operation, ...]
    shown: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class _Backward:
    """B, or I, whose weight gradients are left to `works`."""

    recorded: _Recorded
    inputs: list[Tensor | None]
    given: Given
    works: list[Work]


class GraphedPart:
    """`function` of tensors, for one microbatch after the other.

    A tensor that is the result of another part of the slot is read where it lies, others are copied to where the graph
    reads them. Results lie in the graph's memory: they hold until the slot's next microbatch.
    """

    def __init__(
        self,
        graphs: Graphs,
        context: LayerContext,
        slot: Slot,
        name: str,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        kind: str,
    ):
        """Captures the forward, with what a backward needs where gradients are enabled."""
        self._graphs, self._context, self._slot, self._name = graphs, context, slot, name
        self._inputs = [self._place_of(tensor) for tensor in tensors]
        self._copied = [tensor.data_ptr() != own.data_ptr() for tensor, own in zip(tensors, self._inputs, strict=True)]
        self._differentiable = torch.is_grad_enabled()
        # `data`: autograd does not hear of what is copied there
        self._leaves = [own.data.requires_grad_(self._differentiable) for own in self._inputs]
        self._again = context.again
        self._in_flight: Microbatch | None = None
        self._is_new = True

        def work() -> None:
            with context.running(slot.own, again=self._again):
                made = function(*self._leaves)
            self._outputs: list[Tensor] = [made] if isinstance(made, Tensor) else list(made)

        with torch.set_grad_enabled(self._differentiable):
            self._forward = self._capture(kind, work)
        self._is_one = len(self._outputs) == 1
        slot.addresses.update(output.data_ptr() for output in self._outputs)
        self._gradients = [torch.empty_like(output) for output in self._outputs] if self._differentiable else []
        self._backwards: dict[bool, _Backward] = {}
        self._weights: tuple[_Recorded, Given] | None = None

    def __call__(self, microbatch: Microbatch, *tensors: Tensor) -> Any:
        """What `function` gives for a microbatch."""
        found = _Replayed.apply(self, microbatch, *tensors)
        return found[0] if self._is_one else found

    def forward(self, microbatch: Microbatch, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replays the forward. Raises `InternalError` where the memory is that of a microbatch in flight."""
        if self._in_flight is not None:
            raise InternalError(
                f"microbatch {microbatch.index} comes to {self._name} before the weight gradients of microbatch "
                f"{self._in_flight.index} are computed, whose memory it would take."
            )
        self._in_flight = microbatch if self._differentiable else None
        for own, tensor, copied in zip(self._inputs, tensors, self._copied, strict=True):
            if copied:
                own.copy_(tensor)
            elif own.data_ptr() != tensor.data_ptr():
                raise InternalError(f"what {self._name} reads has moved since it was captured.")
        self._replay(self._forward, is_new=self._is_new)
        self._is_new = False
        return tuple(output.detach() for output in self._outputs)

    def backward(self, microbatch: Microbatch, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Replays B or I: the gradients of the inputs. Those of weights are given to sums now, or with W."""
        work = self._context.weight_work
        for own, gradient in zip(self._gradients, gradients, strict=True):
            own.copy_(gradient)
        if is_new := work.deferring not in self._backwards:
            self._backwards[work.deferring] = self._capture_backward(work.deferring)
        found = self._backwards[work.deferring]
        self._replay(found.recorded, is_new=is_new)
        if work.deferring:
            work.submit(microbatch.index, lambda: self._weight_gradients(microbatch))
        else:
            self._give(found.given, microbatch)
        return found.inputs

    def _capture_backward(self, deferring: bool) -> _Backward:
        given, works, inputs = Given(), list[Work](), list[Tensor | None]()

        def collect(layer: str, submitted: Sequence[tuple[Usage, Callable[[], Contribution]]]) -> None:
            own = [(layer, usage, contribution) for usage, contribution in submitted]
            if deferring:
                works.extend(own)
            else:
                given.extend(self._computed(own))

        def work() -> None:
            with self._context.collecting(collect):
                # the graph of autograd stays: what it keeps must not be given to others
                torch.autograd.backward(self._outputs, self._gradients, retain_graph=True)
            for leaf in self._leaves:
                inputs.append(leaf.grad)
                leaf.grad = None

        with torch.no_grad():
            recorded = self._capture("I" if deferring else "B", work)
        self._slot.addresses.update(each.data_ptr() for each in inputs if each is not None)
        return _Backward(recorded, inputs, given, works)

    def _weight_gradients(self, microbatch: Microbatch) -> None:
        """W."""
        is_new = self._weights is None
        if self._weights is None:
            given = Given()

            def work() -> None:
                given.extend(self._computed(self._backwards[True].works))

            with torch.no_grad():
                self._weights = self._capture("W", work), given
        recorded, given = self._weights
        self._replay(recorded, is_new=is_new)
        self._give(given, microbatch)

    def _computed(self, works: Iterable[Work]) -> Given:
        found = Given()
        for layer, usage, contribution in works:
            with self._context.recorder.layer(layer):
                found.append((layer, usage, contribution()))
        return found

    def _give(self, given: Given, microbatch: Microbatch) -> None:
        """Adds a microbatch's gradients to the sums; the slot is free."""
        for layer, usage, contribution in given:
            with self._context.recorder.layer(layer):
                self._context.gradients.add(usage, microbatch.first_sample, own_contribution(contribution))
        self._in_flight = None

    def _place_of(self, tensor: Tensor) -> Tensor:
        """Where a graph finds what a tensor is."""
        if tensor.data_ptr() in self._slot.addresses:
            return tensor.detach()
        return torch.empty_like(tensor).copy_(tensor.detach())

    def _capture(self, kind: str, work: Callable[[], None]) -> _Recorded:
        recorder = self._context.recorder
        first, action = len(recorder.events), recorder.scope[0]
        with self._graphs.captured(kind, self._slot.pool) as graph:
            work()
        operations = tuple(operation for of, operation in recorder.events[first:] if of == action)
        return _Recorded(graph, operations, self._graphs.shown())

    def _replay(self, recorded: _Recorded, *, is_new: bool) -> None:
        recorded.graph.replay()
        if not is_new:
            action: Action | None = self._context.recorder.scope[0]
            self._context.recorder.repeat((action, operation) for operation in recorded.operations)
        for show in recorded.shown:
            show()


def own_contribution(contribution: Contribution) -> Contribution:
    """A contribution for whoever adds it up: what is not yet computed as it is, the rest in memory of its own."""
    if isinstance(contribution, (AddedInPlace, SampleSums)):
        return contribution
    if isinstance(contribution, Tensor):
        return contribution.clone()
    if isinstance(contribution, OpenSums):
        return replace(contribution, samples=[_cloned(sample) for sample in contribution.samples])
    return _cloned(contribution)


def _cloned(tensors: Iterable[Any]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: GraphedPart, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.of = part, microbatch
        return part.forward(microbatch, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, microbatch = ctx.of
        return None, None, *part.backward(microbatch, gradients)
