"""`ShownLater`: an observer of what a captured step computes, to whom every replay is shown when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .microbatch import Microbatch
from .observe import Observer, Slices
from .streams import is_captured

Show = Callable[[], None]


class ShownLater:
    """Stands between a rank and its observer. Outside of a capture what is shown is shown at once. Inside it is copied,
    as a part of what is captured, and the observer is shown the copies after each replay, in the order of the walk."""

    def __init__(self, observer: Observer):
        self._observer: Any = observer
        self._shown: list[Show] = []
        self.meant: Callable[[Microbatch], Microbatch] = lambda microbatch: microbatch
        """The microbatch that is replayed, by the one that was captured."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def take(self) -> tuple[Show, ...]:
        """What shows the observer a replay of what has been captured since the last call."""
        found, self._shown = tuple(self._shown), []
        return found

    def activation(self, name: str, microbatch: Microbatch, tokens: tuple[slice, ...], tensor_BSH: Tensor) -> None:
        """As the observer's."""
        self._with_gradient(self._observer.activation, tensor_BSH, name, microbatch, tokens)

    def recomputed(self, name: str, microbatch: Microbatch, tokens: tuple[slice, ...] | None, tensor: Tensor) -> None:
        """As the observer's."""
        self._with_gradient(self._observer.recomputed, tensor, name, microbatch, tokens)

    def brought(self, name: str, slices: Slices, tensor: Tensor) -> None:
        """As the observer's."""
        self._alone(self._observer.brought, tensor, name, slices)

    def gathered(self, name: str, slices: Slices, tensor: Tensor) -> None:
        """As the observer's."""
        self._alone(self._observer.gathered, tensor, name, slices)

    def _alone(self, show: Callable[..., None], tensor: Tensor, *what: Any) -> None:
        if not is_captured(tensor.device):
            show(*what, tensor)
            return
        copy = tensor.detach().clone()
        self._shown.append(lambda: show(*self._today(what), copy))

    def _today(self, what: Sequence[Any]) -> list[Any]:
        return [self.meant(each) if isinstance(each, Microbatch) else each for each in what]

    def _with_gradient(self, show: Callable[..., None], tensor: Tensor, *what: Any) -> None:
        if not is_captured(tensor.device) or not tensor.requires_grad:
            self._alone(show, tensor, *what)
            return
        copy, shown = tensor.detach().clone(), list[Tensor]()

        def forward() -> None:
            shown[:] = [copy.detach().requires_grad_()]
            show(*self._today(what), *shown)

        def backward(gradient: Tensor) -> None:
            of_copy = gradient.detach().clone()
            # who asked for the gradient of what it was shown hears of it
            self._shown.append(lambda: torch.autograd.backward(shown.pop(), of_copy))

        self._shown.append(forward)
        tensor.register_hook(backward)
