"""What an exception of a rank says: in which action and layer it was, on which line, and whose mistake it is.

Looked at in the rank, while the exception has its traceback. An exception that nobody foresaw is a defect of ours,
unless code that is not ours was called on the way to it: a user's own layers, or whoever wants to hear of steps.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from ...core.base.errors import ShardproofError, line_words
from ...core.schedule.action import Action
from ..base.recorder import Recorder
from .watch import RankWatch

Whose = Literal["foreseen", "own code", "defect"]
"""Of the user's input or the machine; of code that the user brought; ours."""

FORESEEN = (
    ShardproofError,
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
    torch.distributed.DistError,
    ModuleNotFoundError,
    SystemExit,
    KeyboardInterrupt,
)
"""What plans, files, machines and peers cause: bad input, full disks and memories, packages that are not there."""

NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""How torch's allocator of CPU memory begins what it says, in a plain `RuntimeError` (c10/core/impl/alloc_cpu.cpp)."""

ROOMS = tuple(f"{__name__.split('.')[0]}.{room}." for room in ("core", "simulator", "verify", "viz", "backend"))
LAUNCHING = tuple(f"{__name__.split('.')[0]}.backend.{module}" for module in ("launching.rank", "transport.memory"))
"""Modules that call a job, whatever it is."""
LIBRARIES = ("torch", "numpy", "safetensors")
STDLIB = sysconfig.get_path("stdlib")


def whose(error: BaseException) -> Whose:
    """Whose mistake an exception is that ended a rank."""
    if isinstance(error, FORESEEN) or (isinstance(error, RuntimeError) and NO_MEMORY in str(error)):
        return "foreseen"
    path = _path(error)
    return "defect" if path and all(_is_ours(frame) for frame, _ in path) else "own code"


def place_of(error: BaseException, recorder: Recorder | None = None, watch: RankWatch | None = None) -> str:
    """Where a rank was: `, in 2B3 (step 1, microbatch 3) at layers.0.mlp.down, in finish (tree.py:42: assert done)`.

    `recorder` and `watch` are the rank's own. Empty for an exception of a job that had not called anything of ours.
    """
    path = _path(error)
    if not path:
        return ""
    brought = [step for step in path if not _is_ours(step[0])]
    line = f", in {_line(*path[-1])}"
    if brought and brought[-1] is not path[-1]:
        line += f", called by {_line(*brought[-1])}"
    phase = "" if watch is None else watch.phase
    if recorder is None or recorder.failed is None:
        return (f", in {phase}" if phase else ", before the first step") + line
    return _action_words(*recorder.failed, phase) + line


def _action_words(action: Action, layer: str, phase: str) -> str:
    numbers = [each.microbatch for each in action.parts if each.microbatch is not None]
    when = [phase] * bool(phase) + [f"microbatch {number}" for number in numbers]
    return f", in {action}" + f" ({', '.join(when)})" * bool(when) + f" at {layer}" * bool(layer)


def _path(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames on the way to an exception, with their lines, that are ours or of brought code, from the first of ours
    on. Empty where a job of somebody else had not come to anything of ours.

    Lanes of one rank raise the same exception object, so frames of other threads may stand before those of the job.
    """
    steps = [step for step in traceback.walk_tb(error.__traceback__) if not _is_library(step[0])]
    called = max((at + 1 for at, (frame, _) in enumerate(steps) if _launches(frame)), default=0)
    first = next((at for at, (frame, _) in enumerate(steps) if at >= called and _is_ours(frame)), len(steps))
    return steps[first:]


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(ROOMS)


def _launches(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in LAUNCHING


def _is_library(frame: FrameType) -> bool:
    """Python's own modules and those that this package is made with."""
    package, path = str(frame.f_globals.get("__name__", "")).partition(".")[0], Path(frame.f_code.co_filename)
    inside = path.is_relative_to(STDLIB) and "site-packages" not in path.parts
    return package in LIBRARIES or inside or not path.is_absolute()  # such as <frozen importlib>


def _line(frame: FrameType, line: int) -> str:
    return line_words(frame.f_code.co_name, frame.f_code.co_filename, line)
