"""Our exact products on a GPU: bits that no layout changes, and their rate next to that of cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...backend.kernels.exact_products import ExactProducts, tiles_for
from ...backend.kernels.launch import launch_alone
from ...core.base.reduction import CarryTree, cut, maximal_nodes
from .checks import Result, Table
from .gpu_ranks import seconds_on_gpu
from .machine import Machine

SHAPES = ((8192, 8192, 4096), (8192, 4096, 14336), (512, 8192, 4096))
"""Rows, columns and k: a batch of tokens in layers of models of 8 and 70 billion parameters, and few tokens."""

SMALLER = (4096, 4096, 4096)
LEAVES = (512, 1024, 4096)
CALLS = 10


def products_here() -> ExactProducts:
    """On the current GPU, a program on each multiprocessor."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return ExactProducts(launch_alone, found.multi_processor_count, tiles_for(10 * found.major + found.minor))


def different(one: Tensor, other: Tensor) -> bool:
    """Whether any bit is."""
    return not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _contracted_by(products: ExactProducts, x_NC: Tensor, weight_CF: Tensor, leaf: int, tp: int) -> Tensor:
    """x W as `tp` ranks make it, each from its own leaves, and the tree that joins what they bring."""
    leaves = -(-len(weight_CF) // leaf)
    tree: CarryTree[Tensor] = CarryTree(leaves, torch.add)
    for rank in range(tp):
        lo, hi = cut(leaves, tp, rank)
        own = slice(lo * leaf, hi * leaf)
        nodes = maximal_nodes(leaves, lo, hi)
        local = [(first - lo, last - lo) for first, last in nodes]
        values = products.contract(x_NC[:, own].contiguous(), weight_CF[own].contiguous(), leaf, local)
        for node, value in zip(nodes, values, strict=True):
            tree.insert(node, value)
    return tree.root()


def _differences(products: ExactProducts, dtype: torch.dtype) -> Iterator[str]:
    """What changes bits of products of any numbers and must not."""
    generator = torch.Generator("cuda").manual_seed(7)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    x, weight, head = some(333, 4096), some(4096, 392), some(392, 4096)
    whole = products.contract(x, weight, 512, [(0, 8)])[0]
    for tp in (2, 3, 5, 8):
        if different(_contracted_by(products, x, weight, 512, tp), whole):
            yield f"a contraction cut over {tp} ranks"
    if different(products.contract(x[17:40], weight, 512, [(0, 8)])[0], whole[17:40]):
        yield "a contraction of fewer rows"
    projected = products.project(x, head)
    if different(products.project(x[100:111], head), projected[100:111]):
        yield "a projection of fewer rows"
    if different(products.project(x, head[131:291]), projected[:, 131:291]):
        yield "a projection cut over ranks"
    tokens, gradients = x.view(3, 111, 4096), some(3, 111, 72)
    summed = products.weight_gradient(tokens, gradients, 32, [(0, 4)])[0]
    if different(products.weight_gradient(tokens[1:2], gradients[1:2], 32, [(0, 4)])[0, 0], summed[1]):
        yield "a weight gradient of one sample"
    if different(products.weight_gradient(tokens[..., 512:640], gradients, 32, [(0, 4)])[0], summed[:, 512:640]):
        yield "a weight gradient cut over ranks"
    yield from _of_experts(products, some)
    if any(different(products.contract(x, weight, 512, [(0, 8)])[0], whole) for _ in range(20)):
        yield "a contraction made again"


def _of_experts(products: ExactProducts, some: Callable[..., Tensor]) -> Iterator[str]:
    """Experts side by side and one at a time."""
    weights, x, y = some(4, 512, 256), some(300, 256), some(300, 512)
    groups = [(0, 0, 37), (2, 37, 200), (3, 200, 300)]
    projected = products.project_experts(x, weights, groups)
    contracted = products.contract_experts(y, weights, groups, 128, [(0, 4)])[0]
    gradients = products.expert_weight_gradient(y, x, groups)
    for number, (expert, first, last) in enumerate(groups):
        rows = slice(first, last)
        gradient = products.weight_gradient(y[None, rows], x[None, rows], last - first, [(0, 1)])
        alone = products.contract(y[rows], weights[expert], 128, [(0, 4)])[0]
        if different(projected[rows], products.project(x[rows], weights[expert])):
            yield f"a projection of expert {expert} together with others"
        if different(contracted[rows], alone):
            yield f"a contraction of expert {expert} together with others"
        if different(gradients[number], gradient[0, 0]):
            yield f"a weight gradient of expert {expert} together with others"


def _rates(
    products: ExactProducts, shape: tuple[int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str | float, ...]]:
    """Rows of the table: product, shape, type, leaf, TFLOP/s and the share of what cuBLAS reaches."""
    m, n, k = shape
    x, weight = (torch.randn(*of, device="cuda").to(dtype) for of in ((m, k), (k, n)))
    head, tokens = weight.t().contiguous(), x.t().contiguous()
    flops, name = 2.0 * m * n * k, str(dtype).removeprefix("torch.")
    calls: list[tuple[str, int, Callable[[], object]]] = [("cuBLAS", k, functools.partial(torch.matmul, x, weight))]
    calls.append(("project", k, functools.partial(products.project, x, head)))
    for leaf in LEAVES:
        nodes = [(0, -(-k // leaf))]
        calls.append(("contract", leaf, functools.partial(products.contract, x, weight, leaf, nodes)))
    gradient = functools.partial(products.weight_gradient, tokens[None], weight[None], 512, [(0, -(-k // 512))])
    calls.append(("weight gradient", 512, gradient))
    best = 0.0
    for what, leaf, call in calls:
        rate = flops / seconds_on_gpu(call, CALLS) / 1e12
        best = best or rate
        yield what, "x".join(map(str, shape)), name, leaf, round(rate, 1), round(rate / best, 2)


def exact_products(machine: Machine) -> Result:
    """No cut, no other row and no other expert changes a bit of a product; rates, and cuBLAS'. The figure is the rate
    of the first shape's contraction in leaves of 512."""
    products = products_here()
    wrong = [f"{dtype}: {what}" for dtype in (torch.bfloat16, torch.float32) for what in _differences(products, dtype)]
    if wrong:
        return Result("failed", f"other bits: {'; '.join(wrong)}"[:400], len(wrong), "products")
    rows = [row for shape in SHAPES for row in _rates(products, shape, torch.bfloat16)]
    rows += _rates(products, SMALLER, torch.float32)
    table = Table("exact products", ("product", "m x n x k", "dtype", "leaf", "TFLOP/s", "of cuBLAS"), tuple(rows))
    figure = next(float(row[4]) for row in rows if row[0] == "contract")
    return Result("ok", "", figure, "TFLOP/s", (table,))
