"""Carries out the PTX of a launch on the CPU: block after block, all threads of a block in lockstep.

Threads that branch apart are carried out with those first that are furthest behind, and come together where they meet
again; all wait at a barrier of the block for each other. What it does not show: blocks that run at the same time,
accesses in a weak order. Threads of a block that race with each other are refused (`ptx_races`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .ptx_block import (
    Active,
    Array,
    Block,
    LaunchContext,
    Step,
    UnknownInstruction,
    expect,
    source,
    target,
    warps_of,
)
from .ptx_copies import copy
from .ptx_instructions import calculation, why_unknown
from .ptx_memory import MemoryFault
from .ptx_multicast import multicast
from .ptx_parser import Line, Program, parsed, registers
from .ptx_races import BlockRace
from .ptx_tensor_cores import tensor_core
from .ptx_transfers import transfer


@dataclass(frozen=True)
class Instruction:
    """An instruction made ready: a step, or a branch to `goes_to`, a barrier of the block or an end."""

    line: Line
    kind: str
    step: Step | None = None
    goes_to: int = 0

    @property
    def guard(self) -> str:
        """The predicate, without its negation."""
        return self.line.guard.removeprefix("!")

    @property
    def is_negated(self) -> bool:
        """It is carried out where the predicate does not hold."""
        return self.line.guard.startswith("!")


class Executable:
    """A program whose instructions are all known. Raises `UnknownInstruction` where one is not."""

    def __init__(self, program: Program):
        self.program = program
        self.instructions = tuple(_instruction(program, line) for line in program.lines)

    def run(self, launch: LaunchContext) -> None:
        """Carries out a launch. Raises `MemoryFault`, `BlockRace` and what `launch.failed` raises."""
        with np.errstate(all="ignore"):  # overflows and invalid operations have results, as on a device
            for number in range(launch.num_blocks):
                _Run(self.instructions, Block(launch, number)).run()


@cache
def executable(program_text: str) -> Executable:
    """The kernel of a text of PTX. Raises `UnreadPTX` and `UnknownInstruction`."""
    return Executable(parsed(program_text))


def _instruction(program: Program, line: Line) -> Instruction:
    if line.opcode in ("ret", "exit"):
        return Instruction(line, "end")
    if line.opcode in ("bra", "bra.uni"):
        expect(line, line.operands, 1)
        if line.operands[0] not in program.labels:
            raise UnknownInstruction(line, "a branch to no label")
        return Instruction(line, "branch", goes_to=program.labels[line.operands[0]])
    if line.opcode in ("bar.sync", "barrier.sync") and line.operands == ("0",):
        return Instruction(line, "barrier")
    if line.opcode == "bar.warp.sync" and line.operands == ("-1",):
        return Instruction(line, "step", lambda block, active: _warps_meet(line, block, active))
    for make in (transfer, copy, tensor_core, multicast, _calculation):
        if step := make(program, line):
            return Instruction(line, "step", step)
    raise UnknownInstruction(line, why_unknown(line.opcode))


def _warps_meet(line: Line, block: Block, active: Active) -> None:
    """In step threads of a warp have met; what they wrote is seen by the others of it from here on."""
    block.races.warp_barrier(warps_of(line, block, active))


def _calculation(program: Program, line: Line) -> Step | None:
    if line.opcode.startswith("mov.") and any(operand.startswith("{") for operand in line.operands):
        return _packing(program, line)
    known = calculation(line.opcode)
    if known is None:
        return None
    expect(line, line.operands, 1 + len(known.sources))
    sources = [
        source(program, line, operand, kind) for operand, kind in zip(line.operands[1:], known.sources, strict=True)
    ]
    write, function = target(program, line, line.operands[0], known.target), known.function

    def calculate(block: Block, active: Active) -> None:
        write(block, function(*[read(block) for read in sources]), active)

    return calculate


def _packing(program: Program, line: Line) -> Step:
    """mov of one register into the halves or quarters of which it is made, or back; the lowest first."""
    expect(line, line.operands, 2)
    bits = int(line.opcode.removeprefix("mov.b"))
    goes_apart = line.operands[0].startswith("{")
    names = registers(line.operands[0 if goes_apart else 1])
    width = bits // len(names)
    word, part = np.dtype(f"uint{bits}"), np.dtype(f"uint{width}")
    if goes_apart:
        read = source(program, line, line.operands[1], f"b{bits}")
        targets = [target(program, line, name, f"b{width}") for name in names]

        def unpack(block: Block, active: Active) -> None:
            values = read(block)
            for number, write in enumerate(targets):
                write(block, (values >> word.type(width * number)).astype(part), active)

        return unpack
    sources = [source(program, line, name, f"b{width}") for name in names]
    write_whole = target(program, line, line.operands[0], f"b{bits}")

    def pack(block: Block, active: Active) -> None:
        parts = [read(block).astype(word) << word.type(width * number) for number, read in enumerate(sources)]
        write_whole(block, np.bitwise_or.reduce(np.broadcast_arrays(*parts)), active)

    return pack


class _Run:
    """Threads that are at the same instruction go on together: `at` is where they are, `active` who they are."""

    def __init__(self, instructions: tuple[Instruction, ...], block: Block):
        self.instructions = instructions
        self.block = block
        self.at = 0
        self.active: Active = None
        self.elsewhere: dict[int, Array] = {}
        self.waiting: dict[int, Array] = {}
        self.ended: Array = np.zeros(block.num_threads, bool)

    def run(self) -> None:
        """Until all threads have ended."""
        line = self.instructions[0].line
        try:
            while self.at < len(self.instructions):
                instruction = self.instructions[self.at]
                line = instruction.line
                if instruction.guard:
                    self._guarded(instruction)
                else:
                    self._all(instruction, self.active)
                if self.elsewhere:
                    self._furthest_behind()
        except (MemoryFault, BlockRace) as error:
            raise type(error)(f"{line.text} {error}") from error

    def _guarded(self, instruction: Instruction) -> None:
        holds = self.block.whole(self.block.register(instruction.guard, "pred")) != instruction.is_negated
        active = holds if self.active is None else holds & self.active
        num_active = int(np.count_nonzero(active))
        if num_active == (self.block.num_threads if self.active is None else int(np.count_nonzero(self.active))):
            self._all(instruction, self.active)
        elif num_active == 0:
            self.at += 1
        elif instruction.kind == "step":
            self._all(instruction, active)
        else:
            others = ~active if self.active is None else self.active & ~active
            _join(self.elsewhere, self.at + 1, others)
            self._all(instruction, active)

    def _all(self, instruction: Instruction, active: Active) -> None:
        """The threads `active` carry it out; no others are here but for those that a guard leaves out of a step."""
        if instruction.kind == "step":
            assert instruction.step is not None
            instruction.step(self.block, active)
            self.at += 1
        elif instruction.kind == "branch":
            self.at, self.active = instruction.goes_to, active
        elif instruction.kind == "barrier":
            self._wait(active, instruction)
        else:
            self.ended = self.ended | True if active is None else self.ended | active
            self._next(instruction)

    def _wait(self, active: Active, instruction: Instruction) -> None:
        if active is None:
            self.block.races.barrier()
            self.at += 1
            return
        _join(self.waiting, self.at + 1, active)
        self._next(instruction)

    def _next(self, instruction: Instruction) -> None:
        """Goes on with other threads; with those that wait at the barrier where all do."""
        if not self.elsewhere:
            if self.waiting and self.ended.any():
                raise UnknownInstruction(instruction.line, "some threads of a block end and others wait for them")
            if self.waiting:
                self.block.races.barrier()
            self.elsewhere, self.waiting = self.waiting, {}
        if self.elsewhere:
            self.at = min(self.elsewhere)
            self._take(self.elsewhere.pop(self.at))
        else:
            self.at = len(self.instructions)

    def _furthest_behind(self) -> None:
        """Threads at the same instruction become one group; the group at the lowest one goes on."""
        if self.active is None or self.at >= len(self.instructions):
            return
        _join(self.elsewhere, self.at, self.active)
        self.at = min(self.elsewhere)
        self._take(self.elsewhere.pop(self.at))

    def _take(self, active: Array) -> None:
        self.active = None if active.all() else active


def _join(groups: dict[int, Array], at: int, threads: Array) -> None:
    groups[at] = groups[at] | threads if at in groups else threads
