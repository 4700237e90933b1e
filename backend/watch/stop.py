"""`StopRequest`: that somebody wants a run to save and leave when its step is done, and who hears of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from ...core.base.interrupts import ENDING_SIGNALS, SIGNAL_EXIT, Interrupts
from ...core.base.terminal import say

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""After which a run with a folder of checkpoints saves and leaves. Slurm and Kubernetes send SIGTERM, and Slurm what
`--signal` names, for which SIGUSR1 is usual."""

SERVER_BLOCKS = frozenset({*ENDING_SIGNALS, *STOPPING_SIGNALS})
"""What the server of ranks does not get, as it must outlive them: Slurm sends signals to all processes of a job."""


class StopRequest:
    """`number` is the first signal that has come to this process, or that was passed on to it; 0 while none has."""

    number = 0

    def ask(self, number: int) -> None:
        """A signal has come. Later ones change nothing: launchers repeat what the system has sent to all."""
        self.number = self.number or number


@contextlib.contextmanager
def stop_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, the signals are given to `on_signal`, in the main thread, and end nothing. What is ignored
    stays so, and so does a handler of the user's own; outside the main thread nothing changes."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING_SIGNALS:
            handler = signal.getsignal(number)
            if handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Interrupts):
                before[number] = signal.signal(number, lambda number, _: on_signal(number))
                signal.siginterrupt(number, False)  # libraries need not know what to do with EINTR
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping_here(stop: StopRequest, budget_s: float) -> Iterator[None]:
    """`stop_signals` for a rank that nobody of ours watches over: where the body is not over `budget_s` after the first
    signal, the process ends with a shell's exit code for it. The first rank of a host says so."""
    timers: list[threading.Timer] = []

    def asked(number: int) -> None:
        stop.ask(number)
        if not timers:
            timers.append(threading.Timer(budget_s, end, [number]))
            timers[0].daemon = True
            timers[0].start()

    def end(number: int) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(over_budget(number, budget_s), sys.stderr, flush=True)
        os._exit(SIGNAL_EXIT + number)

    with stop_signals(asked):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()


def over_budget(number: int, budget_s: float) -> str:
    """What is said when a run has not left in time."""
    return (
        f"{signal.Signals(number).name}: step and checkpoint were not done within checkpoint.stop_budget_s={budget_s:g}"
        ", so --resume goes on from the checkpoint before it, if there is one."
    )
