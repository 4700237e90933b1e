"""How many blocks a kernel that meets may have: no more than run at the same time, and as many on every peer.

A block that waits for its peers never leaves its multiprocessor. Were there more blocks than fit, those that wait could
wait for blocks of a peer whose place is taken by others that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WARP = 32
REGISTER_UNIT = 256
"""Registers are given to a warp in such parts (CUDA C++ Programming Guide, "Compute Capabilities", 5.0 to 12.0)."""
WARP_UNIT = 4
"""Warps that registers suffice for are counted in such parts: one for each scheduler of a multiprocessor."""
SHARED_UNIT = 128
RESERVED_SHARED_BYTES = 1024
"""What the system takes of shared memory for each block, from compute capability 8.0 on."""
BLOCKS_PER_MULTIPROCESSOR = {(8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32, (10, 3): 32}
"""By compute capability; 16, the least of all, where it is not here."""


@dataclass(frozen=True)
class DeviceLimits:
    """What one device can hold at the same time."""

    multiprocessors: int
    registers: int
    warps: int
    blocks: int
    shared_bytes: int

    @classmethod
    def of(cls, properties: Any) -> DeviceLimits:
        """From what `torch.cuda.get_device_properties` returns. All but the first are of one multiprocessor."""
        capability = (properties.major, properties.minor)
        return cls(
            multiprocessors=properties.multi_processor_count,
            registers=properties.regs_per_multiprocessor,
            warps=properties.max_threads_per_multi_processor // WARP,
            blocks=BLOCKS_PER_MULTIPROCESSOR.get(capability, 16),
            shared_bytes=properties.shared_memory_per_multiprocessor,
        )


@dataclass(frozen=True)
class KernelUse:
    """What one block of a compiled kernel takes: registers of a thread, shared memory, warps."""

    registers: int
    shared_bytes: int
    warps: int


@dataclass(frozen=True)
class Grid:
    """A number of blocks, and what it is limited by: `work`, `signal pads`, `registers`, `warps`, `blocks` or
    `shared memory` of a multiprocessor, or `a peer`."""

    num_blocks: int
    limit: str


def resident_blocks(use: KernelUse, device: DeviceLimits) -> Grid:
    """How many blocks of a kernel are on a multiprocessor at the same time, by the rules of NVIDIA's occupancy
    calculator. Raises `ValueError` where not even one fits.

    >>> h100 = DeviceLimits(multiprocessors=132, registers=65536, warps=64, blocks=32, shared_bytes=233472)
    >>> resident_blocks(KernelUse(registers=72, shared_bytes=0, warps=4), h100)
    Grid(num_blocks=7, limit='registers')
    """
    of_warp = _up(use.registers * WARP, REGISTER_UNIT)
    by_registers = device.registers // of_warp // WARP_UNIT * WARP_UNIT if of_warp else device.warps
    limits = {
        "registers": by_registers // use.warps,
        "warps": device.warps // use.warps,
        "blocks": device.blocks,
        "shared memory": device.shared_bytes // _up(use.shared_bytes + RESERVED_SHARED_BYTES, SHARED_UNIT),
    }
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] == 0:
        raise ValueError(f"no block of {use} fits on a multiprocessor of {device}: {limit} do not suffice.")
    return Grid(limits[limit], limit)


def meeting_grid(use: KernelUse, device: DeviceLimits, *, work_blocks: int, pad_blocks: int, sharing: int = 1) -> Grid:
    """The blocks of a kernel that meets: at least one, at most what is resident, what has work to do (`work_blocks`)
    and what the signal pads have room for (`pad_blocks`).

    It assumes that nothing else runs on the device's multiprocessors for ever: `sharing` is how many kernels that meet
    may run there at a time, on streams of their own; each has its share.
    """
    if pad_blocks < 1:
        raise ValueError("the signal pads have no room for one block. Allocate blocks x world size x 4 bytes.")
    per_multiprocessor = resident_blocks(use, device)
    resident = per_multiprocessor.num_blocks * device.multiprocessors
    if resident < sharing:
        raise ValueError(f"{resident} blocks of {use} fit on {device}: not one for each of {sharing} kernels.")
    limits = [
        Grid(resident // sharing, per_multiprocessor.limit),
        Grid(max(1, work_blocks), "work"),
        Grid(pad_blocks, "signal pads"),
    ]
    return min(limits, key=lambda grid: grid.num_blocks)


def agreed_grid(own: Grid, gather: Callable[[int], Sequence[int]]) -> Grid:
    """The grid that all peers launch: the least of theirs. `gather` returns every rank's number; called once, when the
    kernel is made, never by a rank alone."""
    least = min(gather(own.num_blocks))
    return own if least == own.num_blocks else Grid(least, "a peer")


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
