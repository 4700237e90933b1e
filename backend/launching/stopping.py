"""How the process that started ranks has them stop: a signal to it, or to any of them, is passed on to all."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

from ...core.base.interrupts import Interrupted
from ...core.base.terminal import say
from ..watch.stop import StopRequest, over_budget, stop_signals


class Stopping:
    """A job's request to stop. `budget_s` is how long its ranks may take to leave after the first signal."""

    def __init__(self, budget_s: float):
        self.budget_s, self._request = budget_s, StopRequest()
        self._deadline_s: float | None = None
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the body runs, signals to this process are requests."""
        try:
            with stop_signals(self.ask):
                yield
        finally:
            self._wakes.close()
            self._wake.close()

    def ask(self, number: int) -> None:
        """A signal has come, here or to a rank: whoever waits for `wakes` is woken."""
        if not self._request.number:
            self._request.ask(number)
            self._deadline_s = time.monotonic() + self.budget_s
            self._wake.send(b"s")

    @property
    def wakes(self) -> socket.socket:
        """What can be read from when there is a request that `take` has not given yet."""
        return self._wakes

    def take(self) -> int:
        """The signal that is to be passed on to ranks, once; 0 where there is none, or they know."""
        with contextlib.suppress(BlockingIOError):
            if self._wakes.recv(1):
                return self._request.number
        return 0

    @property
    def deadline_s(self) -> float | None:
        """When ranks must have left, as `time.monotonic` counts; None while nobody asked."""
        return self._deadline_s

    def check(self) -> None:
        """Raises `Interrupted` when the time is over, and says what that means."""
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            say(over_budget(self._request.number, self.budget_s), sys.stderr, flush=True)
            raise Interrupted(self._request.number)
