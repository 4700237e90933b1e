"""Instructions of PTX that reach memory or other threads: parameters, loads and stores, atomics, shuffles, matrices.

Atomics are real ones on the memory of this process, so blocks of several processes meet as on a device.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from triton._C.libtriton import interpreter as native

from .ptx_block import (
    Active,
    Array,
    Block,
    Source,
    Step,
    UnknownInstruction,
    chosen,
    expect,
    source,
    spread,
    target,
    warps_of,
)
from .ptx_memory import Memory, Users
from .ptx_parser import Line, Program, place, registers
from .roundings import pair

ORDERS = {
    "relaxed": native.MEM_SEMANTIC.RELAXED,
    "acquire": native.MEM_SEMANTIC.ACQUIRE,
    "release": native.MEM_SEMANTIC.RELEASE,
    "acq_rel": native.MEM_SEMANTIC.ACQUIRE_RELEASE,
}
_SCOPE = r"(?:cta|cluster|gpu|sys)"
_PLAIN = re.compile(
    rf"(ld|st)(?:\.(?:weak|volatile|relaxed\.{_SCOPE}))?\.(global|shared)(?:::cta)?(?:\.nc)?((?:\.L[12]::\w+)*)"
    r"(?:\.v([248]))?\.([bsuf])(8|16|32|64)"
)
_ATOMIC = re.compile(rf"atom\.global\.(relaxed|acquire|release|acq_rel)\.{_SCOPE}\.(cas|add)\.[bsu](32|64)")
_SHUFFLE = re.compile(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
_TO_MATRIX = re.compile(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
_MATRIX = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
LANE = np.arange(32)


def transfer(program: Program, line: Line) -> Step | None:
    """The instruction as a step; None for one that is none of these. Raises `UnknownInstruction`."""
    if line.opcode.startswith("ld.param."):
        return _parameter(program, line)
    for pattern, make in (
        (_PLAIN, _plain),
        (_ATOMIC, _atomic),
        (_SHUFFLE, _shuffle),
        (_MATRIX, _matrix),
        (_TO_MATRIX, _to_matrix),
    ):
        if found := pattern.fullmatch(line.opcode):
            return make(program, line, found)
    if line.opcode.startswith("createpolicy."):
        return _policy(program, line)
    return None


def address_of(program: Program, line: Line, operand: str, *, is_shared: bool = False) -> Source:
    """How `[ %rd1 + 4 ]` is read: an address (uint64) for each thread. One in shared memory may have 32 bits."""
    base, offset = place(operand)
    is_narrow = is_shared and program.type_of(base) != "b64"
    read = source(program, line, base, "u32" if is_narrow else "u64")
    added = np.uint64(offset % (1 << 64))
    return lambda block: block.whole(read(block).astype(np.uint64) + added)


def _parameter(program: Program, line: Line) -> Step:
    expect(line, line.operands, 2)
    kind = line.opcode.rpartition(".")[2]
    base, offset = place(line.operands[1])
    index = int(base.rpartition("_")[2])
    if offset or not re.fullmatch(r"[bsuf](8|16|32|64)", kind):
        raise UnknownInstruction(line)
    bits = "b" + kind[1:]
    write = target(program, line, line.operands[0].strip("{} "), bits)
    word = np.dtype(f"uint{kind[1:]}")
    mask = (1 << 8 * word.itemsize) - 1
    return lambda block, active: write(block, np.array([block.launch.parameters[index] & mask], word), active)


def _memory_of(is_shared: bool) -> Callable[[Block], Memory]:
    return (lambda block: block.shared) if is_shared else (lambda block: block.launch.memory)


def _plain(program: Program, line: Line, found: re.Match[str]) -> Step:
    """ld and st, whatever their hints for caches."""
    which, space, hints, count, letter, bits = found.groups()
    operands = line.operands[:-1] if ".L2::cache_hint" in hints else line.operands
    expect(line, operands, 2)
    kind, width = ("s" if letter == "s" else "b") + bits, int(bits) // 8
    names = registers(operands[0 if which == "ld" else 1])
    if len(names) != int(count or 1):
        raise UnknownInstruction(line, f"{len(names)} registers for {count or 1} values")
    read_address = address_of(program, line, operands[1 if which == "ld" else 0], is_shared=space == "shared")
    memory = _memory_of(space == "shared")
    if which == "st":
        sources = [source(program, line, name, "b" + bits) for name in names]

        def store(block: Block, active: Active) -> None:
            values = [chosen(block.whole(read(block)), active) for read in sources]
            memory(block).store(chosen(read_address(block), active), width, values, block.users(active))

        return store
    targets = [target(program, line, name, kind) for name in names]
    dtype = np.dtype(f"{'int' if letter == 's' else 'uint'}{bits}")

    def load(block: Block, active: Active) -> None:
        addresses = chosen(read_address(block), active)
        values = memory(block).load(addresses, width, len(targets), block.users(active))
        for write, each in zip(targets, values, strict=True):
            write(block, spread(block, each.view(dtype), active), active)

    return load


def _atomic(program: Program, line: Line, found: re.Match[str]) -> Step:
    """Compare-and-swap and addition."""
    order, what, bits = ORDERS[found.group(1)], found.group(2), found.group(3)
    expect(line, line.operands, 4 if what == "cas" else 3)
    kind, width, signed = "b" + bits, int(bits) // 8, np.dtype(f"int{bits}")
    write = target(program, line, line.operands[0], kind)
    read_address = address_of(program, line, line.operands[1])
    operands = [source(program, line, operand, kind) for operand in line.operands[2:]]

    def swap(block: Block, active: Active) -> None:
        addresses = chosen(read_address(block), active)
        block.launch.memory.check(addresses, width)
        values = [np.ascontiguousarray(chosen(block.whole(read(block)), active)).view(signed) for read in operands]
        if what == "add":
            every = np.ones(len(addresses), bool)
            old = native.atomic_rmw(native.RMW_OP.ADD, addresses, values[0], every, order)
        else:
            old = native.atomic_cas(addresses, values[0], values[1], order)
        write(block, spread(block, old.view(f"uint{bits}"), active), active)
        if what == "cas" and (other := old != values[0]).any():
            block.launch.failed(int(addresses[other][0]))

    return swap


def _shuffle(program: Program, line: Line, found: re.Match[str]) -> Step:
    """A value of another thread of the warp (PTX ISA, "shfl.sync"); all threads of it must come."""
    how, names = found.group(1), registers(line.operands[0])
    expect(line, line.operands, 5)
    write = target(program, line, names[0], "b32")
    write_whether = target(program, line, names[1], "pred") if len(names) == 2 else None
    read, read_by, read_limits, read_members = (source(program, line, each, "b32") for each in line.operands[1:])

    def shuffle(block: Block, active: Active) -> None:
        threads = warps_of(line, block, active)
        if (chosen(block.whole(read_members(block)), active) != np.uint32(0xFFFFFFFF)).any():
            raise UnknownInstruction(line, "not all threads of a warp are its members")
        lane = np.broadcast_to(np.arange(32), threads.shape)
        by, limits = (block.whole(each(block)).astype(np.int64)[threads] for each in (read_by, read_limits))
        by, segment, limit = by & 31, limits >> 8 & 31, limits & 31
        first = lane & segment
        last = first | (limit & ~segment)
        other = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[how]
        inside = other >= last if how == "up" else other <= last
        values = block.whole(read(block))
        result, whether = np.zeros(block.num_threads, np.uint32), np.zeros(block.num_threads, bool)
        result[threads] = np.take_along_axis(values[threads], np.where(inside, other, lane), axis=1)
        whether[threads] = inside
        write(block, result, active)
        if write_whether:
            write_whether(block, whether, active)

    return shuffle


def _matrix(program: Program, line: Line, found: re.Match[str]) -> Step:
    """Matrices of 8 x 8 values of 16 bits: thread 8 m + r of a warp has the address of row r of matrix m, and thread t
    receives values 2 (t mod 4) and the next of row t / 4, or of column t / 4 where they are transposed."""
    names = registers(line.operands[0])
    expect(line, names, int(found.group(1)))
    targets = [target(program, line, name, "b32") for name in names]
    read_address = address_of(program, line, line.operands[1], is_shared=True)
    is_transposed = found.group(2) is not None

    def load(block: Block, active: Active) -> None:
        threads = warps_of(line, block, active)
        addresses = read_address(block)[threads]
        for matrix, write in enumerate(targets):
            first = 8 * matrix
            users = Users(threads[:, first : first + 8].ravel(), block.races)
            block.shared.load(addresses[:, first : first + 8].ravel(), 8, 2, users)  # rows begin at 16 bytes
            low, high = (block.shared.load(each, 2)[0] for each in _halves(addresses, matrix, is_transposed))
            result = np.zeros(block.num_threads, np.uint32)
            result[threads] = pair(high, low).reshape(threads.shape)
            write(block, result, active)

    return load


def _to_matrix(program: Program, line: Line, found: re.Match[str]) -> Step:
    """The inverse of `_matrix`: thread t stores its two values of each matrix."""
    names = registers(line.operands[1])
    expect(line, names, int(found.group(1)))
    sources = [source(program, line, name, "b32") for name in names]
    read_address = address_of(program, line, line.operands[0], is_shared=True)
    is_transposed = found.group(2) is not None

    def store(block: Block, active: Active) -> None:
        threads = warps_of(line, block, active)
        addresses = read_address(block)[threads]
        users = Users(threads.ravel(), block.races)
        for matrix, read in enumerate(sources):
            words = block.whole(read(block))[threads].ravel()
            low, high = _halves(addresses, matrix, is_transposed)
            block.shared.store(low, 2, [words.astype(np.uint16)], users)
            block.shared.store(high, 2, [(words >> np.uint32(16)).astype(np.uint16)], users)

    return store


def _halves(addresses: Array, matrix: int, is_transposed: bool) -> tuple[Array, Array]:
    """Where the two values of each thread lie, from the addresses of rows, [warps, 32]."""
    of_thread, both = LANE // 4, 2 * (LANE % 4)
    places = []
    for half in (0, 1):
        row, column = (both + half, of_thread) if is_transposed else (of_thread, both + half)
        places.append((addresses[:, 8 * matrix + row] + (2 * column).astype(np.uint64)).ravel())
    return places[0], places[1]


def _policy(program: Program, line: Line) -> Step:
    """A policy of caches has no meaning here; loads and stores that are given it do not read it."""
    write = target(program, line, line.operands[0], "b64")
    zero: Array = np.zeros(1, np.uint64)
    return lambda block, active: write(block, zero, active)
