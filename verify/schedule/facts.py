"""`Facts`: what a schedule alone does not say about the stack that runs it. Each part is optional
and has rules of its own.

Derived from a plan by `plan_facts`, read from a file by `facts_file`, or written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ...core.base.errors import ScheduleError

if TYPE_CHECKING:
    from ...core.schedule.schedule import Schedule
    from .calls import Calls


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes that one microbatch of each stage keeps from its forward to the end of its backward, and the bytes each
    pipeline rank has for them."""

    stage_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]


@dataclass(frozen=True)
class MessageFormats:
    """Shape and type of messages, as text such as `bf16[1,4096,8192]`: `outputs[s]` is what stage s sends forward,
    `inputs[s]` what it allocates to receive. Gradients are sent back in the same formats. `outputs` of the last stage
    and `inputs` of the first are not read.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


Slots = int | tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Where values are kept: the size of a ring per stage (microbatch i in slot i mod size), one size for each
stage, or for each stage the slot of every microbatch, a number that means the same memory wherever it
stands on one pipeline rank."""


@dataclass(frozen=True)
class Buffers:
    """Memory that is used again within a step; None means memory of its own for every microbatch.

    - `activations`: what a forward keeps for its backward;
    - `outputs`: what a forward makes and SEND_F reads; `inputs`: what RECV_F fills, kept for the backward;
    - `output_gradients`: what RECV_B fills, kept until the weight gradient; `input_gradients`: what a
      backward makes and SEND_B reads.

    `recv_buffers` receives of a lane are posted ahead of their place in the list; 0 posts each in its place.
    """

    activations: Slots | None = None
    outputs: Slots | None = None
    inputs: Slots | None = None
    output_gradients: Slots | None = None
    input_gradients: Slots | None = None
    recv_buffers: int = 2

    def table(self, name: str, schedule: Schedule) -> np.ndarray | None:
        """[stage, microbatch] -> slot number, unique on a rank. Raises `ScheduleError` for a
        wrong number of entries."""
        slots: Slots | None = getattr(self, name)
        if slots is None:
            return None
        num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
        given = np.full(num_stages, slots) if isinstance(slots, int) else _array(name, slots)
        if given.shape == (num_stages, num_microbatches):
            return given
        if given.shape != (num_stages,) or (given < 1).any():
            raise ScheduleError(
                f"buffers.{name}={slots!r} does not fit {num_stages} stages x {num_microbatches} microbatches. Give "
                "one ring size of at "
                "least 1, one per stage, or for each stage the slot of every microbatch."
            )
        return ring_slots(given, num_microbatches)


BUFFER_KINDS = ("activations", "outputs", "inputs", "output_gradients", "input_gradients")


def ring_slots(sizes: np.ndarray, num_microbatches: int) -> np.ndarray:
    """[stage, microbatch] -> slot number, for one ring of the given size per stage, no two stages sharing a slot."""
    first = np.cumsum(sizes) - sizes
    return first[:, None] + np.arange(num_microbatches)[None, :] % sizes[:, None]


@dataclass(frozen=True)
class LayerHoldings:
    """The layers of the model in order, and those each stage holds, by name: `embedding`, `layers.0`, ..., `head`."""

    model: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Facts:
    """Everything known besides the schedule. Rules whose part is None are not asked."""

    memory: ActivationMemory | None = None
    messages: MessageFormats | None = None
    buffers: Buffers | None = None
    layers: LayerHoldings | None = None
    collectives: Calls | None = None

    def over(self, other: Facts) -> Facts:
        """These facts, with the parts that are missing here taken from `other`."""
        mine = {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None}
        return replace(other, **mine)

    def require(self, schedule: Schedule) -> None:
        """Raises `ScheduleError` when a part describes another number of stages or ranks than the schedule has."""
        stages, ranks = schedule.num_stages, schedule.num_ranks
        counts: list[tuple[str, Sequence, int]] = []
        if self.memory is not None:
            counts.append(("memory.stage_bytes", self.memory.stage_bytes, stages))
            counts.append(("memory.capacity_bytes", self.memory.capacity_bytes, ranks))
        if self.messages is not None:
            counts += [
                ("messages.outputs", self.messages.outputs, stages),
                ("messages.inputs", self.messages.inputs, stages),
            ]
        if self.layers is not None:
            counts.append(("layers.stages", self.layers.stages, stages))
        for what, given, expected in counts:
            if len(given) != expected:
                raise ScheduleError(f"{what} has {len(given)} entries, but schedule {schedule.name} needs {expected}.")
        if self.collectives is not None and self.collectives.layout.pp != ranks:
            raise ScheduleError(
                f"the collectives are those of pp={self.collectives.layout.pp}, but schedule {schedule.name} has "
                f"{ranks} ranks."
            )
        if self.buffers is not None:
            for name in BUFFER_KINDS:
                self.buffers.table(name, schedule)


def _array(name: str, slots: tuple) -> np.ndarray:
    try:
        return np.array(slots, dtype=np.int64)
    except ValueError as error:
        raise ScheduleError(
            f"buffers.{name}={slots!r} has rows of different lengths. Give each stage a slot per microbatch."
        ) from error
