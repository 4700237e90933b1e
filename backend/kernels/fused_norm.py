"""What happens between two layers when tokens are decoded, in one kernel: partial outputs are summed and scattered, the
residual is added, the sum is normalised and gathered.

Any hidden size: a row is read BLOCK columns at a time, the last time masked, and no row is read beyond its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .meet import meet_at_entry, meet_at_exit
from .peers import OF_RANKS, buffer_of
from .tree import num_places, tree_of_peers


@triton.jit(do_not_specialize=OF_RANKS)
def add_norm_gather(
    table: tl.uint64,
    pads: tl.uint64,
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
    """Reduce-scatter, residual, RMSNorm and all-gather of [tokens, hidden]; rank r has ceil(tokens / WORLD) tokens from
    r * ceil(tokens / WORLD) on, or those that are left.

    `residual` [own tokens, hidden] becomes `round(round(sum) + residual)`: the canonical sum of the nodes, in fp32, is
    rounded to LEAF as the reduce-scatter alone would, then the sum with the residual, made in fp32, is rounded to the
    residual's type. `out` [tokens, hidden] is `round(new residual * rstd * weight)` of all ranks' tokens, where
    `rstd = 1 / sqrt(mean(new residual squared) + eps)` is in fp32 and its sum in no promised order. Own rows of the
    first node in the own buffer, which no peer reads as such, are where peers find the normalised ones.
    """
    meet_at_entry(pads, rank, WORLD)
    share = (tokens + WORLD - 1) // WORLD
    lane = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    while (row < share) & (rank * share + row < tokens):
        normalised_row(table, residual, weight, tokens, hidden, eps, rank, share, row, BLOCK, NODES, MERGES, LEAF)
        row += tl.num_programs(0)
    meet_at_entry(pads, rank, WORLD)
    for peer in tl.static_range(WORLD):
        row = tl.program_id(0)
        while (row < share) & (peer * share + row < tokens):
            begin = (peer * share + row) * hidden
            column = hidden * 0
            while column < hidden:
                mask = lane < hidden - column
                values = tl.load(buffer_of(table, peer, LEAF) + begin + column + lane, mask=mask)
                tl.store(out + begin + column + lane, values, mask=mask)
                column += BLOCK
            row += tl.num_programs(0)
    meet_at_exit(pads, rank, WORLD)


@triton.jit
def normalised_row(
    table,
    residual,
    weight,
    tokens,
    hidden,
    eps,
    rank,
    share,
    row,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    MERGES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """The first half of it for one of the `share` rows of this rank, until the normalised row is in the own buffer."""
    lane = tl.arange(0, BLOCK)
    own = buffer_of(table, rank, LEAF)
    slab = tokens * hidden
    begin = (rank * share + row) * hidden
    residual_row = residual + row * hidden
    squares = tl.zeros((BLOCK,), tl.float32)
    column = hidden * 0
    while column < hidden:
        mask = lane < hidden - column
        total = tree_of_peers(table, slab, begin + column + lane, mask, 0, num_places(NODES), NODES, MERGES, LEAF)
        before = tl.load(residual_row + column + lane, mask=mask, other=0.0).to(tl.float32)
        after = (total.to(LEAF).to(tl.float32) + before).to(residual.dtype.element_ty)
        tl.store(residual_row + column + lane, after, mask=mask)
        squares += after.to(tl.float32) * after.to(tl.float32)
        column += BLOCK
    mean = tl.div_rn(tl.sum(squares, axis=0), hidden.to(tl.float32))
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.debug_barrier()  # a thread need not read below what it wrote itself
    column = hidden * 0
    while column < hidden:
        mask = lane < hidden - column
        after = tl.load(residual_row + column + lane, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + column + lane, mask=mask, other=0.0).to(tl.float32)
        tl.store(own + begin + column + lane, (after * rstd * scale).to(LEAF), mask=mask)
        column += BLOCK
