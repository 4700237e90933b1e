"""The formats that are read, and which of them a file has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..base.errors import UnknownNameError
from . import accelerate, bridge, deepspeed, megatron, torchtitan
from .account import Imported, Request


@dataclass(frozen=True)
class Reader:
    """One format. `recognises` says whether a file is of this format, from its name and text, and is never true of a
    plan.toml; `read` accounts for every setting, and raises `PlanError` for a file that is not readable at all."""

    name: str
    title: str
    recognises: Callable[[Request], bool]
    read: Callable[[Request], Imported]


READERS: tuple[Reader, ...] = (
    Reader("megatron", "Megatron-LM's arguments and shell scripts", megatron.recognises, megatron.read),
    Reader("torchtitan", "torchtitan's TOML, JSON and Python configurations", torchtitan.recognises, torchtitan.read),
    Reader("bridge", "Megatron-Bridge's run_config.yaml", bridge.recognises, bridge.read),
    Reader("deepspeed", "DeepSpeed's JSON", deepspeed.recognises, deepspeed.read),
    Reader("accelerate", "accelerate's YAML", accelerate.recognises, accelerate.read),
)
"""The first that recognises a file reads it."""


def reader_of(request: Request, name: str | None = None) -> Reader | None:
    """The reader of this file: the named one, else the first that recognises it; None for a plan.toml, and for what no
    reader knows. Raises `UnknownNameError`."""
    if name is None:
        return next((each for each in READERS if each.recognises(request)), None)
    for each in READERS:
        if each.name == name:
            return each
    raise UnknownNameError("format", name, (each.name for each in READERS))
