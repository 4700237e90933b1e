"""Collectives by multicast, for GPUs that an NVSwitch joins: a store to one address reaches all ranks' buffers, and a
load from it is the sum of what lies there, made by the switch.

`multicast` is the address that reaches the begin of all buffers. All goes in units of 16 bytes, which do not end where
elements do: what lies behind the last element, up to a multiple of 16 bytes, is carried along.

The switch promises no order and no precision of its sums (PTX ISA, "multimem.ld_reduce"), so they are fast numerics,
and each part is added up for one rank alone, from which all others have it. `exact_multicast` leaves to the switch only
what it brings to others.

One memory with two addresses is two *proxies* to a kernel: `between_addresses` lies between a use by the one and a use
by the other (PTX ISA, "Proxies"; CUDA C++ Programming Guide, "Virtual aliasing support").
"""

from __future__ import annotations

import triton
import triton.language as tl

from .meet import meet_at_entry, meet_at_exit
from .peers import OF_RANKS

UNIT_BYTES = 16
UNIT: tl.constexpr = tl.constexpr(UNIT_BYTES)


@triton.constexpr_function
def size_of(dtype):
    """Bytes of an element."""
    return dtype.primitive_bitwidth // 8


@triton.constexpr_function
def moves(load, store):
    """PTX that moves a unit from address $1 to address $2 where $3 is not 0."""
    unit = "{%word0, %word1, %word2, %word3}"
    return (
        "{ .reg .pred %isUnit; .reg .b32 %word0, %word1, %word2, %word3; setp.ne.b32 %isUnit, $3, 0; "
        f"@%isUnit {load} {unit}, [$1]; @%isUnit {store} [$2], {unit}; mov.u32 $0, 0; }}"
    )


@triton.constexpr_function
def sum_of(dtype):
    """The instruction that adds up a unit of such elements of all ranks, in fp32 where they are narrower."""
    kind = {"fp32": "v4.f32", "bf16": "acc::f32.v4.bf16x2"}[str(dtype)]
    return f"multimem.ld_reduce.relaxed.sys.global.add.{kind}"


LOAD = tl.constexpr("ld.global.v4.b32")
STORE = tl.constexpr("st.global.v4.b32")
STORE_EVERYWHERE = tl.constexpr("multimem.st.relaxed.sys.global.v4.f32")


@triton.jit
def between_addresses():
    """What this thread did through one address of memory lies before what it does through another."""
    tl.inline_asm_elementwise("fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.uint32, is_pure=False, pack=1)


@triton.jit
def moved(source, target, first, count, UNITS: tl.constexpr, HOW: tl.constexpr):
    """Units `first` to `first + UNITS` of `count`, from behind the address `source` to behind `target`."""
    unit = first + tl.arange(0, UNITS)
    at = (unit * UNIT).to(tl.uint64)
    is_unit = (unit < count).to(tl.int32)
    tl.inline_asm_elementwise(
        HOW, "=r,l,l,r", [source + at, target + at, is_unit], dtype=tl.uint32, is_pure=False, pack=1
    )


@triton.jit
def sent_to_all(source, multicast, first, count, UNITS: tl.constexpr):
    """From own memory to the places behind `multicast`: into all buffers."""
    HOW: tl.constexpr = moves(LOAD, STORE_EVERYWHERE)
    moved(source, multicast, first, count, UNITS, HOW)


@triton.jit
def copied(source, out, first, n, BLOCK: tl.constexpr):
    """Elements `first` to `first + BLOCK` of `n` at the address `source`, in own memory."""
    lane = first + tl.arange(0, BLOCK)
    own = tl.multiple_of(source.to(tl.pointer_type(out.dtype.element_ty)), 16)
    tl.store(out + lane, tl.load(own + lane, mask=lane < n), mask=lane < n)


@triton.jit
def own_buffer(table, rank):
    """The address of this rank's buffer."""
    return tl.load(table.to(tl.pointer_type(tl.uint64)) + rank)


@triton.jit(do_not_specialize=OF_RANKS)
def all_gather_multicast(
    table: tl.uint64,
    pads: tl.uint64,
    multicast: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `all_gather`. What a rank shares at the begin of its buffer goes to the place of that rank behind it, in all
    buffers; a buffer has room for WORLD + 1 shares."""
    meet_at_entry(pads, rank, WORLD)
    SIZE: tl.constexpr = size_of(out.dtype.element_ty)
    UNITS: tl.constexpr = BLOCK * SIZE // UNIT
    count = (n * SIZE + UNIT - 1) // UNIT
    own = own_buffer(table, rank)
    first = tl.program_id(0).to(tl.int64) * UNITS
    while first < count:
        sent_to_all(own, multicast + (rank + 1) * count * UNIT, first, count, UNITS)
        first += tl.num_programs(0) * UNITS
    between_addresses()
    meet_at_entry(pads, rank, WORLD)
    between_addresses()
    for peer in tl.static_range(WORLD):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < n:
            copied(own + (peer + 1) * count * UNIT, out + peer * n, first, n, BLOCK)
            first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=OF_RANKS)
def all_reduce_multicast(
    table: tl.uint64,
    pads: tl.uint64,
    multicast: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out[:n]` is the sum of what the ranks share, of the type of `out`. The switch adds up a part for each rank,
    which puts it into all buffers behind what is shared, so all have the same bits; a buffer has room for two."""
    meet_at_entry(pads, rank, WORLD)
    SIZE: tl.constexpr = size_of(out.dtype.element_ty)
    UNITS: tl.constexpr = BLOCK * SIZE // UNIT
    HOW: tl.constexpr = moves(sum_of(out.dtype.element_ty), STORE_EVERYWHERE)
    count = (n * SIZE + UNIT - 1) // UNIT
    part = (count + WORLD - 1) // WORLD
    between_addresses()
    first = tl.program_id(0).to(tl.int64) * UNITS
    while (first < part) & (rank * part + first < count):
        end = tl.minimum((rank + 1) * part, count)
        moved(multicast, multicast + count * UNIT, rank * part + first, end, UNITS, HOW)
        first += tl.num_programs(0) * UNITS
    between_addresses()
    meet_at_entry(pads, rank, WORLD)
    between_addresses()
    own = own_buffer(table, rank) + count * UNIT
    for peer in tl.static_range(WORLD):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        begin = peer * part * UNIT // SIZE
        while (first * SIZE < part * UNIT) & (begin + first < n):
            copied(own, out, begin + first, tl.minimum(n, begin + part * UNIT // SIZE), BLOCK)
            first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=OF_RANKS)
def reduce_scatter_multicast(
    table: tl.uint64,
    pads: tl.uint64,
    multicast: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out[:n]` is the sum of the parts that the ranks share for this one. A part takes a multiple of 16 bytes, and
    behind them a buffer has room for another."""
    meet_at_entry(pads, rank, WORLD)
    SIZE: tl.constexpr = size_of(out.dtype.element_ty)
    UNITS: tl.constexpr = BLOCK * SIZE // UNIT
    HOW: tl.constexpr = moves(sum_of(out.dtype.element_ty), STORE)
    count = (n * SIZE + UNIT - 1) // UNIT
    own = own_buffer(table, rank) + WORLD * count * UNIT
    between_addresses()
    first = tl.program_id(0).to(tl.int64) * UNITS
    while first < count:
        moved(multicast + rank * count * UNIT, own, first, count, UNITS, HOW)
        tl.debug_barrier()
        copied(own, out, first * UNIT // SIZE, n, BLOCK)
        first += tl.num_programs(0) * UNITS
    between_addresses()
    meet_at_exit(pads, rank, WORLD)
