"""One call of every product of `ExactProducts`, and how many bits of the results are wrong.

Operands are whole numbers up to 8 times a power of two for each leaf. So the sum of a leaf has the same bits in every
order, that of a tensor core too, while the tree over leaves rounds. Operands lie in larger tensors that are not numbers
elsewhere: what is read beyond a row, a column or the last k is found. With `any_numbers` a leaf of fp32 is the sequence
of fused products and sums that Triton compiles it to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...backend.kernels import catalog
from ...backend.kernels.exact_products import TILES, ExactProducts, Rows, Tile, Tiles, TileTable, tiles_for
from ...core.base.reduction import Node, maximal_nodes
from .case import Case
from .oracle import different_bits, generator_of, numbers, tree_products
from .processes import Peer

AS_LAUNCHED = 1024
"""Blocks of a case from which on tiles are those of a launch."""

SMALL_TILES: TileTable = {
    torch.bfloat16: Tiles(Tile(32, 64, 16, num_warps=4), Tile(32, 64, 32, parts=2, num_warps=4)),
    torch.float32: Tiles(Tile(32, 32, 16, parts=2, num_warps=4), Tile(32, 16, 16, num_warps=4)),
}
NUM_SAMPLES = 2


def tiles_of(block: int, device: torch.device) -> TileTable:
    """The tiles of cases with blocks of that size, on a GPU or as executed PTX."""
    if block < AS_LAUNCHED:
        return SMALL_TILES
    if device.type != "cuda":
        return tiles_for(catalog.kernel("exact_product").executed_architecture)
    major, minor = torch.cuda.get_device_capability(device)
    return tiles_for(10 * major + minor)


class Call:
    """A numbered call of a case, and the products that it makes."""

    def __init__(self, peer: Peer, case: Case, call: int):
        self.case, self._device = case, peer.memory.own.device
        self._seed: tuple[int, ...] = (call, peer.memory.rank)
        self.products = ExactProducts(peer.launch, case.num_blocks, tiles_of(case.block, self._device))
        unit = math.gcd(16, case.k)
        self.leaf = -(-case.k // (case.leaves * unit)) * unit
        self.margin = unit
        num_leaves = -(-case.k // self.leaf)
        assert num_leaves == case.leaves, f"{case} has {num_leaves} leaves"

    @property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """Of a rank that has all leaves, and of one that has the last of three more."""
        leaves = self.case.leaves
        of_last = maximal_nodes(leaves + 3, 3, leaves + 3)
        return ((0, leaves),), tuple((lo - 3, hi - 3) for lo, hi in of_last)

    def leaves_of(self, terms: int) -> list[int]:
        """How many k each leaf of that many has."""
        return [min(self.leaf, terms - first) for first in range(0, terms, self.leaf)]

    def operand(self, *shape: int, along: int, runs: Sequence[int]) -> Tensor:
        """Numbers of that shape, which have a power of two for each of `runs` along dimension `along`."""
        self._seed = (*self._seed, len(self._seed))
        if self.case.any_numbers:
            return numbers(self._seed, math.prod(shape), self.case.type).view(shape)
        generator = generator_of(self._seed)
        whole = torch.randint(-8, 9, shape, generator=generator).float()
        powers = torch.exp2(torch.randint(-16, 17, (len(runs),), generator=generator).float())
        scale = powers.repeat_interleave(torch.tensor(runs))
        return (whole * scale.view([-1 if dim == along else 1 for dim in range(len(shape))])).to(self.case.type)

    def placed(self, values: Tensor, *, rows_between: int = 0) -> Tensor:
        """`values` where the kernel reads them, as a part of a larger tensor of what is not a number: with columns on
        both sides, and rows below each matrix."""
        *many, rows, columns = values.shape
        wide = values.new_full((*many, rows + rows_between, columns + 2 * self.margin), math.nan)
        part = (..., slice(rows), slice(self.margin, self.margin + columns))
        wide[part] = values
        return wide.to(self._device)[part]

    def wrong(self, got: Tensor, left_MK: Tensor, right_KN: Tensor, leaf: int, nodes: Sequence[Node]) -> int:
        """Bits of `got`, [nodes, m, n], that are not those of the canonical sum."""
        due = tree_products(left_MK, right_KN, leaf, nodes, in_sequence=self.case.any_numbers)
        return different_bits(got, due.to(got.dtype))


def project(call: Call) -> int:
    """Of whole matrices."""
    n, c, f = call.case.n, call.case.width, call.case.k
    x, weight = call.operand(n, f, along=1, runs=[f]), call.operand(c, f, along=1, runs=[f])
    got = call.products.project(call.placed(x), call.placed(weight))
    return call.wrong(got[None], x, weight.T, f, ((0, 1),))


def contract(call: Call) -> int:
    """By leaves, for the nodes of two ranks."""
    n, f, c = call.case.n, call.case.width, call.case.k
    runs, wrong = call.leaves_of(c), 0
    for nodes in call.nodes:
        x, weight = call.operand(n, c, along=1, runs=runs), call.operand(c, f, along=0, runs=runs)
        got = call.products.contract(call.placed(x), call.placed(weight), call.leaf, nodes)
        wrong += call.wrong(got, x, weight, call.leaf, nodes)
    return wrong


def weight_gradient(call: Call) -> int:
    """Over the tokens of samples, which do not follow each other in one of the operands."""
    c, f, s = call.case.n, call.case.width, call.case.k
    runs, nodes = call.leaves_of(s), call.nodes[1]
    x = call.operand(NUM_SAMPLES, s, c, along=1, runs=runs)
    y = call.operand(NUM_SAMPLES, s, f, along=1, runs=runs)
    got = call.products.weight_gradient(call.placed(x), call.placed(y, rows_between=1), call.leaf, nodes)
    return sum(call.wrong(got[:, b], x[b].T, y[b], call.leaf, nodes) for b in range(NUM_SAMPLES))


def groups_of(rows: int) -> tuple[Rows, ...]:
    """Three experts: one with no row, and the first rows last."""
    first = rows // 3
    return (2, first, rows), (1, first, first), (0, 0, first)


def project_experts(call: Call) -> int:
    """Each row with the matrix of its expert."""
    n, c, f = call.case.n, call.case.width, call.case.k
    groups = groups_of(n)
    x, weight = call.operand(n, f, along=1, runs=[f]), call.operand(3, c, f, along=2, runs=[f])
    got = call.products.project_experts(call.placed(x), call.placed(weight, rows_between=1), groups)
    return sum(
        call.wrong(got[None, first:last], x[first:last], weight[expert].T, f, ((0, 1),))
        for expert, first, last in groups
    )


def contract_experts(call: Call) -> int:
    """The same by leaves."""
    n, f, c = call.case.n, call.case.width, call.case.k
    groups, runs, nodes = groups_of(n), call.leaves_of(c), call.nodes[1]
    x, weight = call.operand(n, c, along=1, runs=runs), call.operand(3, c, f, along=1, runs=runs)
    placed = call.placed(x), call.placed(weight, rows_between=1)
    got = call.products.contract_experts(*placed, groups, call.leaf, nodes)
    return sum(
        call.wrong(got[:, first:last], x[first:last], weight[expert], call.leaf, nodes)
        for expert, first, last in groups
    )


def expert_weight_gradient(call: Call) -> int:
    """Over the rows of each expert."""
    c, f, n = call.case.n, call.case.width, call.case.k
    groups = groups_of(n)
    runs = [last - first for _, first, last in sorted(groups, key=lambda rows: rows[1:])]
    x, y = call.operand(n, c, along=0, runs=runs), call.operand(n, f, along=0, runs=runs)
    got = call.products.expert_weight_gradient(call.placed(x), call.placed(y), groups, n)
    return sum(
        call.wrong(got[number, None], x[first:last].T, y[first:last], n, ((0, 1),))
        for number, (_, first, last) in enumerate(groups)
    )


FORMS: tuple[Callable[[Call], int], ...] = (
    project,
    contract,
    weight_gradient,
    project_experts,
    contract_experts,
    expert_weight_gradient,
)


def exact_product(peer: Peer, case: Case, call: int) -> int:
    """Every form of the product once."""
    made = Call(peer, case, call)
    return sum(form(made) for form in FORMS)


def sizes_of(dtype: torch.dtype, block: int) -> Iterator[dict[str, int]]:
    """Rows, columns, k and leaves of the cases that find most: more than a tile of each with an odd rest, and with
    multiples of 16 elements, which are copied 16 bytes at a time."""
    tiles = (SMALL_TILES if block < AS_LAUNCHED else TILES)[dtype]
    m, n, k = (max(sizes) for sizes in zip(tiles.whole[:3], tiles.summed[:3], strict=True))
    odd, even = k + 3, 16 * (k // 16 + 1)
    yield {"n": m + 5, "width": n + 3, "k": 5 * odd - 2, "leaves": 5}
    yield {"n": m + 16, "width": n + 16, "k": 7 * even + 16, "leaves": 8}
