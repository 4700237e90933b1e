"""`Patches` replaces functions and methods of the backend and puts them back; `Broken` does so for all ranks of one process together."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

_OWN = threading.local()
"""The rank whose scenario this thread runs."""


class Patches:
    """A context manager that undoes its replacements, the last first."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Sets `owner.name` to `make(what it was)`. `owner` is a class, a module or an object.

        Of a static method, a class method or a property `make` gets and gives the plain function. A function that other modules import by
        name is replaced in the module that calls it. Raises `AttributeError` where there is no such name: then the backend has changed,
        and whoever patches it has to follow.
        """
        raw = inspect.getattr_static(owner, name)
        if isinstance(raw, (staticmethod, classmethod)):
            made: Any = type(raw)(make(raw.__func__))
        elif isinstance(raw, property):
            made = property(make(raw.fget))
        else:
            made = make(getattr(owner, name))
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, raw)
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, made)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class Broken:
    """What the ranks of a mutated run do their work in: `breaks(patches)` is applied when the first of a process comes, and undone when
    the last has gone. Can be pickled where `breaks` is a function of a module, or a `functools.partial` of one."""

    def __init__(self, breaks: Callable[[Patches], None]):
        self.breaks = breaks
        self._lock = threading.Lock()
        self._patches = Patches()
        self._num_inside = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Broken, (self.breaks,)

    @contextmanager
    def __call__(self, global_rank: int) -> Iterator[None]:
        """Inside, the backend is broken, and `rank_here` says `global_rank`."""
        _OWN.rank = global_rank
        with self._lock:
            if not self._num_inside:
                self.breaks(self._patches)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._patches.__exit__()


def rank_here() -> int:
    """The rank that calls, from its own thread or from a lane that is named after it. Other threads belong to objects that know it."""
    rank = getattr(_OWN, "rank", None)
    if rank is None:
        named = re.match(r"rank (\d+)", threading.current_thread().name)
        assert named is not None, f"thread {threading.current_thread().name!r} belongs to no rank that it names"
        rank = int(named[1])
    return rank


def on_ranks(*ranks: int) -> Callable[[], bool]:
    """Asks whether the rank that calls is one of these; without any it always is."""
    return partial(_is_among, frozenset(ranks))


def _is_among(ranks: frozenset[int]) -> bool:
    return not ranks or rank_here() in ranks
