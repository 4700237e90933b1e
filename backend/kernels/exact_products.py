"""`ExactProducts`: the products of exact numerics by `products.exact_product`: of a matrix, of samples, of experts.

Shape suffixes as in `numerics.base`: N rows, C a feature dimension that tensor parallelism cuts (this rank's part), F a
whole one, E experts, B samples of S tokens. Operands are bf16, fp16 or fp32, their last dimension runs of memory; sums
are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.base.reduction import Node, merges_of
from ..base.streams import is_captured
from . import catalog
from .kernel import Launcher
from .products import PROBLEM_COLUMNS


class Tile(NamedTuple):
    """What a block multiplies at a time: rows, columns and k; in how many parts it is added to others and stored; warps
    of a block; how many steps of k are on their way at a time.

    Rows, columns and warps choose the instructions of a tensor core, so in bf16 and fp16 they belong to the numerics.
    Tuning may change k, stages and the order of tiles, and all of it in fp32, of which a leaf is one chain of fused
    products and sums in the order of k, whatever the tile.
    """

    m: int
    n: int
    k: int
    parts: int = 4
    num_warps: int = 8
    num_stages: int = 4


class Tiles(NamedTuple):
    """Of one type of operands: `whole` where all k are one leaf in every layout, `summed` where there is a tree, of
    which registers hold a second value."""

    whole: Tile
    summed: Tile


TileTable = Mapping[torch.dtype, Tiles]

HALVES = (torch.bfloat16, torch.float16)
TILES: TileTable = {
    **dict.fromkeys(HALVES, Tiles(Tile(128, 256, 64), Tile(128, 128, 64))),
    torch.float32: Tiles(Tile(128, 128, 16, 2, num_stages=2), Tile(128, 64, 16, 2, num_stages=2)),
}
"""From compute capability 9.0 on."""

OLDER_TILES: TileTable = {
    **TILES,
    **dict.fromkeys(HALVES, Tiles(Tile(128, 128, 64), Tile(128, 128, 32))),
}
"""Without asynchronous tensor cores operands lie in registers too."""


def tiles_for(architecture: int) -> TileTable:
    """The tiles of GPUs of a compute capability (times ten)."""
    return TILES if architecture >= 90 else OLDER_TILES


UNIT_ELEMENTS = 16
"""What Triton looks for in sizes; 16 bytes are at most 8 elements of the types here."""

MOST_TABLES = 256

Rows = tuple[int, int, int]
"""An expert and its rows `[first, last)`."""


class Problem(NamedTuple):
    """The elements at which a product's operands and result begin, its rows and how many k it adds over."""

    left: int
    right: int
    out: int
    rows: int
    depth: int


@dataclass(frozen=True)
class Operand:
    """A tensor of one matrix or more, and the strides of each along rows or columns (`across`) and along k."""

    values: Tensor
    across: int
    along: int


def merge_table(nodes: Sequence[Node]) -> list[int]:
    """Of each leaf of tree nodes that lie one after the other, what `exact_product` does after it.

    >>> merge_table([(0, 3), (3, 4)])
    [0, 2, 3, 1]
    """
    table = []
    for lo, hi in nodes:
        table += [2 * count for count in merges_of(hi - lo, [(leaf, leaf + 1) for leaf in range(hi - lo)])]
        table[-1] += 1
    return table


class ExactProducts:
    """`launch` runs a kernel; at most `most_programs` run at a time, each with a place in the workspace."""

    def __init__(self, launch: Launcher, most_programs: int, tiles: TileTable = TILES):
        self._launch, self._most_programs, self._tiles = launch, most_programs, tiles
        self._tables: dict[tuple[object, ...], dict[int, Tensor]] = {}
        """By type and numbers, and by stream."""
        self._of_graphs: dict[tuple[object, ...], Tensor] = {}

    def project(self, x_NF: Tensor, weight_CF: Tensor) -> Tensor:
        """x W^T, [n, c] in the type of `x`: one leaf, since no rank cuts F."""
        (n, f), c = x_NF.shape, len(weight_CF)
        out = x_NF.new_empty(n, c)
        self._run(_rows(x_NF), _rows(weight_CF), out[None], [Problem(0, 0, 0, n, f)], c)
        return out

    def contract(self, x_NC: Tensor, weight_CF: Tensor, leaf: int, nodes: Sequence[Node]) -> Tensor:
        """x W over leaves of `leaf` features, fp32 [nodes, n, f]: a value for each node of the tree over them that this
        rank has; together they are all of C."""
        (n, c), f = x_NC.shape, weight_CF.shape[1]
        out = x_NC.new_empty(len(nodes), n, f, dtype=torch.float32)
        self._run(_rows(x_NC), _columns(weight_CF), out, [Problem(0, 0, 0, n, c)], f, leaf, nodes)
        return out

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaf: int, nodes: Sequence[Node]) -> Tensor:
        """x^T y over the tokens of each sample in leaves of `leaf` tokens, fp32 [nodes, b, c, f]: a value for each node
        of the tree over the leaves; together they are all tokens."""
        (b, s, c), f = x_BSC.shape, y_BSF.shape[2]
        out = x_BSC.new_empty(len(nodes), b, c, f, dtype=torch.float32)
        x, y = x_BSC.reshape(b * s, c), y_BSF.reshape(b * s, f)
        problems = [Problem(i * s * x.stride(0), i * s * y.stride(0), i * c * f, c, s) for i in range(b)]
        self._run(_columns(x), _columns(y), out.view(len(nodes), b * c, f), problems, f, leaf, nodes)
        return out

    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, groups: Iterable[Rows]) -> Tensor:
        """x W^T with the expert of each row, [n, c] in the type of `x`. Groups are all rows, in any order."""
        (n, f), c = x_NF.shape, weight_ECF.shape[1]
        out = x_NF.new_empty(n, c)
        problems = [
            Problem(first * x_NF.stride(0), expert * weight_ECF.stride(0), first * c, last - first, f)
            for expert, first, last in groups
        ]
        self._run(_rows(x_NF), _rows(weight_ECF), out[None], problems, c)
        return out

    def contract_experts(
        self, x_NC: Tensor, weight_ECF: Tensor, groups: Iterable[Rows], leaf: int, nodes: Sequence[Node]
    ) -> Tensor:
        """x W with the expert of each row, fp32 [nodes, n, f], as `contract`."""
        (n, c), f = x_NC.shape, weight_ECF.shape[2]
        out = x_NC.new_empty(len(nodes), n, f, dtype=torch.float32)
        problems = [
            Problem(first * x_NC.stride(0), expert * weight_ECF.stride(0), first * f, last - first, c)
            for expert, first, last in groups
        ]
        self._run(_rows(x_NC), _columns(weight_ECF), out, problems, f, leaf, nodes)
        return out

    def expert_weight_gradient(self, x_NC: Tensor, y_NF: Tensor, groups: Sequence[Rows], leaf: int) -> Tensor:
        """x^T y over the rows of each group, fp32 [groups, c, f]: a group's rows are one leaf, which has at most `leaf`
        of them. That belongs to the problem: -0, to which products may underflow, and what is masked out make 0."""
        c, f = x_NC.shape[1], y_NF.shape[1]
        out = x_NC.new_empty(len(groups), c, f, dtype=torch.float32)
        problems = [
            Problem(first * x_NC.stride(0), first * y_NF.stride(0), number * c * f, c, last - first)
            for number, (_, first, last) in enumerate(groups)
        ]
        assert all(last - first <= leaf for _, first, last in groups), "a group is one leaf"
        self._run(_columns(x_NC), _columns(y_NF), out.view(1, -1, f), problems, f, leaf, ((0, 1),))
        return out

    def multiply_each(self, left_PMK: Tensor, right_PKN: Tensor) -> Tensor:
        """The product of each pair of matrices, fp32 [p, m, n]: all k are one leaf."""
        (p, m, k), n = left_PMK.shape, right_PKN.shape[2]
        out = left_PMK.new_empty(p, m, n, dtype=torch.float32)
        problems = [Problem(i * left_PMK.stride(0), i * right_PKN.stride(0), i * m * n, m, k) for i in range(p)]
        self._run(_rows(left_PMK), _columns(right_PKN), out.view(1, p * m, n), problems, n, k, ((0, 1),))
        return out

    def _run(
        self,
        left: Operand,
        right: Operand,
        out: Tensor,
        problems: Sequence[Problem],
        n: int,
        leaf: int | None = None,
        nodes: Sequence[Node] = ((0, 1),),
    ) -> None:
        """Fills `out` [nodes, rows, n]; without `leaf` all k are one in every layout."""
        tiles_of_type = self._tiles[left.values.dtype]
        tile = tiles_of_type.whole if leaf is None else tiles_of_type.summed
        table, tiles = [], 0
        for problem in problems:
            table += [*problem, tiles]
            tiles += -(-problem.rows // tile.m) * -(-n // tile.n)
        table += [0] * (PROBLEM_COLUMNS - 1) + [tiles]
        if not tiles:
            return
        leaves, programs = nodes[-1][1], min(tiles, self._most_programs)
        most_held = max(0, (leaves - 1).bit_length() - 1)  # besides the last one, which stays in registers
        room = max(1, programs * most_held * tile.m * tile.n)
        self._launch(
            replace(catalog.kernel("exact_product"), num_warps=tile.num_warps, num_stages=tile.num_stages),
            programs,
            {
                "left": left.values,
                "right": right.values,
                "out": out,
                "workspace": out.new_empty(room, dtype=torch.float32),
                "problems": self._on_device(out.device, table, torch.int64),
                "merges": self._on_device(out.device, merge_table(nodes), torch.int32),
                "num_problems": len(problems),
                "n": n,
                "leaf": max(each.depth for each in problems) if leaf is None else leaf,
                "leaves": leaves,
                "most_held": most_held,
                "left_row": left.across,
                "left_k": left.along,
                "right_k": right.along,
                "right_column": right.across,
                "out_node": out.stride(0),
                "out_row": out.stride(1),
            },
            {
                "IS_TREE": leaves > 1,
                "TILE_M": tile.m,
                "TILE_N": tile.n,
                "TILE_K": tile.k,
                "PARTS": tile.parts,
                "UNIT_AT": math.gcd(UNIT_ELEMENTS, *(at for each in problems for at in each[:3])),
                "UNIT_M": math.gcd(UNIT_ELEMENTS, *(each.rows for each in problems)),
                "UNIT_K": math.gcd(UNIT_ELEMENTS, *(each.depth for each in problems)),
            },
        )

    def _on_device(self, device: torch.device, table: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A table in device memory, where it stays: a model's shapes are few, but for rows of experts. Each stream has
        its own, for others would have to wait until it is there."""
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        key = (dtype, *table)
        if is_captured(device):
            return self._in_graph(key, device, table, dtype)
        if stream not in (made := self._tables.get(key, {})):
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()  # other threads, and graphs, may have one of them
            made = self._tables.setdefault(key, {})
            made[stream] = torch.tensor(table, dtype=dtype, device=device)  # the host waits for it
        return made[stream]

    def _in_graph(
        self, key: tuple[object, ...], device: torch.device, table: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A table for what is captured. Nothing is copied from the host meanwhile: one that was made before is kept for
        the graph, whichever stream's it is, and another one is made of its numbers by every replay."""
        if (found := next(iter(self._tables.get(key, {}).values()), None)) is not None:
            self._of_graphs[key] = found
        if key in self._of_graphs:
            return self._of_graphs[key]
        made = torch.empty(len(table), dtype=dtype, device=device)
        for element, number in zip(made.unbind(), table, strict=True):
            element.fill_(number)
        return made


def _rows(matrix: Tensor) -> Operand:
    """Whose rows are added over: k is its last dimension."""
    return Operand(matrix, matrix.stride(-2), matrix.stride(-1))


def _columns(matrix: Tensor) -> Operand:
    """Whose columns are added over: k is its last dimension but one."""
    return Operand(matrix, matrix.stride(-1), matrix.stride(-2))
