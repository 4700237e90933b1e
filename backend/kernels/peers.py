"""Memory of peers inside a kernel, through a table of addresses: `table[r]` is where rank r's buffer begins.

Every buffer begins at a multiple of 16 bytes, so that a peer's memory is read 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

OF_RANKS = ("table", "pads", "rank")
"""Arguments in which ranks differ. A kernel is compiled without looking at them, so all ranks run the same one."""


@triton.jit
def buffer_of(table, peer, dtype: tl.constexpr):
    """A pointer to the buffer of `peer`, whose elements are `dtype`."""
    address = tl.load(table.to(tl.pointer_type(tl.uint64)) + peer)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
