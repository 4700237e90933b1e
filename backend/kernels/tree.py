"""The canonical tree inside a kernel: its shape is compiled in, so a sum is the additions of the tree and no more.

Rank r ships NODES[r] maximal nodes of the tree, one after the other in its buffer; a node's place among those of all
ranks, left to right, is its *place*, and MERGES[place] says how often the last two values held are added once it is
there (`core.base.reduction.merges_of`). The additions are the same ones, made depth first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .peers import buffer_of


@triton.constexpr_function
def right_half(merges, lo, hi):
    """Where the right one begins of the two values whose sum is the value of the places [lo, hi)."""
    held = []
    for place in range(lo, hi):
        held.append(place)
        for _ in range(merges[place]):
            if place == hi - 1 and len(held) == 2:
                return held[1]
            if len(held) > 1:
                held.pop()
    raise ValueError(f"places {lo} to {hi} of merges {merges} are no value of the tree")


@triton.constexpr_function
def peer_of(nodes, place):
    """The rank that ships the node at `place`."""
    peer = 0
    while place >= nodes[peer]:
        place -= nodes[peer]
        peer += 1
    return peer


@triton.constexpr_function
def slab_of(nodes, place):
    """How many nodes its rank ships before the one at `place`."""
    peer = 0
    while place >= nodes[peer]:
        place -= nodes[peer]
        peer += 1
    return place


@triton.constexpr_function
def num_places(nodes):
    """How many nodes all ranks ship."""
    return sum(nodes)


@triton.jit
def tree_of_peers(
    table,
    slab,
    offset,
    mask,
    LO: tl.constexpr,
    HI: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """The canonical sum in fp32 over the places [LO, HI) of the elements at `offset` of each node's `slab` elements."""
    if HI - LO == 1:
        PEER: tl.constexpr = peer_of(NODES, LO)
        SLAB: tl.constexpr = slab_of(NODES, LO)
        node = buffer_of(table, PEER, LEAF) + slab * SLAB
        total = tl.load(node + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        MIDDLE: tl.constexpr = right_half(MERGES, LO, HI)
        left = tree_of_peers(table, slab, offset, mask, LO, MIDDLE, NODES, MERGES, LEAF)
        total = left + tree_of_peers(table, slab, offset, mask, MIDDLE, HI, NODES, MERGES, LEAF)
    return total
