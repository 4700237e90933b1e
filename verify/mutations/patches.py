"""`Patches` replaces functions and methods of the backend and puts them back; `Broken` does so for all ranks of
one process together."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

Function = Callable[..., Any]
"""What is replaced, and what replaces it."""

_OWN = threading.local()
"""The rank whose scenario this thread runs."""


NO, YES = "no", "yes"
"""Whether anything that was replaced has been called, in the file that says it."""


def unseen() -> None:
    """For patches of which nobody asks whether they were reached."""


class Patches:
    """A context manager that undoes its replacements, the last first; `reached` is called when a
    replaced function is."""

    def __init__(self, reached: Callable[[], None] = unseen) -> None:
        self._undo = ExitStack()
        self._reached = reached
        self.num_replaced = 0

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Sets `owner.name` to `make(what it was)`. `owner` is a class, a module or an object.

        Of a static method, a class method or a property `make` gets and gives the plain function. A function that other
        modules import by name is replaced in the module that calls it. Raises `AttributeError` where there is no such
        name: then the backend has changed, and whoever patches it has to follow.
        """
        raw = inspect.getattr_static(owner, name)
        self.num_replaced += 1
        if isinstance(raw, (staticmethod, classmethod)):
            made: Any = type(raw)(self._seen(make(raw.__func__)))
        elif isinstance(raw, property):
            made = property(self._seen(make(raw.fget)))
        else:
            made = self._seen(make(getattr(owner, name)))
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, raw)
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, made)

    def _seen(self, made: Any) -> Any:
        """The same, recording when it is called. What is no function (a constant, a class) cannot record it,
        and counts as reached."""
        if not isinstance(made, (FunctionType, MethodType, BuiltinFunctionType, partial)):
            self._reached()
            return made

        @wraps(made)
        def seen(*given: object, **named: object) -> object:
            self._reached()
            return made(*given, **named)

        return seen

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self.num_replaced = 0


class Broken:
    """What the ranks of a mutated run do their work in: `breaks(patches)` is applied when the first of a process
    comes, and undone when the last has gone. Can be pickled where `breaks` is a function of a module, or a
    `functools.partial` of one.

    The file `reached`, where one is given, says whether anything that was replaced has been called: a mistake that no
    rank makes proves nothing. There is none where nothing was replaced.
    """

    def __init__(self, breaks: Callable[[Patches], None], reached: Path | None = None):
        self.breaks = breaks
        self.reached = reached
        self._lock = threading.Lock()
        self._patches = Patches(self._note)
        self._num_inside = 0
        self._is_reached = False

    def __reduce__(self) -> tuple[object, ...]:
        return Broken, (self.breaks, self.reached)

    def _note(self) -> None:
        if self.reached is not None and not self._is_reached:
            self._is_reached = True
            self.reached.write_text(YES)

    @contextmanager
    def __call__(self, global_rank: int) -> Iterator[None]:
        """Inside, the backend is broken, and `rank_here` says `global_rank`."""
        _OWN.rank = global_rank
        with self._lock:
            if not self._num_inside:
                self.breaks(self._patches)
                if self.reached is not None and self._patches.num_replaced and not self._is_reached:
                    self.reached.write_text(NO)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._patches.__exit__()


def rank_here() -> int:
    """The rank that calls, from its own thread or from a lane that is named after it. Other threads belong to
    objects that know it."""
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
