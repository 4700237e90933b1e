"""What layers keep for their backward, in host memory meanwhile (`offload.activations`).

A layer's saved tensors are copied when they are saved, under the products that follow. Their memory of the device is
let go of when the next layer, or the forward, has ended: the compute stream then comes after the copies, so that
nothing waits in the allocator. In the backward a layer's tensors come back while the layer behind it computes. Saved
views share one copy of what they are views of. Weights and what lives longer anyway stay where they are.

Hooks of saved tensors (`torch.autograd.graph.saved_tensors_hooks`) see what autograd saves; what a layer keeps besides,
to compute a tensor again, it gives to `Retained` itself (`LayerContext.keep`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .host_copies import HostCopies
from .streams import Moment, wait_for

Stays = Callable[[int], bool]
"""Whether the storage at an address is of something that lives on, weights say, and stays on the device."""


class _Stored:
    """One storage: on the device until it has been copied, in a buffer of the host, and on the device again. The buffer
    is free when nobody holds this any more, which autograd does until the backward is through."""

    def __init__(self, copies: HostCopies, device_copy: Tensor):
        """`device_copy` is the whole storage as one row of elements."""
        self.on_device: Tensor | None = device_copy
        self.length, self.dtype = len(device_copy), device_copy.dtype
        self._copies = copies
        self._buffer = copies.take(device_copy.nbytes)
        self.sent = copies.send([(self.host, device_copy)])
        self.brought: Moment = None

    @property
    def host(self) -> Tensor:
        """The bytes in the buffer, as elements."""
        return self._buffer[: self.length * self.dtype.itemsize].view(self.dtype)

    def again(self) -> Tensor:
        """Memory of the device for it, allocated by the current stream."""
        self.on_device = torch.empty(self.length, dtype=self.dtype, device=self._copies.device)
        return self.on_device

    def __del__(self) -> None:
        self._copies.give_back(self._buffer)


class Saved:
    """A tensor that was saved, as a view of a `_Stored`."""

    def __init__(self, stored: _Stored, tensor: Tensor):
        self.stored = stored
        self._place = tensor.size(), tensor.stride(), tensor.storage_offset()

    def __call__(self) -> Tensor:
        """The tensor, on the device."""
        if self.stored.on_device is None:  # asked for outside of its layer's backward
            _fetch(self.stored._copies, [self.stored])
            wait_for(self.stored.brought, self.stored._copies.device)
        assert self.stored.on_device is not None
        return self.stored.on_device.as_strided(*self._place)


def _fetch(copies: HostCopies, stored: list[_Stored]) -> Moment:
    """Begins to bring storages back."""
    moment = copies.bring([(each.again(), each.host) for each in stored])
    for each in stored:
        each.brought = moment
    return moment


class Retained:
    """What one layer keeps of one microbatch."""

    def __init__(self, copies: HostCopies, stays: Stays):
        self._copies = copies
        self._stays = stays
        # By address and format while the layer runs; then those that somebody still holds.
        self._sending: dict[tuple[int, torch.dtype], _Stored] = {}
        self._held: list[weakref.ref[_Stored]] = []
        self._brought: Moment = None
        self._is_fetched = False

    def hooks(self) -> AbstractContextManager[None]:
        """Inside, what autograd saves is given to `pack`."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _unpacked)

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """Begins to copy a tensor, and says where it is found again."""
        storage, element = tensor.untyped_storage(), tensor.element_size()
        if not tensor.numel() or storage.nbytes() % element or self._stays(storage.data_ptr()):
            return tensor.detach()  # not the tensor itself: its grad_fn would keep itself alive
        key = storage.data_ptr(), tensor.dtype
        if key not in self._sending:
            whole = tensor.detach().as_strided((storage.nbytes() // element,), (1,), 0)
            self._sending[key] = _Stored(self._copies, whole)
        return Saved(self._sending[key], tensor)

    def settle(self) -> None:
        """The current stream comes after the copies, and lets go of the memory of the device."""
        for each in self._sending.values():
            wait_for(each.sent, self._copies.device)
            each.on_device = None
        self._held += map(weakref.ref, self._sending.values())
        self._sending.clear()

    def fetch(self) -> None:
        """Begins to bring back what is still held, once."""
        stored = [each for ref in self._held if (each := ref()) is not None]
        if not self._is_fetched and stored:
            self._brought = _fetch(self._copies, stored)
        self._is_fetched = True

    def arrive(self) -> None:
        """The current stream may read it."""
        self.fetch()
        wait_for(self._brought, self._copies.device)

    def let_go(self) -> None:
        """The layer's backward is through: what is held beyond it comes again when it is asked for."""
        for ref in self._held:
            if (each := ref()) is not None:
                each.on_device = None


def _unpacked(saved: Any) -> Tensor:
    tensor: Tensor = saved() if isinstance(saved, Saved) else saved
    return tensor


class StageOffload:
    """One forward of a stage, and its backward: which layer's tensors go and come when."""

    def __init__(self, copies: HostCopies, num_layers: int, stays: Stays):
        """The first `num_layers` keep theirs in host memory."""
        self._copies = copies
        self._num_layers = num_layers
        self._stays = stays
        self._retained: list[Retained | None] = []

    def layer(
        self, run: Callable[[Tensor], Tensor], x: Tensor, keeping: Callable[[Retained], AbstractContextManager[None]]
    ) -> Tensor:
        """`run(x)`, the next layer; one that keeps its tensors in host memory runs inside `keeping`."""
        number, before = len(self._retained), self._retained[-1] if self._retained else None
        retained = Retained(self._copies, self._stays) if number < self._num_layers else None
        self._retained.append(retained)
        if retained is None:
            y = run(x)
        else:
            with keeping(retained), retained.hooks():
                y = run(x)
        if before is not None:
            before.settle()
        if y.grad_fn is not None and (retained is not None or before is not None):
            y.grad_fn.register_prehook(functools.partial(self._comes_to, number))
        return y

    def finish(self, output: Tensor) -> None:
        """The forward has ended: nothing of it is on the device that is in host memory."""
        for retained in self._retained:
            if retained is not None:
                retained.settle()
        if output.grad_fn is not None and self._retained and self._retained[-1] is not None:
            output.grad_fn.register_prehook(lambda _: self._fetch(len(self._retained) - 1))

    def _comes_to(self, number: int, _: Any) -> None:
        """The backward begins with a layer: its tensors are needed, those of the layer behind no more, and those of the
        one before it soon."""
        own, behind = self._retained[number], self._retained[number + 1] if number + 1 < len(self._retained) else None
        if behind is not None:
            behind.let_go()
        if own is not None:
            own.arrive()
        if number:
            self._fetch(number - 1)

    def _fetch(self, number: int) -> None:
        retained = self._retained[number]
        if retained is not None:
            retained.fetch()
