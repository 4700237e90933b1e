"""Gather and reduce-scatter of rows whose number differs from rank to rank: tokens of experts, several tensors at once.

`counts` is int32[WORLD] in device memory, how many rows each rank has, so a captured graph may be replayed with other
counts. A rank without rows meets its peers as all others do. The rest is as in `collectives`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .meet import meet_at_entry, meet_at_exit
from .peers import OF_RANKS, buffer_of
from .tree import num_places, tree_of_peers

UNITS = (16, 8, 4, 2, 1)
"""What rows are copied in, in bytes: 16 where a row's bytes are a multiple of it, and so on."""


def unit_of(row_bytes: int) -> int:
    """The largest of `UNITS` that divides the bytes of a row. Each tensor of a launch has its own."""
    return next(unit for unit in UNITS if row_bytes % unit == 0)


@triton.constexpr_function
def integer_of(unit):
    """The type that rows of such units are copied as: two of 8 bytes make one of 16."""
    return {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[unit]


@triton.constexpr_function
def bytes_of(unit):
    """How many bytes that type has."""
    return min(unit, 8)


@triton.jit(do_not_specialize=OF_RANKS)
def gather_rows(
    table: tl.uint64,
    pads: tl.uint64,
    tensors,
    counts,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    UNITS_OF: tl.constexpr,
):
    """The rows of all ranks one after the other, of as many tensors as UNITS_OF has entries, in one launch and with one
    meeting at each end.

    `tensors` is int64[len(UNITS_OF), 3] in device memory: of each tensor the byte at which it begins in the shared
    buffers, the bytes of a row, and the address to which its rows go. Both places are multiples of 16 bytes; tensors
    differ in width and type, and each is copied in units of its own (`unit_of`).
    """
    meet_at_entry(pads, rank, WORLD)
    for tensor in tl.static_range(len(UNITS_OF)):
        _gather(table, tensors + 3 * tensor, counts, WORLD, BLOCK, UNITS_OF[tensor])
    meet_at_exit(pads, rank, WORLD)


@triton.jit
def _gather(table, tensor, counts, WORLD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """One tensor of `gather_rows`."""
    integer: tl.constexpr = integer_of(UNIT)
    SIZE: tl.constexpr = bytes_of(UNIT)
    start = tl.multiple_of(tl.load(tensor) // SIZE, 16 // SIZE)
    row = tl.multiple_of(tl.load(tensor + 1) // SIZE, UNIT // SIZE)
    out = tl.multiple_of(tl.load(tensor + 2).to(tl.pointer_type(integer)), 16)
    lane = tl.arange(0, BLOCK)
    before = row * 0
    for peer in tl.static_range(WORLD):
        n = tl.load(counts + peer) * row
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < n:
            mask = lane < n - first
            values = tl.load(buffer_of(table, peer, integer) + start + first + lane, mask=mask)
            tl.store(out + before + first + lane, values, mask=mask)
            first += tl.num_programs(0) * BLOCK
        before += n


@triton.jit(do_not_specialize=OF_RANKS)
def reduce_scatter_rows(
    table: tl.uint64,
    pads: tl.uint64,
    out,
    counts,
    width: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """`out[counts[rank], width]` is the canonical sum of this rank's rows: those after the rows of lower ranks.

    A node has all rows of all ranks.
    """
    meet_at_entry(pads, rank, WORLD)
    rows = tl.load(counts) * 0
    before = rows
    for peer in tl.static_range(WORLD):
        count = tl.load(counts + peer)
        before += tl.where(peer < rank, count, 0)
        rows += count
    lane = tl.arange(0, BLOCK)
    n = tl.load(counts + rank) * width
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        mask = lane < n - first
        offset = before * width + first + lane
        total = tree_of_peers(table, rows * width, offset, mask, 0, num_places(NODES), NODES, MERGES, LEAF)
        tl.store(out + first + lane, total.to(out.dtype.element_ty), mask=mask)
        first += tl.num_programs(0) * BLOCK
    meet_at_exit(pads, rank, WORLD)
