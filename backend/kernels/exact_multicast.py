"""Exact collectives whose results go to all ranks by multicast: one store each in place of a load by every peer.

Sums are the canonical tree's, added by the ranks (`tree`); see `multicast` for the rest. What all have in the end lies
behind the nodes, as if each rank had as many as the one with most: a buffer has room for one more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_norm import normalised_row
from .meet import meet_at_entry
from .multicast import UNIT, between_addresses, own_buffer, sent_to_all, size_of
from .peers import OF_RANKS, buffer_of
from .tree import num_places, tree_of_peers


@triton.constexpr_function
def most_nodes(nodes):
    """Of the rank that ships most."""
    return max(1, *nodes)


@triton.jit(do_not_specialize=OF_RANKS)
def exact_all_reduce_multicast(
    table: tl.uint64,
    pads: tl.uint64,
    multicast: tl.uint64,
    out,
    n: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """As `all_reduce_two_shot`, bit for bit. A node takes a multiple of 16 elements in its rank's buffer."""
    meet_at_entry(pads, rank, WORLD)
    SIZE: tl.constexpr = size_of(LEAF)
    slab = (n + 15) // 16 * 16
    part = (n + 16 * WORLD - 1) // (16 * WORLD) * 16
    end = tl.minimum((rank + 1) * part, n)
    lane = tl.arange(0, BLOCK)
    own = buffer_of(table, rank, LEAF)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while (first < part) & (rank * part + first < n):
        offset = rank * part + first + lane
        total = tree_of_peers(table, slab, offset, offset < end, 0, num_places(NODES), NODES, MERGES, LEAF)
        tl.store(own + offset, total.to(LEAF), mask=offset < end)
        tl.debug_barrier()
        begin = (rank * part + first) * SIZE // UNIT
        count = (end * SIZE + UNIT - 1) // UNIT
        results = multicast + most_nodes(NODES) * slab * SIZE
        sent_to_all(own_buffer(table, rank), results, begin, count, BLOCK * SIZE // UNIT)
        first += tl.num_programs(0) * BLOCK
    between_addresses()
    meet_at_entry(pads, rank, WORLD)
    between_addresses()
    own += most_nodes(NODES) * slab
    for peer in tl.static_range(WORLD):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while (first < part) & (peer * part + first < n):
            offset = peer * part + first + lane
            mask = offset < tl.minimum((peer + 1) * part, n)
            tl.store(out + offset, tl.load(own + offset, mask=mask), mask=mask)
            first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=OF_RANKS)
def add_norm_gather_multicast(
    table: tl.uint64,
    pads: tl.uint64,
    multicast: tl.uint64,
    residual,
    weight,
    out,
    tokens: tl.int32,
    hidden: tl.int64,
    eps: tl.float32,
    rank: tl.int32,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """As `add_norm_gather`, bit for bit, of rows that are multiples of 16 bytes."""
    meet_at_entry(pads, rank, WORLD)
    SIZE: tl.constexpr = size_of(LEAF)
    UNITS: tl.constexpr = BLOCK * SIZE // UNIT
    share = (tokens + WORLD - 1) // WORLD
    lane = tl.arange(0, BLOCK)
    count = hidden * SIZE // UNIT
    results = multicast + most_nodes(NODES) * tokens * hidden * SIZE
    row = tl.program_id(0)
    while (row < share) & (rank * share + row < tokens):
        normalised_row(table, residual, weight, tokens, hidden, eps, rank, share, row, BLOCK, NODES, MERGES, LEAF)
        tl.debug_barrier()
        begin = (rank * share + row) * count * UNIT
        first = count * 0
        while first < count:
            sent_to_all(own_buffer(table, rank) + begin, results + begin, first, count, UNITS)
            first += UNITS
        row += tl.num_programs(0)
    between_addresses()
    meet_at_entry(pads, rank, WORLD)
    between_addresses()
    own = buffer_of(table, rank, LEAF) + most_nodes(NODES) * tokens * hidden
    for peer in tl.static_range(WORLD):
        row = tl.program_id(0)
        while (row < share) & (peer * share + row < tokens):
            begin = (peer * share + row) * hidden
            column = hidden * 0
            while column < hidden:
                mask = lane < hidden - column
                tl.store(out + begin + column + lane, tl.load(own + begin + column + lane, mask=mask), mask=mask)
                column += BLOCK
            row += tl.num_programs(0)
