"""`PendingSave`: a checkpoint that is written while training goes on, as one rank sees it.

Background threads write files and nothing else. What ranks have to say to each other they say between two steps, in the
thread that trains: so a save needs no communicator of its own, and works over every transport. First every rank writes
its files. When all have said that they are done, the first rank puts the index down and gives the folder its name; when
it has said that it is done, the checkpoint is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...core.base.errors import error_words
from ..base.host_copies import HostCopies
from ..base.streams import Moment, wait_for
from ..base.urls import Place
from .tensors import Key, Piece, Share


class Task:
    """Work in a thread of its own, which ends with the process."""

    def __init__(self, name: str, work: Callable[[], Any]):
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = work()
            except BaseException as error:  # it belongs to who asks for the value
                self._error = error

        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the work is over."""
        return not self._thread.is_alive()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._started_s

    def wait(self, limit_s: float) -> None:
        """Returns when it is over, whether well or not, and after so many seconds."""
        self._thread.join(max(0.0, limit_s))

    @property
    def answer(self) -> dict[str, Any]:
        """`value`, or the words of an `error`, when the work is over: as ranks send it to each other."""
        return {"value": self._value} if self._error is None else {"error": error_words(self._error)}


@dataclass(eq=False)
class PendingSave:
    """The checkpoint after so many `steps` on its way: into the folder `partial`, which becomes `path`. `task` is what
    this rank is doing for it; `rest` is what is to be done after all have written their files, of which the task is the
    last one that began."""

    steps: int
    partial: Path
    path: Place
    share: Share
    task: Task
    rest: Iterator[Callable[[], None]] | None = None


class Snapshots:
    """Copies of what a rank writes, in host memory that is kept from save to save: as much as its part of a checkpoint.
    Memory of a CPU that is asked for anew costs more than the copy, as the system fills it with zeros first.

    From a GPU they are made while it computes on, until it changes the values: `settle` comes before that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[Key, torch.Tensor] = {}
        self._host: HostCopies | None = None
        self._under_way: tuple[Moment, Sequence[Piece]] = None, ()

    @torch.no_grad()
    def of(self, pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], Moment]:
        """The same pieces, with copies of their values as they are now, and the moment from which the copies may be
        read."""
        if self._host is None:
            self._host = HostCopies(self._device)
        before, self._copies = self._copies, {}
        for piece in pieces:
            values, copy = piece.tensor, before.get(piece.key)
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = self._host.empty(values.numel(), values.dtype).view(values.shape)
            self._copies[piece.key] = copy
        moment = self._host.send((self._copies[piece.key], piece.tensor.detach()) for piece in pieces)
        self._under_way = moment, pieces
        return tuple(replace(piece, tensor=self._copies[piece.key]) for piece in pieces), moment

    def settle(self) -> None:
        """What the current stream is given next, which may change the values, comes after they have been copied."""
        moment, _ = self._under_way
        wait_for(moment, self._device)
        self._under_way = None, ()
