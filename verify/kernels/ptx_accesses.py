"""What a block of a compiled kernel does to memory that others map, by carrying out its PTX: every swap of a signal and
every access to a buffer, in order, with its address.

Whole numbers are computed, so addresses and loops are those of the code; what is calculated with them otherwise is
unknown. Each swap fails once before it succeeds, which shows that it is tried again. All that would let a step be
overlooked is refused: an unknown address or branch, another atomic, another scope, an access that no barrier of the
block keeps apart from a swap of another thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ...backend.transport.symmetric.barrier import SCOPE, Order
from .protocols import UnreadProtocol
from .proxies import Proxies
from .ptx_numbers import Value, calculated
from .ptx_parser import Line, UnreadPTX, parsed, place, registers

TABLE, PADS, PRIVATE, BUFFER, PAD, MULTICAST = (1 << 40, 1 << 41, 1 << 42, 1 << 44, 1 << 45, 1 << 46)
RANK_BYTES = 1 << 32
MOST_STEPS = 2_000_000


@dataclass(frozen=True)
class Access:
    """swap: of a signal in the pad of `owner`, from `expected` to `value`. read, write: of four bytes in the buffer of
    `owner`. `offset` is in bytes."""

    kind: Literal["read", "write", "swap"]
    owner: int
    offset: int
    order: Order = "relaxed"
    expected: int = 0
    value: int = 0


@dataclass(frozen=True)
class Launch:
    """A block of a launch on `world_size` ranks: `parameters` in the kernel's order, with `TABLE` and `PADS` for those
    tables, `MULTICAST` for the address of all buffers, and addresses from `PRIVATE` on for memory of the rank, of which
    `memory` says what is known."""

    world_size: int
    num_threads: int
    parameters: Sequence[int]
    memory: Mapping[int, int]
    block: int = 0
    num_blocks: int = 1


_ATOMIC = re.compile(r"atom\.global\.(relaxed|acquire|release)\.(\w+)\.cas\.b32")
_WIDTH = re.compile(r"(?:ld|st)\.global(?:\.v(\d))?\.[bsuf](\d+)")
_MULTICAST = re.compile(r"multimem\.(ld_reduce|st)\.relaxed\.sys\.global(?:\.add)?(?:\.acc::f32)?\.v4\.(?:f32|bf16x2)")
_ACCESSES = {
    "atom",
    "red",
    "multimem",
    "fence",
    "membar",
    "ld",
    "ldu",
    "st",
    "cp",
    "bar",
    "barrier",
    "call",
    "mbarrier",
}
"""Instructions that are no calculation of a thread."""


def accesses(ptx: str, launch: Launch) -> list[Access]:
    """What one block does, in order. Raises `UnreadProtocol`."""
    return _Block(ptx, launch).run()


class _Block:
    def __init__(self, ptx: str, launch: Launch):
        self.launch = launch
        try:
            program = parsed(ptx)
        except UnreadPTX as error:
            raise UnreadProtocol(str(error)) from error
        self.lines, self.labels = program.lines, program.labels
        self.found: list[Access] = []
        self.shared: dict[int, Value] = {}
        self.failed: Access | None = None
        self.steps = 0
        self.swapping: set[int] = set()
        self.reading: set[int] = set()
        self.proxies = Proxies(launch.num_threads)

    def run(self) -> list[Access]:
        threads = [_Thread(self, number).run() for number in range(self.launch.num_threads)]
        going = True
        while going:
            arrived = [next(thread, None) for thread in threads]
            going = arrived[0] is not None
            if any(line != arrived[0] for line in arrived):
                raise UnreadProtocol("the threads of a block do not come to the same barrier.")
            self._apart()
            self.swapping, self.reading = set(), set()
            self.proxies.meet()
        if self.failed:
            raise UnreadProtocol(f"{self.failed}: a swap that failed is not tried again.")
        return self.found

    def swap(self, access: Access, thread: int) -> int:
        """What the swap finds: another value the first time, and what it expects when it is tried again."""
        self.swapping.add(thread)
        self._after(access)
        if self.failed is None:
            self.failed = access
            return 1 - access.expected
        self.failed = None
        self.found.append(access)
        return access.expected

    def data(self, access: Access, thread: int) -> None:
        self.reading.add(thread)
        self._apart()
        self._after(access)
        self.found.append(access)

    def _apart(self) -> None:
        if self.swapping and self.reading - self.swapping:
            raise UnreadProtocol("no barrier of the block lies between a swap and another thread's access.")

    def _after(self, access: Access) -> None:
        if self.failed not in (None, access):
            raise UnreadProtocol(f"{self.failed}: a swap that failed is not tried again.")

    def known(self, address: int) -> Value:
        """What lies at an address that only this rank writes."""
        for begin, target in ((TABLE, BUFFER), (PADS, PAD)):
            rank = (address - begin) // 8
            if 0 <= rank < self.launch.world_size and address % 8 == 0:
                return target + rank * RANK_BYTES
        if not PRIVATE <= address < BUFFER:
            raise UnreadProtocol(f"an access to {address:#x}, which is no memory of the launch.")
        return self.launch.memory.get(address)


class _Thread:
    def __init__(self, block: _Block, number: int):
        self.block, self.number, self.at = block, number, 0
        launch = block.launch
        self.registers: dict[str, Value] = {
            "%tid.x": number,
            "%ctaid.x": launch.block,
            "%nctaid.x": launch.num_blocks,
            "%ntid.x": launch.num_threads,
            "global_smem": 0,
        }

    def run(self) -> Iterator[int]:
        """Up to the next barrier of the block, whose line it gives; ends where the thread does."""
        while self.at < len(self.block.lines):
            line = self.block.lines[self.at]
            self.at += 1
            self.block.steps += 1
            if self.block.steps > MOST_STEPS:
                raise UnreadProtocol(f"the block is not done after {MOST_STEPS:,} steps.")
            if line.guard and not self._holds(line):
                continue
            if line.opcode == "ret":
                return
            if line.opcode == "bar.sync" and line.operands == ("0",):
                yield self.at
            elif line.opcode in ("bra", "bra.uni"):
                self.at = self.block.labels[line.operands[0]]
            else:
                self._step(line)

    def _holds(self, line: Line) -> bool:
        value = self._value(line.guard.removeprefix("!"))
        if value is None:
            raise UnreadProtocol(f"{line.text}: it is unknown whether this is done.")
        return bool(value) != line.guard.startswith("!")

    def _value(self, operand: str) -> Value:
        return self.registers[operand] if operand in self.registers else _constant(operand)

    def _step(self, line: Line) -> None:
        if line.opcode.partition(".")[0] not in _ACCESSES:
            target, *sources = line.operands
            value = calculated(line.opcode, [self._value(source) for source in sources])
            for register in registers(target):
                self.registers[register] = value
        elif found := _ATOMIC.fullmatch(line.opcode):
            self._swap(line, found.group(1), found.group(2))
        elif line.opcode.startswith("ld.param"):
            index = int(line.operands[1].strip("[] ").rpartition("_")[2])
            parameters = self.block.launch.parameters
            self.registers[line.operands[0]] = parameters[index] if index < len(parameters) else 0
        elif found := _WIDTH.fullmatch(line.opcode):
            self._global(line, int(found.group(1) or 1), int(found.group(2)) // 8)
        elif line.opcode.startswith(("ld.shared", "st.shared")):
            self._shared(line)
        elif found := _MULTICAST.fullmatch(line.opcode):
            self._multicast(line, is_load=found.group(1) == "ld_reduce")
        elif line.opcode == "fence.proxy.alias":
            self.block.proxies.fence(self.number)
        else:
            raise UnreadProtocol(f"{line.text}: the reader does not know this access.")

    def _address(self, line: Line, operand: str) -> int:
        base, offset = place(operand)
        value = self._value(base)
        if value is None:
            raise UnreadProtocol(f"{line.text}: the address is unknown.")
        return value + offset

    def _swap(self, line: Line, order: str, scope: str) -> None:
        if scope != SCOPE:
            raise UnreadProtocol(f"{line.text}: the scope is not {SCOPE}.")
        target, place, *operands = line.operands
        expected, value = (self._value(operand) for operand in operands)
        if (expected, value) not in ((0, 1), (1, 0)):
            raise UnreadProtocol(f"{line.text}: swaps {expected} for {value}.")
        rank, offset = divmod(self._address(line, place) - PAD, RANK_BYTES)
        if not 0 <= rank < self.block.launch.world_size:
            raise UnreadProtocol(f"{line.text}: no swap of a signal pad.")
        assert expected is not None and value is not None
        if value:
            self.block.proxies.signal(self.number, line.text)
        access = Access("swap", rank, offset, order, expected, value)  # type: ignore[arg-type]
        self.registers[target] = self.block.swap(access, self.number)

    def _global(self, line: Line, count: int, width: int) -> None:
        is_load = line.opcode.startswith("ld")
        target, place = line.operands if is_load else line.operands[::-1]
        address = self._address(line, place)
        rank, offset = divmod(address - BUFFER, RANK_BYTES)
        values: list[Value] = [None] * count
        if 0 <= rank < self.block.launch.world_size:
            for at in range(offset // 4, -(-(offset + count * width) // 4)):
                self.block.proxies.use(self.number, (rank, 4 * at), "address", line.text)
                self.block.data(Access("read" if is_load else "write", rank, 4 * at), self.number)
        elif is_load:
            values = [self.block.known(address + width * index) for index in range(count)]
        elif not PRIVATE <= address < BUFFER:
            raise UnreadProtocol(f"{line.text}: a store to what is not the rank's.")
        if is_load:
            self.registers.update(zip(registers(target), values, strict=True))

    def _multicast(self, line: Line, *, is_load: bool) -> None:
        """Four words of every rank's buffer."""
        target, place = line.operands if is_load else line.operands[::-1]
        offset = self._address(line, place) - MULTICAST
        if not 0 <= offset < RANK_BYTES:
            raise UnreadProtocol(f"{line.text}: no multicast address of the launch.")
        for rank in range(self.block.launch.world_size):
            for at in range(offset, offset + 16, 4):
                self.block.proxies.use(self.number, (rank, at), "multicast", line.text)
                self.block.data(Access("read" if is_load else "write", rank, at), self.number)
        if is_load:
            self.registers.update(dict.fromkeys(registers(target)))

    def _shared(self, line: Line) -> None:
        """Values that go from thread to thread, such as what a swap found."""
        is_load = line.opcode.startswith("ld")
        target, place = line.operands if is_load else line.operands[::-1]
        address, width = self._address(line, place), int(re.findall(r"\d+", line.opcode)[-1]) // 8
        for index, register in enumerate(registers(target)):
            if is_load:
                self.registers[register] = self.block.shared.get(address + index * width)
            else:
                self.block.shared[address + index * width] = self._value(register)


@cache
def _constant(operand: str) -> Value:
    return int(operand, 0) if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", operand) else None
