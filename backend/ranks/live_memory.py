"""`LiveMeter`: the bytes of all tensor storages of one rank while they live, over all of its threads, and
the action at their peak.

Every operation that a watched thread dispatches is looked at: a storage counts from the first operation that makes or
reads it until it is freed, whoever frees it. So saved activations, gradients, messages and temporary tensors all
count; scratch memory inside a kernel, and what the allocator rounds up, do not. Looking costs some microseconds an
operation: steps whose seconds count run without.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.schedule.action import Action
from ...core.schedule.timeline import MemorySample


class _Scope(threading.local):
    """What the current thread is working on."""

    action: str = ""


class LiveMeter:
    """Counts live storages. `hold` what is there already, then run every thread of the rank inside `watch()`.

    `peak_bytes` is the most held so far, `peak_action` the compute lane's action then; that of the lane which made the
    storage where no compute action ran, "" where none did.
    """

    def __init__(self, global_rank: int, elsewhere: Callable[[Any], bool] = lambda storage: False):
        """Storages that are `elsewhere`, in host memory, do not count."""
        self.samples: list[MemorySample] = []
        self.peak_bytes = 0
        self.peak_action = ""
        self._global_rank = global_rank
        self._elsewhere = elsewhere
        # Lanes of one rank count here; reentrant, as a storage may be freed while another is counted.
        self._lock = threading.RLock()
        # Live storages by address. The bytes of freed ones come into `_freed` from finalizers, which may run inside the
        # lock, and are taken off the sum at the next operation.
        self._known: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[int] = deque()
        self._live_bytes = 0
        self._most_bytes = 0
        # The compute lane's action now, and the action of each other thread.
        self._compute = ""
        self._scope = _Scope()

    @property
    def live_bytes(self) -> int:
        """Bytes of all storages that live now."""
        with self._lock:
            self._settle()
            return self._live_bytes

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of tensors made before anybody watched, such as weights."""
        for tensor in tensors:
            self._see(tensor)

    def watch(self) -> AbstractContextManager[object]:
        """Inside, every operation of the calling thread is looked at."""
        return _Watch(self)

    @contextmanager
    def during(self, action: Action, *, compute: bool) -> Iterator[None]:
        """Inside, the calling thread works on `action`; `compute` says that it is the compute lane's."""
        before, self._scope.action = self._scope.action, str(action)
        if compute:
            self._compute = str(action)
        try:
            yield
        finally:
            self._scope.action = before
            if compute:
                self._compute = ""

    def forward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Nothing to do: what a forward keeps lives."""
        return nullcontext()

    def release(self, stage: int, microbatch: int) -> None:
        """Nothing to do: what a backward lets go of does not live."""

    def sample(self, time_s: float) -> None:
        """Notes the most held since the last sample, and what is held from `time_s` on."""
        with self._lock:
            self._settle()
            start_s = self.samples[-1].time_s if self.samples else time_s
            if self._most_bytes > self._live_bytes:
                self.samples.append(MemorySample(self._global_rank, start_s, self._most_bytes))
            self.samples.append(MemorySample(self._global_rank, time_s, self._live_bytes))
            self._most_bytes = self._live_bytes

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known or not num_bytes or self._elsewhere(storage):
            return
        with self._lock:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, num_bytes))
            self._settle()
            self._live_bytes += num_bytes
            self._most_bytes = max(self._most_bytes, self._live_bytes)
            if self._live_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_action = self._live_bytes, self._compute or self._scope.action

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.pop(key, None)
        self._freed.append(num_bytes)

    def _settle(self) -> None:
        """Takes off what was freed. Frees come at any moment in any thread, so they only queue up."""
        while self._freed:
            self._live_bytes -= self._freed.popleft()


class _Watch(TorchDispatchMode):
    """Shows a meter every tensor that goes into or comes out of an operation."""

    def __init__(self, meter: LiveMeter):
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look(args)
        result = func(*args, **(kwargs or {}))
        self._look(result)
        return result

    def _look(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._meter._see(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._look(item)
