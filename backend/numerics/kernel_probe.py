"""Whether our kernels keep their promise on this device: products whose bits do not change with what is multiplied
with them, measured with one shape of a plan for each form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ...core.layout.leaves import Leaves
from ...core.plan.plan import Plan
from .owned_leaves import OwnedLeaves
from .products import Products
from .row_groups import ExpertRows, RowGroup
from .tile_probe import tile_sizes

Random = Callable[..., Tensor]
Pairs = Iterator[tuple[Tensor, Tensor]]

NUM_LEAVES = 3


def differences(products: Products, form: str, plan: Plan, dtype: torch.dtype, device: torch.device) -> int:
    """Elements that differ though they should not. Numbers are those of a seed."""
    tokens, width, whole = min(tile_sizes(plan))
    generator = torch.Generator().manual_seed(5)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return sum(int((one != other).sum()) for one, other in _PAIRS[form](products, some, tokens, width, whole))


def _leaves(width: int, ranks: int, rank: int) -> OwnedLeaves:
    return OwnedLeaves(Leaves(NUM_LEAVES, 1), width, ranks, rank)


def _project(products: Products, some: Random, tokens: int, width: int, whole: int) -> Pairs:
    """Fewer rows and fewer columns."""
    x, weight = some(tokens + 1, whole), some(NUM_LEAVES * width, whole)
    project = partial(products.project, blocks=((0, tokens),))
    every = project(x, weight, _leaves(width, 1, 0))
    yield project(x[1:], weight[width:], _leaves(width, 1, 0)), every[1:, width:]


def _contract(products: Products, some: Random, tokens: int, width: int, whole: int) -> Pairs:
    """Leaves of two ranks, and fewer rows."""
    x, weight = some(tokens + 1, NUM_LEAVES * width), some(NUM_LEAVES * width, whole)
    contract = partial(products.contract, blocks=((0, tokens),))
    (every,) = contract(x, weight, _leaves(width, 1, 0))
    parts: list[Tensor] = []
    for rank in range(2):
        leaves = _leaves(width, 2, rank)
        lo, hi = leaves.items
        parts += contract(x[1:, lo * width : hi * width].contiguous(), weight[lo * width : hi * width], leaves)
    yield parts[0] + parts[1], every[1:]


def _multiply(products: Products, some: Random, tokens: int, width: int, whole: int) -> Pairs:
    """Fewer rows."""
    x, matrix = some(tokens + 1, whole), some(whole, width)
    every = products.multiply(x, matrix, ((0, tokens + 1),))
    yield products.multiply(x[1:], matrix, ((0, tokens),)), every[1:]


def _weight_gradient(products: Products, some: Random, tokens: int, width: int, whole: int) -> Pairs:
    """One of two samples, and fewer rows."""
    x, y, blocks = some(2, tokens, 2 * width), some(2, tokens, whole), ((0, tokens),)
    every = products.weight_gradient(x, y, _leaves(width, 1, 0), blocks)[1]
    yield products.weight_gradient(x[1:, :, width:], y[1:], _leaves(width, 1, 0), blocks)[0], every[width:]


def _experts(products: Products, some: Random, tokens: int, width: int, whole: int) -> Pairs:
    """One of two experts."""
    x, y, weight = some(2 * tokens, whole), some(2 * tokens, width), some(2, width, whole)
    leaves, one = _leaves(width, NUM_LEAVES, 0), RowGroup(0, 0, 0, tokens)
    alone = ExpertRows(1, (one,), ((0, 0),))
    both = ExpertRows(2, (one, RowGroup(1, 0, tokens, 2 * tokens)), ((0, 0),))
    yield (
        products.project_experts(x[:tokens], weight[:1], alone, leaves),
        products.project_experts(x, weight, both, leaves)[:tokens],
    )
    yield (
        products.contract_experts(y[:tokens], weight[:1], alone, leaves),
        products.contract_experts(y, weight, both, leaves)[:, :tokens],
    )
    (_, of_one), (_, of_both) = (
        next(products.expert_weight_gradient(y[rows], x[rows], groups, leaves))
        for rows, groups in ((slice(tokens), alone), (slice(None), both))
    )
    yield of_one[0], of_both[0]


def _heads(products: Products, some: Random, tokens: int, width: int, whole: int) -> Pairs:
    """One of two heads."""
    left, right = some(1, 2, tokens, width).float(), some(1, 2, width, tokens).float()
    yield products.multiply_heads(left[:, 1:], right[:, 1:]), products.multiply_heads(left, right)[:, 1:]


_PAIRS: Mapping[str, Callable[[Products, Random, int, int, int], Pairs]] = {
    "project": _project,
    "contract": _contract,
    "multiply": _multiply,
    "weight_gradient": _weight_gradient,
    "experts": _experts,
    "heads": _heads,
}
