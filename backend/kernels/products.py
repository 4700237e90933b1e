"""`exact_product`: products whose sums have the order of the canonical tree. A leaf is a run of k that one block adds
up in sequence, by tensor cores in bf16; the tree over leaves is made of additions in fp32.

So an element's bits follow from its row, its column, the leaves and the shape of a tile: not from which rank has which
leaves, from how many rows a call has, or from where among them a row lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

BAND_TILES: tl.constexpr = tl.constexpr(8)
"""Tiles of rows that follow each other before the next columns come, so that both operands are found in the cache."""

PROBLEM_COLUMNS = 6
COLUMNS: tl.constexpr = tl.constexpr(PROBLEM_COLUMNS)


@triton.jit
def exact_product(
    left,
    right,
    out,
    workspace,
    problems,
    merges,
    num_problems: tl.int32,
    n: tl.int64,
    leaf: tl.int64,
    leaves: tl.int32,
    most_held: tl.int32,
    left_row,
    left_k,
    right_k,
    right_column,
    out_node: tl.int64,
    out_row,
    IS_TREE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT_AT: tl.constexpr,
    UNIT_M: tl.constexpr,
    UNIT_K: tl.constexpr,
):
    """`out[node, i, j]` of each problem is the canonical sum over the node's leaves of the sums over k in a leaf of
    `left[i, k] * right[k, j]`, rounded once to the type of `out`.

    `problems` is int64[num_problems + 1, 6] in device memory: the elements at which left, right and out begin, how many
    rows i there are, how many k, and the number of the first tile; the last row has nothing but the number of tiles.
    All problems have `n` columns and `leaves` leaves of `leaf` k, the last one those that are left; IS_TREE says that
    there are several. `merges[l]` is twice how many values are added after leaf l, left to right, plus 1 where a node
    is then complete. `workspace` is fp32[programs, most_held, TILE_M, TILE_N]. Elements at which something begins are
    multiples of UNIT_AT, numbers of rows of UNIT_M and of k of UNIT_K. A tile is added to others in PARTS parts, 1, 2
    or 4: the fewer of its values are in registers twice.
    """
    lane_m, lane_n, lane_k = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    held = workspace + tl.program_id(0) * (most_held * TILE_M * TILE_N)
    tiles_n = ((n + TILE_N - 1) // TILE_N).to(tl.int32)
    num_tiles = tl.load(problems + num_problems * COLUMNS + 5)
    steps = ((leaf + TILE_K - 1) // TILE_K).to(tl.int32)
    row = problems
    tile = tl.program_id(0)
    while tile < num_tiles:
        while tl.load(row + COLUMNS + 5) <= tile:
            row += COLUMNS
        m = tl.multiple_of(tl.load(row + 3), UNIT_M)
        k = tl.multiple_of(tl.load(row + 4), UNIT_K)
        tiles_m = ((m + TILE_M - 1) // TILE_M).to(tl.int32)
        tile_m, tile_n = place_of(tile - tl.load(row + 5).to(tl.int32), tiles_m, tiles_n)
        first_m, first_n = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
        rows, columns = first_m + lane_m, first_n + lane_n
        of_left = left + tl.multiple_of(tl.load(row), UNIT_AT) + rows[:, None] * left_row + lane_k[None, :] * left_k
        of_right = right + tl.multiple_of(tl.load(row + 1), UNIT_AT) + lane_k[:, None] * right_k
        of_right = of_right + columns[None, :] * right_column
        out_at = tl.multiple_of(tl.load(row + 2), UNIT_AT)
        depth = tile_m * 0
        top = tl.zeros((TILE_M, TILE_N), tl.float32)
        for number in range(leaves):
            begin = number * leaf
            end = tl.minimum(begin + leaf, k)
            total = tl.zeros((TILE_M, TILE_N), tl.float32)
            for step in range(steps):
                first_k = begin + step * TILE_K
                is_k = lane_k < end - first_k
                one = tl.load(of_left + first_k * left_k, mask=(rows < m)[:, None] & is_k[None, :], other=0.0)
                other = tl.load(of_right + first_k * right_k, mask=is_k[:, None] & (columns < n)[None, :], other=0.0)
                total = tl.dot(one, other, total, input_precision="ieee")
            is_whole = True
            if IS_TREE:
                todo = tl.load(merges + number)
                count, is_whole = todo // 2, todo % 2 == 1
                if count > 0:
                    total = top + total
                elif depth > 0:
                    tl.debug_barrier()  # other threads have read what lay there
                    laid_by(top, held + (depth - 1) * (TILE_M * TILE_N), TILE_N, PARTS, TILE_M, TILE_N)
                depth -= count
                tl.debug_barrier()  # what other threads have left there is there
                for below in range(count - 1):
                    at = held + (depth + count - 2 - below) * (TILE_M * TILE_N)
                    total = added(total, at, TILE_N, PARTS, TILE_M, TILE_N)
            if is_whole:
                of_out = out + out_at + first_m * out_row + first_n
                stored(total, of_out, out_row, m - first_m, n - first_n, PARTS, TILE_M, TILE_N)
                out_at += out_node
            elif IS_TREE:
                top = total
                depth += 1
        tile += tl.num_programs(0)


@triton.jit
def stored(total, out, out_row, m, n, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Rounds a tile into `out`, of which `m` rows and `n` columns are left."""
    if PARTS > 1:
        left, right = halves(total, TILE_M, TILE_N)
        stored(left, out, out_row, m, n, PARTS // 2, TILE_M, TILE_N // 2)
        stored(right, out + TILE_N // 2, out_row, m, n - TILE_N // 2, PARTS // 2, TILE_M, TILE_N // 2)
    else:
        row, column = tl.arange(0, TILE_M)[:, None], tl.arange(0, TILE_N)[None, :]
        tl.store(out + row * out_row + column, total.to(out.dtype.element_ty), mask=(row < m) & (column < n))


@triton.jit
def laid_by(total, held, ROW: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Stores a tile, or a part of one whose rows have ROW, at `held`."""
    if PARTS > 1:
        left, right = halves(total, TILE_M, TILE_N)
        laid_by(left, held, ROW, PARTS // 2, TILE_M, TILE_N // 2)
        laid_by(right, held + TILE_N // 2, ROW, PARTS // 2, TILE_M, TILE_N // 2)
    else:
        tl.store(held + tl.arange(0, TILE_M)[:, None] * ROW + tl.arange(0, TILE_N)[None, :], total)


@triton.jit
def added(total, held, ROW: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """What is stored at `held` plus a tile, or a part of one."""
    if PARTS > 1:
        left, right = halves(total, TILE_M, TILE_N)
        left = added(left, held, ROW, PARTS // 2, TILE_M, TILE_N // 2)
        right = added(right, held + TILE_N // 2, ROW, PARTS // 2, TILE_M, TILE_N // 2)
        both = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TILE_M, TILE_N))
    else:
        both = tl.load(held + tl.arange(0, TILE_M)[:, None] * ROW + tl.arange(0, TILE_N)[None, :]) + total
    return both


@triton.jit
def halves(total, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The left and the right columns of a tile, which stay in the registers they are in."""
    return tl.split(tl.permute(tl.reshape(total, (TILE_M, 2, TILE_N // 2)), (0, 2, 1)))


@triton.jit
def place_of(tile, tiles_m, tiles_n):
    """The row and column of a tile of a problem: columns of up to BAND_TILES tiles, one after the other."""
    in_band = BAND_TILES * tiles_n
    first = tile // in_band * BAND_TILES
    rows = tl.minimum(tiles_m - first, BAND_TILES)
    within = tile % in_band
    return first + within % rows, within // rows
