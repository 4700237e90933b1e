"""All-gather, reduce-scatter and all-reduce through symmetric memory, their sums in the canonical order.

In all of them `table` and `pads` are addresses of uint64[WORLD] with the addresses of the peers' buffers and signal
pads (`peers`, `meet`), `rank` is the caller's, and what it shares lies at the begin of its own buffer. Sums take NODES
and MERGES (`tree`): with one leaf a rank NODES is (1, ..., 1). LEAF is the type of what is added, bf16 or fp32; it is
added in fp32 and rounded once where `out` is narrower.

A kernel may be launched right after another one that uses the same buffer: when it ends, all peers have read what it
shared. What an *earlier* kernel wrote into the buffer is ordered by the end of that kernel, as all memory of a device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .meet import meet_at_entry, meet_at_exit
from .peers import OF_RANKS, buffer_of
from .tree import num_places, tree_of_peers


@triton.jit(do_not_specialize=OF_RANKS)
def all_gather(
    table: tl.uint64, pads: tl.uint64, out, n: tl.int64, rank: tl.int32, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """`out[r * n : (r + 1) * n]` is what rank r shares, n elements of the type of `out`."""
    meet_at_entry(pads, rank, WORLD)
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        mask = lane < n - first
        for peer in tl.static_range(WORLD):
            values = tl.load(buffer_of(table, peer, out.dtype.element_ty) + first + lane, mask=mask)
            tl.store(out + peer * n + first + lane, values, mask=mask)
        first += tl.num_programs(0) * BLOCK
    meet_at_exit(pads, rank, WORLD)


@triton.jit(do_not_specialize=OF_RANKS)
def reduce_scatter(
    table: tl.uint64,
    pads: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """`out[:n]` is the canonical sum of elements `rank * n` to `(rank + 1) * n` of all nodes; a node has WORLD * n."""
    meet_at_entry(pads, rank, WORLD)
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        mask = lane < n - first
        offset = rank * n + first + lane
        total = tree_of_peers(table, WORLD * n, offset, mask, 0, num_places(NODES), NODES, MERGES, LEAF)
        tl.store(out + first + lane, total.to(out.dtype.element_ty), mask=mask)
        first += tl.num_programs(0) * BLOCK
    meet_at_exit(pads, rank, WORLD)


@triton.jit(do_not_specialize=OF_RANKS)
def all_reduce_one_shot(
    table: tl.uint64,
    pads: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """`out[:n]` is the canonical sum of all nodes, of n elements each: every rank adds all of it."""
    meet_at_entry(pads, rank, WORLD)
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        mask = lane < n - first
        total = tree_of_peers(table, n, first + lane, mask, 0, num_places(NODES), NODES, MERGES, LEAF)
        tl.store(out + first + lane, total.to(out.dtype.element_ty), mask=mask)
        first += tl.num_programs(0) * BLOCK
    meet_at_exit(pads, rank, WORLD)


@triton.jit(do_not_specialize=OF_RANKS)
def all_reduce_two_shot(
    table: tl.uint64,
    pads: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """`out[:n]` is the canonical sum of all nodes, of n elements each, rounded to LEAF: each rank adds a part of it and
    takes the others' from them, so that less is read than by `all_reduce_one_shot` for n that is large.

    Parts are multiples of 16 elements. A rank leaves its part where the first of its nodes was, which no peer reads as
    such. A block gathers what the same block of its peers added.
    """
    meet_at_entry(pads, rank, WORLD)
    part = (n + 16 * WORLD - 1) // (16 * WORLD) * 16
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while (first < part) & (rank * part + first < n):
        mask = (lane < part - first) & (lane < n - rank * part - first)
        offset = rank * part + first + lane
        total = tree_of_peers(table, n, offset, mask, 0, num_places(NODES), NODES, MERGES, LEAF)
        tl.store(buffer_of(table, rank, LEAF) + offset, total.to(LEAF), mask=mask)
        first += tl.num_programs(0) * BLOCK
    meet_at_entry(pads, rank, WORLD)
    for peer in tl.static_range(WORLD):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while (first < part) & (peer * part + first < n):
            mask = (lane < part - first) & (lane < n - peer * part - first)
            offset = peer * part + first + lane
            values = tl.load(buffer_of(table, peer, LEAF) + offset, mask=mask)
            tl.store(out + offset, values, mask=mask)
            first += tl.num_programs(0) * BLOCK
    meet_at_exit(pads, rank, WORLD)
