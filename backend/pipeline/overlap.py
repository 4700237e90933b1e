"""`PairRunner`: the two parts of an OVERLAP_F_B pair in turns (DeepSeek-V3, arXiv 2412.19437, section
3.2.1; Megatron-Core, `combined_1f1b.py`), a thread each. Who computes when, and by which communicators,
is `transport.baton`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import torch

from ..transport.baton import Baton, Wait
from ..watch.watch import BACKWARD_LANE


class PairRunner:
    """Runs the parts of pairs: one in the calling thread, the other in a thread that lives as long as this object."""

    def __init__(self, global_rank: int, baton: Baton, device: torch.device):
        self.baton = baton
        self._device = device
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        name = f"rank {global_rank} lane {BACKWARD_LANE}"
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Both parts, the forward first to compute. Raises what one of them raised; the other ends at its next turn."""
        ended: Future[None] = Future()
        self.baton.begin()
        stream = self._caller_stream()

        def on_lane() -> None:
            try:
                with stream, torch.autograd.set_multithreading_enabled(False), self.baton.held():
                    backward()
                ended.set_result(None)
            except BaseException as error:  # whatever it is, the caller is the one to know
                self.baton.fail(error)
                ended.set_exception(error)

        try:
            with self.baton.held():
                self._queue.put(on_lane)
                forward()
        except BaseException as error:
            self.baton.fail(error)
            raise
        ended.result()

    def take_waits(self) -> list[Wait]:
        """The collectives that the parts have waited for since the last call."""
        waits, self.baton.waits = self.baton.waits, []
        return waits

    def _caller_stream(self) -> AbstractContextManager[object]:
        """On a GPU both parts queue their kernels where the caller does: allocations are made
        and freed in one order."""
        return (
            torch.cuda.stream(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else nullcontext()
        )


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := queue.get()) is not None:
        run()
        del run  # what it holds is not to live until the next one comes
