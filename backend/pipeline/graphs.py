"""`StepGraphs`: what a GPU is given for the forwards and backwards of a step, captured once and replayed as one.

A captured graph has the addresses of what it reads and writes. What changes from step to step is copied to where it was
when the graph was captured: tokens and targets of every microbatch, the loss scale, the keys of random draws. Weights
are updated where they are. STEP, which asks the device for numbers, is no part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...core.program import Operation
from ...core.schedule.action import Action
from ..base.draw_keys import DrawKeys
from ..base.microbatch import Microbatch
from ..base.recorder import Recorder
from ..base.shown_later import ShownLater

Given = TypeVar("Given")
Walk = Callable[[Sequence[Microbatch]], Given]
"""Gives a device what has to be done for microbatches."""


@dataclass(frozen=True)
class Captured(Generic[Given]):
    """A graph, the microbatches that it reads, what the walk gave that was captured, what brings the host to where it
    was after that, and what an observer is shown after each replay."""

    graph: torch.cuda.CUDAGraph
    shapes: Hashable
    microbatches: Sequence[Microbatch]
    keys: DrawKeys
    given: Given
    restore: Callable[[], None]
    shown: Sequence[Callable[[], None]]
    recorded: Sequence[tuple[Action | None, Operation]]
    """What the recorder saw of it."""


class StepGraphs:
    """The graphs of one rank: one for training, one for held-out data.

    The first `warmup_steps` walks of each are given to the device one operation after the other, in which libraries
    choose kernels and communicators connect. The next is captured. A graph whose microbatches have other shapes, or
    another number, than those of today is thrown away, and the walk is captured anew.
    """

    def __init__(
        self,
        device: torch.device,
        warmup_steps: int,
        *,
        state: Callable[[], Callable[[], None]],
        recorder: Recorder,
        observer: ShownLater | None = None,
    ):
        """`state()` gives what brings back the host's side of a walk, as it is then."""
        self._device, self._warmup_steps, self._state, self._observer = device, warmup_steps, state, observer
        self._recorder = recorder
        self._walked: dict[str, int] = {}
        self.captures = Counter[str]()
        """How often each walk was captured, by name."""
        self._captured: dict[str, Captured[object]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def give(self, name: str, microbatches: Sequence[Microbatch], walk: Walk[Given]) -> Given:
        """What `walk` gives, whether the device was given the work piece by piece or as a graph."""
        walked = self._walked[name] = self._walked.get(name, 0) + 1
        if walked <= self._warmup_steps:
            return walk(microbatches)
        if name in self._captured and self._captured[name].shapes != shapes_of(microbatches):
            self._captured.pop(name).graph.reset()  # before the next one takes memory
        if is_new := name not in self._captured:
            self._captured[name] = self._capture(name, microbatches, walk)
        captured = self._captured[name]
        self._fill(captured, microbatches)
        captured.graph.replay()
        if not is_new:
            self._recorder.repeat(captured.recorded)
        captured.restore()
        for show in captured.shown:
            show()
        return captured.given  # type: ignore[return-value]  # what the walk of this name gives

    def forget(self, name: str) -> None:
        """The next walk of this name is another one, and is captured anew."""
        if name in self._captured:
            self._captured.pop(name).graph.reset()

    def close(self) -> None:
        """Lets go of all graphs; for the transport, before its communicators end."""
        while self._captured:
            self._captured.popitem()[1].graph.reset()

    def _capture(self, name: str, microbatches: Sequence[Microbatch], walk: Walk[object]) -> Captured[object]:
        keys = DrawKeys(self._device)
        own = [own_microbatch(each, keys, self._device) for each in microbatches]
        copy_into(microbatches, own)
        self.captures[name] += 1
        first = len(self._recorder.events)
        graph = torch.cuda.CUDAGraph()
        # lanes, and NCCL's own threads, may call what the capturing thread may not
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            given = walk(own)
        shown = () if self._observer is None else self._observer.take()
        recorded = self._recorder.events[first:]
        return Captured(graph, shapes_of(microbatches), own, keys, given, self._state(), shown, recorded)

    def _fill(self, captured: Captured[object], microbatches: Sequence[Microbatch]) -> None:
        """Copies what the microbatches have to where the graph reads it."""
        copy_into(microbatches, captured.microbatches)
        step = microbatches[0].step if microbatches else None
        if isinstance(step, int):
            captured.keys.fill(step)


def copy_into(microbatches: Sequence[Microbatch], own: Sequence[Microbatch]) -> None:
    """What microbatches have, to where graphs read it."""
    for target, source in zip(own, microbatches, strict=True):
        for to, tensor in zip(_tensors(target), _tensors(source), strict=True):
            to.copy_(tensor)
        if isinstance(target.loss_scale, Tensor):
            target.loss_scale.fill_(source.loss_scale)


def shapes_of(microbatches: Sequence[Microbatch]) -> Hashable:
    """What a graph is captured for: everything about the microbatches that is no number of their tensors."""
    return tuple(
        (each.index, each.first_sample, each.step is None, each.lengths, _names(each), *_sizes(each))
        for each in microbatches
    )


def _sizes(microbatch: Microbatch) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(microbatch)]


def _names(microbatch: Microbatch) -> tuple[str, ...]:
    """The fields that hold tokens and the like; the loss scale is one number for all."""
    found = (each.name for each in fields(microbatch) if each.name != "loss_scale")
    return tuple(name for name in found if isinstance(getattr(microbatch, name), Tensor))


def _tensors(microbatch: Microbatch) -> list[Tensor]:
    return [getattr(microbatch, name) for name in _names(microbatch)]


def own_microbatch(microbatch: Microbatch, keys: DrawKeys, device: torch.device) -> Microbatch:
    """A microbatch of the same shapes with memory of its own."""
    scale = torch.ones((), device=device) if microbatch.loss_scale != 1.0 else 1.0
    own: dict[str, Any] = {name: torch.empty_like(getattr(microbatch, name)) for name in _names(microbatch)}
    return replace(microbatch, **own, step=None if microbatch.step is None else keys, loss_scale=scale)
