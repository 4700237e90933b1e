"""The canonical tree inside a kernel: its shape is compiled in, so a sum is the additions of the tree and no more."""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.base.reduction import split
from .peers import buffer_of


@triton.constexpr_function
def middle(lo, hi):
    """Where the node [lo, hi) of the canonical tree is cut."""
    return split((lo, hi))[0][1]


@triton.jit
def tree_of_peers(table, offset, mask, LO: tl.constexpr, HI: tl.constexpr, LEAF: tl.constexpr):
    """The canonical sum in fp32 over the peers [LO, HI), each one leaf, of the elements at `offset` of each buffer."""
    if HI - LO == 1:
        total = tl.load(buffer_of(table, LO, LEAF) + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        MIDDLE: tl.constexpr = middle(LO, HI)
        left = tree_of_peers(table, offset, mask, LO, MIDDLE, LEAF)
        total = left + tree_of_peers(table, offset, mask, MIDDLE, HI, LEAF)
    return total
