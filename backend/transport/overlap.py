"""`CommunicationLane`: collectives that overlap with the products of the thread that asked for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

import torch
from torch import Tensor

from ...core.schedule.action import Action
from ..base.recorder import Recorder

Work = Callable[[], Tensor]


class CommunicationLane:
    """A thread that runs one piece of work after the other, each under the layer and action of whoever started it.

    On a GPU it has a stream of its own, which waits for what the caller has queued, as the caller's stream waits for
    the result. A group is used by one thread at a time: whoever starts work asks for its result before using the group
    again. `waiting` is around that wait.
    """

    def __init__(
        self,
        device: torch.device,
        recorder: Recorder,
        waiting: Callable[[], AbstractContextManager[object]] = lambda: nullcontext(),
    ):
        self._waiting = waiting
        self._recorder = recorder
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._queue,), name="tensor-parallel lane", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def start(self, work: Work, *inputs: Tensor) -> Work:
        """Starts `work`, which reads `inputs`. What comes back, called once, waits for its result, and raises what it
        raised. This thread has let go of both by then: a graph that is captured has their memory in it."""
        # lists, of which the other thread takes the only entry: no thread keeps what it has handed over
        asked, made = [(work, inputs)], Future[list[Tensor]]()
        scope, caller = self._recorder.scope, self._caller_stream()
        ready = caller.record_event() if caller is not None else None

        def run() -> None:
            try:
                made.set_result([self._made(*asked.pop(), scope, ready)])
            except BaseException as error:  # whatever it is, the caller is the one to know
                made.set_exception(error)

        def finish() -> Tensor:
            with self._waiting():
                result = made.result().pop()
            if caller is not None and self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
                result.record_stream(torch.cuda.current_stream(self._device))
            return result

        self._queue.put(run)
        return finish

    def _made(
        self, work: Work, inputs: tuple[Tensor, ...], scope: tuple[Action | None, str], ready: torch.cuda.Event | None
    ) -> Tensor:
        with torch.no_grad(), self._recorder.within(scope), self._own_stream(ready, inputs):
            return work()

    def _caller_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._stream is not None else None

    @contextmanager
    def _own_stream(self, ready: torch.cuda.Event | None, inputs: tuple[Tensor, ...]) -> Iterator[None]:
        if self._stream is None or ready is None:
            yield
            return
        self._stream.wait_event(ready)
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := queue.get()) is not None:
        run()
        del run  # what it holds is not to live until the next one comes
