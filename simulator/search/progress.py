"""The progress of a search on a terminal: plans left, the bound, and the best step so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ...core.base.units import format_s
from .question import Progress


@contextmanager
def watching(stream: TextIO) -> Iterator[Callable[[Progress], None] | None]:
    """What a search tells its progress to while the context lasts; None where `stream` is no terminal."""
    if not stream.isatty():
        yield None
        return
    from rich.console import Console  # a moment to load, and only terminals need it

    with Console(file=stream).status("laying out the space ...") as status:
        yield lambda progress: status.update(progress_text(progress))


def progress_text(progress: Progress) -> str:
    """`12,345 layouts decided; 67 left, none below 8.1 s; best so far 8.2 s`."""
    best = "none yet" if progress.best_s is None else format_s(progress.best_s)
    left = f"{progress.left:,} groups left, none below {format_s(progress.bound_s)}"
    return f"{progress.decided:,} layouts decided; {left}; best so far {best}"
