"""`ReadAhead`: what a rank will ask for next, read while it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ReadAhead(Generic[K, T]):
    """Gives what `read` gives of a key. What `read` raises is raised when its key is asked for."""

    def __init__(self, read: Callable[[K], T]):
        self._read = read
        self._next: tuple[K, Future[T]] | None = None

    def get(self, key: K, then: K | None) -> T:
        """What belongs to a key; from here on `then`, None for nothing, is read in a thread."""
        ready, self._next = self._next, None
        found = ready[1].result() if ready is not None and ready[0] == key else self._read(key)
        if then is not None:
            self._next = then, self._thread.submit(self._read, then)
        return found

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
