"""`Block`: the threads of one block, their registers and memory, and how operands of instructions are read and written.

A register is an array with one value of its declared width for each thread (bool for predicates), never changed in
place. `active` says which threads carry an instruction out; None stands for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .ptx_instructions import dtype_of, width_of
from .ptx_memory import Memory, Multicast, Shared, Users
from .ptx_parser import Line, Program
from .ptx_races import WARP, Races

Array = np.ndarray
Active = Array | None
PATTERN = 0xA5A5A5A5A5A5A5A5
"""What is in a register that nobody has written: nobody may rely on zeros."""


class UnknownInstruction(NotImplementedError):
    """An instruction, or a form of one, that is not modelled. The message has its line."""

    def __init__(self, line: Line, why: str = "an instruction that is not modelled"):
        super().__init__(f"{line.text}: {why}.")


@dataclass(frozen=True)
class Copy:
    """Words for the targets of `threads`, [words, threads]; `group` is the number of each thread's group."""

    threads: Array
    targets: Array
    words: Array
    group: Array

    def those(self, which: Array) -> Copy:
        """The copies of some of the threads."""
        return Copy(self.threads[which], self.targets[which], self.words[:, which], self.group[which])


@dataclass
class Copies:
    """Of the threads of a block: how many groups of copies each has closed, and the copies that no thread has waited
    for."""

    num_threads: int
    pending: list[Copy] = field(default_factory=list)
    closed: Array = field(init=False)

    def __post_init__(self) -> None:
        self.closed = np.zeros(self.num_threads, np.int64)


@dataclass(frozen=True)
class LaunchContext:
    """What all blocks of a launch share. `parameters` are the bits of the kernel's parameters; `failed(address)` is
    called after a compare-and-swap that found another value."""

    parameters: tuple[int, ...]
    num_blocks: int
    num_threads: int
    shared_bytes: int
    memory: Memory
    failed: Callable[[int], None]
    multicast: Multicast | None = None


class Block:
    """Block `number` of a launch before its first instruction."""

    def __init__(self, launch: LaunchContext, number: int):
        self.launch = launch
        self.shared = Memory([Shared(launch.shared_bytes)])
        self.num_threads = launch.num_threads
        self.races = Races(launch.num_threads)
        self.copies = Copies(launch.num_threads)
        threads = np.arange(launch.num_threads, dtype=np.uint32)
        self.registers: dict[str, Array] = {
            "%tid.x": threads,
            "%laneid": threads % np.uint32(WARP),
            "%ntid.x": np.array([launch.num_threads], np.uint32),
            "%ctaid.x": np.array([number], np.uint32),
            "%nctaid.x": np.array([launch.num_blocks], np.uint32),
        }

    def register(self, name: str, kind: str) -> Array:
        """The values of a register of the declared type `kind`, as unsigned numbers or bool."""
        found = self.registers.get(name)
        if found is not None:
            return found
        dtype = np.dtype(bool) if kind == "pred" else np.dtype(f"uint{width_of(kind)}")
        return np.full(self.num_threads, PATTERN & ((1 << 8 * dtype.itemsize) - 1)).astype(dtype)

    def users(self, active: Active) -> Users:
        """The active threads."""
        return Users(np.arange(self.num_threads) if active is None else np.flatnonzero(active), self.races)

    def whole(self, values: Array) -> Array:
        """One value for each thread."""
        return values if values.shape == (self.num_threads,) else np.broadcast_to(values, (self.num_threads,))


Source = Callable[[Block], Array]
Target = Callable[[Block, Array, Active], None]
Step = Callable[[Block, Active], None]
"""An instruction as it is carried out."""

_SPECIAL = ("%tid.x", "%laneid", "%ntid.x", "%ctaid.x", "%nctaid.x")
_NUMBER = re.compile(r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?")


def source(program: Program, line: Line, operand: str, kind: str) -> Source:
    """How an operand is read as an array of type `kind`: a register, a number, or the begin of shared memory. Raises
    `UnknownInstruction`."""
    declared = "b32" if operand in _SPECIAL else program.type_of(operand)
    if declared is None:
        constant = _constant(line, operand, kind)
        return lambda block: constant
    if width_of(declared) < width_of(kind) or (kind == "pred") != (declared == "pred"):
        raise UnknownInstruction(line, f"{operand} of type {declared} is read as {kind}")
    if kind == "pred":
        return lambda block: block.register(operand, "pred")
    dtype = dtype_of(kind)
    if width_of(declared) == width_of(kind):
        return lambda block: block.register(operand, declared).view(dtype)
    narrow = np.dtype(f"uint{width_of(kind)}")
    return lambda block: block.register(operand, declared).astype(narrow).view(dtype)


def _constant(line: Line, operand: str, kind: str) -> Array:
    if operand == "global_smem":
        bits = 0
    elif number := _NUMBER.fullmatch(operand):
        bits = int(number.group(1), 0)
    elif re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand) and width_of(kind) == 32:
        bits = int(operand[2:], 16)
    else:
        raise UnknownInstruction(line, f"{operand} is neither a declared register nor a number")
    if kind == "pred":
        return np.array([bool(bits)])
    width = width_of(kind)
    return np.array([bits % (1 << width)], f"uint{width}").view(dtype_of(kind))


def target(program: Program, line: Line, operand: str, kind: str) -> Target:
    """How an array of type `kind` is written into a register by the active threads: a narrower value is extended, by
    its sign where it has one. Raises `UnknownInstruction`."""
    declared = program.type_of(operand)
    if operand == "_":
        return lambda block, values, active: None
    if declared is None or width_of(declared) < width_of(kind) or (kind == "pred") != (declared == "pred"):
        raise UnknownInstruction(line, f"{operand} of type {declared} is written as {kind}")
    width = width_of(declared)
    register = np.dtype(bool) if kind == "pred" else np.dtype(f"uint{width}")
    signed = np.dtype(f"int{max(width, 8)}")
    is_wider = width > width_of(kind)

    def write(block: Block, values: Array, active: Active) -> None:
        if is_wider and kind[0] == "s":
            values = values.astype(signed)
        values = values.astype(register) if is_wider and kind[0] != "s" else values.view(register)
        if active is not None:
            values = np.where(active, values, block.register(operand, declared))
        block.registers[operand] = block.whole(values)

    return write


def warps_of(line: Line, block: Block, active: Active) -> Array:
    """The numbers of the threads, [warps, 32], of the warps that are active. Raises `UnknownInstruction` where only a
    part of a warp is, or the block's last warp is not whole."""
    if block.num_threads % WARP:
        raise UnknownInstruction(line, f"a block of {block.num_threads} threads has a warp that is not whole")
    threads = np.arange(block.num_threads).reshape(-1, WARP)
    if active is None:
        return threads
    of_warp = active.reshape(-1, WARP)
    if (of_warp.any(axis=1) != of_warp.all(axis=1)).any():
        raise UnknownInstruction(line, "only a part of a warp comes to it")
    return threads[of_warp.all(axis=1)]


def chosen(values: Array, active: Active) -> Array:
    """Those of the active threads."""
    return values if active is None else values[active]


def spread(block: Block, values: Array, active: Active) -> Array:
    """The inverse of `chosen`: 0 for threads that are not active."""
    if active is None:
        return values
    result = np.zeros(block.num_threads, values.dtype)
    result[active] = values
    return result


def expect(line: Line, operands: Sequence[str], count: int) -> None:
    """Raises `UnknownInstruction` where there are not `count` operands."""
    if len(operands) != count:
        raise UnknownInstruction(line, f"{len(operands)} operands in the place of {count}")
