"""Our exact products on a GPU: bits that no layout changes, and their rate next to that of cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...backend.kernels.exact_products import ExactProducts, tiles_for
from ...backend.kernels.launch import launch_alone
from ...core.base.reduction import CarryTree, cut, maximal_nodes
from ..kernels.products_story import SMALL_TILES
from .checks import Result, Table
from .gpu_ranks import seconds_on_gpu
from .machine import Machine
from .sizes import Shape, Sizes, sizes_for


def products_here(machine: Machine) -> ExactProducts:
    """On the current GPU, a program on each multiprocessor; with small tiles where sizes are small."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    tiles = SMALL_TILES if machine.is_small else tiles_for(10 * found.major + found.minor)
    return ExactProducts(launch_alone, found.multi_processor_count, tiles)


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


def _differences(products: ExactProducts, dtype: torch.dtype, sizes: Sizes) -> Iterator[str]:
    """What changes bits of products of any numbers and must not."""
    generator = torch.Generator("cuda").manual_seed(7)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    (rows, columns, k), leaf = sizes.exact_bits, sizes.bits_leaf
    x, weight, head = some(rows, k), some(k, columns), some(columns, k)
    nodes = [(0, k // leaf)]
    whole = products.contract(x, weight, leaf, nodes)[0]
    for tp in (2, 3, 5, 8):
        if different(_contracted_by(products, x, weight, leaf, tp), whole):
            yield f"a contraction cut over {tp} ranks"
    few = slice(rows // 20 + 1, rows // 8)
    if different(products.contract(x[few], weight, leaf, nodes)[0], whole[few]):
        yield "a contraction of fewer rows"
    projected = products.project(x, head)
    if different(products.project(x[few], head), projected[few]):
        yield "a projection of fewer rows"
    own = slice(columns // 3 + 1, 3 * columns // 4)
    if different(products.project(x, head[own]), projected[:, own]):
        yield "a projection cut over ranks"
    tokens, gradients = x.view(3, -1, k), some(3, rows // 3, 72)
    leaves = [(0, -(-(rows // 3) // sizes.token_leaf))]
    summed = products.weight_gradient(tokens, gradients, sizes.token_leaf, leaves)[0]
    if different(products.weight_gradient(tokens[1:2], gradients[1:2], sizes.token_leaf, leaves)[0, 0], summed[1]):
        yield "a weight gradient of one sample"
    part = slice(k // 8, k // 8 + k // 32)
    if different(products.weight_gradient(tokens[..., part], gradients, sizes.token_leaf, leaves)[0], summed[:, part]):
        yield "a weight gradient cut over ranks"
    yield from _of_experts(products, some, sizes)
    if any(different(products.contract(x, weight, leaf, nodes)[0], whole) for _ in range(sizes.repeats)):
        yield "a contraction made again"


def _of_experts(products: ExactProducts, some: Callable[..., Tensor], sizes: Sizes) -> Iterator[str]:
    """Experts side by side and one at a time."""
    wide, narrow, first, second, tokens = (size // sizes.scale for size in (512, 256, 37, 200, 300))
    leaf, nodes = -(-wide // 4), [(0, 4)]
    weights, x, y = some(4, wide, narrow), some(tokens, narrow), some(tokens, wide)
    groups = [(0, 0, first), (2, first, second), (3, second, tokens)]
    projected = products.project_experts(x, weights, groups)
    contracted = products.contract_experts(y, weights, groups, leaf, nodes)[0]
    gradients = products.expert_weight_gradient(y, x, groups, tokens)
    for number, (expert, begin, end) in enumerate(groups):
        rows = slice(begin, end)
        gradient = products.weight_gradient(y[None, rows], x[None, rows], end - begin, [(0, 1)])
        alone = products.contract(y[rows], weights[expert], leaf, nodes)[0]
        if different(projected[rows], products.project(x[rows], weights[expert])):
            yield f"a projection of expert {expert} together with others"
        if different(contracted[rows], alone):
            yield f"a contraction of expert {expert} together with others"
        if different(gradients[number], gradient[0, 0]):
            yield f"a weight gradient of expert {expert} together with others"


def _rates(
    products: ExactProducts, shape: Shape, dtype: torch.dtype, sizes: Sizes
) -> Iterator[tuple[str | float, ...]]:
    """Rows of the table: product, shape, type, leaf, TFLOP/s and the share of what cuBLAS reaches."""
    m, n, k = shape
    x, weight = (torch.randn(*of, device="cuda").to(dtype) for of in ((m, k), (k, n)))
    head, tokens = weight.t().contiguous(), x.t().contiguous()
    flops, name = 2.0 * m * n * k, str(dtype).removeprefix("torch.")
    calls: list[tuple[str, int, Callable[[], object]]] = [("cuBLAS", k, functools.partial(torch.matmul, x, weight))]
    calls.append(("project", k, functools.partial(products.project, x, head)))
    for leaf in sizes.leaves:
        nodes = [(0, -(-k // leaf))]
        calls.append(("contract", leaf, functools.partial(products.contract, x, weight, leaf, nodes)))
    gradient = functools.partial(
        products.weight_gradient, tokens[None], weight[None], sizes.leaves[0], [(0, -(-k // sizes.leaves[0]))]
    )
    calls.append(("weight gradient", sizes.leaves[0], gradient))
    best = 0.0
    for what, leaf, call in calls:
        rate = flops / seconds_on_gpu(call, sizes.exact_calls) / 1e12
        best = best or rate
        yield what, "x".join(map(str, shape)), name, leaf, round(rate, 1), round(rate / best, 2)


def exact_products(machine: Machine) -> Result:
    """No cut, no other row and no other expert changes a bit of a product; rates, and cuBLAS'. The figure is the rate
    of the first shape's contraction in leaves of 512."""
    products, sizes = products_here(machine), sizes_for(machine)
    types = (torch.bfloat16, torch.float32)
    wrong = [f"{dtype}: {what}" for dtype in types for what in _differences(products, dtype, sizes)]
    if wrong:
        return Result("failed", f"other bits: {'; '.join(wrong)}"[:400], len(wrong), "products")
    rows = [row for shape in sizes.exact_products for row in _rates(products, shape, torch.bfloat16, sizes)]
    rows += _rates(products, sizes.exact_fp32, torch.float32, sizes)
    table = Table("exact products", ("product", "m x n x k", "dtype", "leaf", "TFLOP/s", "of cuBLAS"), tuple(rows))
    figure = next(float(row[4]) for row in rows if row[0] == "contract")
    return Result("ok", "", figure, "TFLOP/s", (table,))
