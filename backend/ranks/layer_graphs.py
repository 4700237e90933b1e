"""`LayerGraphs`: what a GPU is given for a layer, captured for each microbatch in flight and replayed for all others.

Schedules, messages, reductions of gradients, exchanges of experts, embedding and head stay outside of graphs: they are
given to the device one by one, as without graphs. A stage has as many *slots* as microbatches are in flight in it
(`backend.pipeline.slots`). A slot has memory of its own for what the layers of a microbatch know and keep, and graphs
that read it; the next microbatch of the slot comes when the last one's gradients are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.draw_keys import DrawKeys
from ..base.microbatch import Microbatch
from ..base.shown_later import ShownLater
from ..base.streams import is_captured
from ..pipeline.graphs import copy_into, own_microbatch, shapes_of
from ..tensor_parallel.context import LayerContext
from .graphed_part import GraphedPart

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

HELD_OUT = -1
"""The slot of all microbatches of held-out data: none is kept for a backward."""


class LayerGraphs:
    """The graphs of a rank's layers.

    The first `warmup_steps` walks over training data, and over held-out data, are given to the device one operation
    after the other. From then on a part of a layer is captured where its microbatch first comes to it, and replayed.
    """

    def __init__(self, device: torch.device, warmup_steps: int, *, observer: ShownLater | None = None):
        self.device = device
        self.observer = observer
        self.keys = DrawKeys(device)
        self.captures = Counter[str]()
        """How many graphs were captured: of forwards and backwards of each kind, and of held-out data."""
        self.replays = False
        """Whether layers are replayed in the walk that goes on."""
        self._warmup_steps = warmup_steps
        self._walked = Counter[str]()
        self._stream = torch.cuda.Stream(device)
        self._meant: dict[int, _Slot] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._step: int | None = None
        self._num_keys = 0
        if observer is not None:
            observer.meant = self._shown_for

    @contextmanager
    def walk(self, name: str, step: int | None, *, replayed: bool = True) -> Iterator[None]:
        """Inside, the rank walks over its row: of data `name`, in training for a `step`."""
        self._walked[name] += 1
        self.replays, self._step = replayed and self._walked[name] > self._warmup_steps, step
        if self.replays:
            self.fill_keys()
        try:
            yield
        finally:
            self.replays = False

    def fill_keys(self) -> None:
        """From here on the current stream finds the keys of this step, also of operations that were captured since."""
        if self._step is not None:
            self.keys.fill(self._step)
        self._num_keys = len(self.keys)

    @contextmanager
    def captured(self, kind: str, pool: _POOL_HANDLE) -> Iterator[torch.cuda.CUDAGraph]:
        """What is given to the device inside is the graph that comes back, whose memory is of a slot's pool. Nothing of
        it is done meanwhile. Other threads go on: the host waits for no message, so that no rank waits for one that
        captures."""
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._graphs.append(graph)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        caller.wait_stream(self._stream)
        self.captures[kind] += 1
        if len(self.keys) > self._num_keys:
            self.fill_keys()

    def close(self) -> None:
        """Lets go of all graphs; for the transport, before its communicators end."""
        while self._graphs:
            self._graphs.pop().reset()

    def shown(self) -> tuple[Callable[[], None], ...]:
        """What shows the observer what was captured last."""
        return () if self.observer is None else self.observer.take()

    def knows(self, slot: _Slot) -> None:
        """A slot is there."""
        self._meant[id(slot.own)] = slot

    def _shown_for(self, own: Microbatch) -> Microbatch:
        """The microbatch that lies in a slot, in place of the slot's own."""
        slot = self._meant.get(id(own))
        return own if slot is None else slot.taken


class _Slot:
    """Where the layers of a stage find what they need to know of a microbatch."""

    def __init__(self, graphs: LayerGraphs, microbatch: Microbatch):
        self.own = replace(
            own_microbatch(microbatch, graphs.keys, graphs.device),
            place=torch.zeros((), dtype=torch.int64, device=graphs.device),
        )
        self.taken = microbatch
        self.pool: _POOL_HANDLE = torch.cuda.graph_pool_handle()
        """What a capture lets go of, the next ones of the pool may keep something in. Graphs of one slot are replayed
        in the order in which they were captured; those of another slot would write to it before it is used."""
        self.addresses: set[int] = set()
        """Where results of the slot's parts lie, which a part that follows reads there."""
        self._take()

    def take(self, microbatch: Microbatch) -> None:
        """From here on the current stream finds this one."""
        if self.taken is not microbatch:
            self.taken = microbatch
            self._take()

    def _take(self) -> None:
        assert self.own.place is not None
        copy_into([self.taken], [replace(self.own, place=None)])
        self.own.place.fill_(self.taken.first_sample)


class StageParts:
    """The parts of one stage's layers. `slots` is the slot of every microbatch of a step."""

    def __init__(self, graphs: LayerGraphs, context: LayerContext, slots: Mapping[int, int]):
        self._graphs, self._context, self._slots = graphs, context, slots
        self._own: dict[Hashable, _Slot] = {}
        self._parts: dict[Hashable, GraphedPart] = {}
        self._last: _Slot | None = None

    def begin_slots(self, slots: Mapping[int, int]) -> None:
        """From here on steps have other microbatches, with these slots: graphs of a slot know of a microbatch nothing
        but what lies there, and stay."""
        self._slots, self._last = slots, None

    def run(self, name: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """`function(*tensors)`, whether the device was given the work piece by piece or as a graph."""
        context, microbatch = self._context, self._context.microbatch
        if microbatch is None or not self._graphs.replays or is_captured(self._graphs.device):
            return function(*tensors)
        slot, training = self._slot(microbatch), torch.is_grad_enabled()
        sizes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = name, id(slot), training, context.again, sizes
        part = self._parts.get(key)
        if part is None:
            kind = "forward" if training else "held-out" if microbatch.step is None else "forward alone"
            part = self._parts[key] = GraphedPart(self._graphs, context, slot, name, function, tensors, kind)
        return part(microbatch, *tensors)

    def enter(self, x_BSH: Tensor) -> Tensor:
        """What comes into the stage; its gradient gets memory of its own, for whoever takes it away."""
        return _Entering.apply(x_BSH) if self._graphs.replays and x_BSH.requires_grad else x_BSH

    def leave(self, x_BSH: Tensor) -> Tensor:
        """What leaves the stage, in memory of its own."""
        return x_BSH.clone() if self._graphs.replays else x_BSH

    def _slot(self, microbatch: Microbatch) -> _Slot:
        if self._last is not None and self._last.taken is microbatch:
            return self._last
        number = HELD_OUT if microbatch.step is None else self._slots[microbatch.index]
        # everything about it that is no number of its tensors, but which one it is
        key = number, shapes_of([replace(microbatch, index=0, first_sample=0)])
        if key not in self._own:
            self._own[key] = _Slot(self._graphs, microbatch)
            self._graphs.knows(self._own[key])
        self._last = self._own[key]
        self._last.take(microbatch)
        return self._last


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()
