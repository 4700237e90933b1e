"""SIGINT and SIGTERM in a program of ours: an exception in the main thread, so that all that is open is
closed on the way out, and an end also where that thread does not come back from a library, as from a
collective that its peers have left."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import weakref
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)

SIGNAL_EXIT = 128
"""A shell's exit code of a program that a signal ended is this and the signal's number: 130 and 143."""
PASSED_ON_S = 0.1
"""So long the main thread may take to notice before it is notified once more."""
STUCK_S = 2.0
"""So long the main thread may stay in a library's call. What it has open is then left to the
server of ranks to remove."""
UNWIND_S = 20.0
"""So long it may then take to close what is open: less than the 30 s after which torchrun and Slurm kill."""


class Interrupted(KeyboardInterrupt):
    """The signal `number` has come."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Interrupts:
    """Turns the signals into `Interrupted` from now to the end of the process; those that are
    ignored, as by nohup, stay so.

    While one is on its way through the main thread others change nothing, so that what closes is not interrupted:
    launchers repeat what the terminal has sent. `came` is the first signal's number. For the main thread alone;
    `command` begins the line that reports the end. Who takes over a signal for a while sees to it alone.
    """

    def __init__(self, command: str):
        self.came: int | None = None
        self._command = command
        # The signal whose line has been printed: one line, whoever asks first.
        self._reported: int | None = None
        # Set when the exit code is known: later signals raise nothing.
        self._is_over = False
        # The exception on its way through the main thread; the reference is dead when somebody has swallowed it.
        self._raised: weakref.ref[Interrupted] | None = None
        # Set by the handler, so that the watching thread knows that the main thread has run it.
        self._noticed = threading.Event()
        atexit.register(self._end)  # the first to register is the last to be called
        # A pipe that the interpreter writes to as soon as a signal arrives, even while the main thread is inside a C
        # call: the watching thread reads it.
        self._wakes, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake = wake
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def over(self) -> None:
        """From now on nothing is raised: the exit code is known, and what is left is to leave."""
        self._is_over = True

    def report(self, number: int) -> int:
        """One line on standard error, the first time and once on a host that runs several ranks, and the exit code."""
        if self._reported is None:
            self._reported = number
            if sys.__stderr__ is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                with contextlib.suppress(OSError):  # also while the other thread holds the stream's lock
                    os.write(
                        sys.__stderr__.fileno(),
                        (f"{self._command}: ended by {signal.Signals(number).name}.\n").encode(),
                    )
        return SIGNAL_EXIT + number

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.came = self.came or number
        self._noticed.set()
        if self._is_over or (self._raised is not None and self._raised() is not None):
            return
        raise self._interrupted(number)

    def _interrupted(self, number: int) -> Interrupted:
        """The exception, which this object does not keep: when a library has swallowed it, it is gone and
        the next signal counts."""
        error = Interrupted(number)
        self._raised = weakref.ref(error)
        return error

    def _watch(self) -> None:
        """Runs in a thread of its own: ends the process where the main thread does not."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        number = 0
        while number not in ENDING_SIGNALS or signal.getsignal(number) != self._handle:
            number = self._wakes.recv(1)[0]
        # the system may give a signal to any thread, and then wakes only that one
        if not self._noticed.wait(PASSED_ON_S):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        if self._noticed.wait(STUCK_S):
            threading.Event().wait(UNWIND_S)
        os._exit(self.report(number))

    def _end(self) -> None:
        """The last thing that a process does which a signal has ended: libraries would join
        threads that wait for peers."""
        if self._reported is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
                    stream.flush()
            os._exit(SIGNAL_EXIT + self._reported)
