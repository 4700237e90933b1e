"""A model of `multimem`: instructions at a multicast address, which act on the memory of all ranks at once.

It is a model and no more. The hardware promises no order of its additions; here they are made in fp32, in the order of
the ranks, and rounded once to the type. Whoever compares bits with it compares them with one of the results that a
switch may give. Stores and reductions reach the ranks one after the other, each atomically.
"""

from __future__ import annotations

import re

import numpy as np
from triton._C.libtriton import interpreter as native

from .ptx_block import Active, Array, Block, Step, UnknownInstruction, chosen, expect, source, spread, target
from .ptx_parser import Line, Program, registers
from .ptx_transfers import ORDERS, address_of
from .roundings import canonical_nan, narrowed, pair, widened

_SCOPE = r"(?:cta|cluster|gpu|sys)"
_LOAD = re.compile(
    rf"multimem\.ld_reduce\.(?:weak|relaxed\.{_SCOPE})\.global\.add(\.acc::f32)?(?:\.v([248]))?\.(f32|bf16x2)"
)
_STORE = re.compile(rf"multimem\.st\.(?:weak|relaxed\.{_SCOPE})\.global(?:\.v([248]))?\.(?:f32|bf16x2|b32|u32|s32)")
_ADD = re.compile(rf"multimem\.red\.(relaxed|release)\.{_SCOPE}\.global\.add\.(?:u32|s32)")


def multicast(program: Program, line: Line) -> Step | None:
    """The instruction as a step; None for one that is none of these. Raises `UnknownInstruction`."""
    if line.opcode == "fence.proxy.alias":
        return lambda block, active: None  # both addresses of a place are one memory here, which nothing reorders
    if found := _LOAD.fullmatch(line.opcode):
        accumulates, count, kind = found.groups()
        if bool(accumulates) != (kind == "bf16x2"):
            raise UnknownInstruction(line, "bf16 is added with .acc::f32, and fp32 without")
        return _load(program, line, int(count or 1), kind)
    if found := _STORE.fullmatch(line.opcode):
        return _store(program, line, int(found.group(1) or 1))
    if found := _ADD.fullmatch(line.opcode):
        return _add(program, line, found.group(1))
    return None


def _on_each(block: Block, line: Line, addresses: Array, num_bytes: int) -> list[Array]:
    if block.launch.multicast is None:
        raise UnknownInstruction(line, "the launch has no multicast address")
    return block.launch.multicast.on_each(addresses, num_bytes)


def _load(program: Program, line: Line, count: int, kind: str) -> Step:
    expect(line, line.operands, 2)
    names = registers(line.operands[0])
    expect(line, names, count)
    targets = [target(program, line, name, "b32") for name in names]
    read_address = address_of(program, line, line.operands[1])

    def load(block: Block, active: Active) -> None:
        places = _on_each(block, line, chosen(read_address(block), active), 4 * count)
        of_ranks = [block.launch.memory.load(each, 4, count) for each in places]
        for number, write in enumerate(targets):
            words = [each[number] for each in of_ranks]
            if kind == "f32":
                result = _added([word.view(np.float32) for word in words]).view(np.uint32)
            else:
                low = _added([widened((word & np.uint32(0xFFFF)).astype(np.uint16)) for word in words])
                high = _added([widened((word >> np.uint32(16)).astype(np.uint16)) for word in words])
                result = pair(narrowed(high), narrowed(low))
            write(block, spread(block, result, active), active)

    return load


def _added(values: list[Array]) -> Array:
    total = values[0]
    for each in values[1:]:
        total = total + each
    return canonical_nan(total)


def _store(program: Program, line: Line, count: int) -> Step:
    expect(line, line.operands, 2)
    names = registers(line.operands[1])
    expect(line, names, count)
    sources = [source(program, line, name, "b32") for name in names]
    read_address = address_of(program, line, line.operands[0])

    def store(block: Block, active: Active) -> None:
        values = [chosen(block.whole(read(block)), active) for read in sources]
        for places in _on_each(block, line, chosen(read_address(block), active), 4 * count):
            block.launch.memory.store(places, 4, values)

    return store


def _add(program: Program, line: Line, order: str) -> Step:
    expect(line, line.operands, 2)
    read_address = address_of(program, line, line.operands[0])
    read = source(program, line, line.operands[1], "b32")

    def add(block: Block, active: Active) -> None:
        values = np.ascontiguousarray(chosen(block.whole(read(block)), active)).view(np.int32)
        for places in _on_each(block, line, chosen(read_address(block), active), 4):
            block.launch.memory.check(places, 4)
            native.atomic_rmw(native.RMW_OP.ADD, places, values, np.ones(len(places), bool), ORDERS[order])

    return add
