"""The formats that a plan is written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..base.errors import UnknownNameError
from ..plan.plan import Plan
from .exported import Exported


@dataclass(frozen=True)
class Writer:
    """One format. `write` makes the files of a plan, and says what of it they cannot say."""

    name: str
    title: str
    write: Callable[[Plan], Exported]


def _megatron(plan: Plan) -> Exported:
    from .megatron_write import write

    return write(plan)


WRITERS: tuple[Writer, ...] = (Writer("megatron", "a script of Megatron-LM's arguments", _megatron),)


def writer_named(name: str) -> Writer:
    """The writer of this name. Raises `UnknownNameError`."""
    for each in WRITERS:
        if each.name == name:
            return each
    raise UnknownNameError("format", name, (each.name for each in WRITERS))
