"""The cases of `measure_machine`: products, kernels and collectives, as calls on operands that lie near or far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

PRODUCT_ROWS, PRODUCT_ROWS_QUICK = (32, 128, 512, 1024), (64, 512)
PRODUCT_SIZES, PRODUCT_SIZES_QUICK = (32, 128, 512, 2048), (64, 256, 1024)
"""Sizes of products: tokens, and widths."""

KERNEL_SIZES, KERNEL_SIZES_QUICK = (
    (1 << 8, 1 << 11, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22),
    (1 << 10, 1 << 16, 1 << 20),
)
"""Elements of memory-bound kernels."""

ATTENTION_SEQUENCES, ATTENTION_SEQUENCES_QUICK = (16, 32, 64, 128, 256, 512), (64, 256)
ATTENTION_HEAD_DIMS, ATTENTION_HEAD_DIMS_QUICK = (16, 32, 64), (32,)
ATTENTION_HEADS = 4
"""Heads of one measured attention; seconds are given per head."""

TRANSFER_BYTES, TRANSFER_BYTES_QUICK = (8, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23), (1 << 12, 1 << 19)
"""Bytes of the whole tensor of a collective, or of a message."""

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")

NEAR_BYTES, FAR_BYTES = 4 << 20, 96 << 20
"""Operands of a case lie all over so many bytes: near ones, which the kernel before has just made, outside a
core's own caches at most; far ones (weights, sums of gradients, optimizer state, activations kept for the
backward) in main memory."""

MOST_SETS = 64

HEAD_TOKENS, HEAD_WIDTH = 64, 32
"""Tokens and elements of a head of the kernels that work head by head."""

ADAMW_TENSORS = 8
"""Tensors of one measured update, whose seconds are given per tensor."""

NORM_WIDTH = 256
"""Columns of the rows that norms and sums are measured on."""


Call = Callable[[], Any]
Case = tuple[Literal["product", "kernel", "step"], str, tuple[int, ...], Callable[[], Sequence[Call]], float]
"""Kind, name, sizes, a maker of equal calls on different operands, and what one result is divided by."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one call: `kind` is product, kernel, step, collective or message, `sizes` its sizes (m n k; elements;
    none; bytes of the tensor). `alone` and `together` are steps on one rank while the others wait, and on all ranks at
    once. Of `turn`, `short` and `long` are what turns of little and of much work take longer with a collective,
    `short_work`, `long_work` and `work` the work itself, the last of the turns of `collective`.

    `name` says which: `nt`, `nn`, `tn` of products (which operand lies transposed), the kernel, the collective.
    `seconds` is the quantile that was asked for, `spread` the distance of the quartiles over the median, `ranks` how
    many processes took part.
    """

    kind: Literal["product", "kernel", "step", "collective", "message", "turn", "alone", "together"]
    name: str
    sizes: tuple[int, ...]
    ranks: int
    seconds: float
    spread: float


class Pool:
    """Random numbers of which operands are views, one after the other and round again."""

    def __init__(self, num_bytes: int, device: Any):
        import torch

        self.flat = torch.randn(num_bytes // 4, device=device)
        self._next = 0

    def take(self, *shape: int) -> Any:
        """The next tensor of a shape."""
        size = math.prod(shape)
        if self._next + size > len(self.flat):
            self._next = 0
        start, self._next = self._next, self._next + -(-size // 64) * 64
        return self.flat[start : start + size].view(shape)


class Pools:
    """Where operands come from: `near` and `far`."""

    def __init__(self, device: Any):
        import torch

        self.device = device
        self.far = Pool(FAR_BYTES, device)
        self.near = Pool(NEAR_BYTES, device)
        self._largest = torch.randn(2 * max(KERNEL_SIZES), device=device)

    def just_made(self, *shape: int) -> Any:
        """A near operand; of those larger than that part of memory there is one."""
        size = math.prod(shape)
        return self.near.take(*shape) if size <= len(self.near.flat) else self._largest[:size].view(shape)

    def sets(self, elements: int) -> int:
        """How many operand sets of so many elements a case alternates over: as many as lie side by side."""
        return max(1, min(MOST_SETS, len(self.far.flat) // max(1, elements)))


def products(pools: Pools, *, quick: bool) -> Iterator[Case]:
    """Products of a linear layer on a grid of shapes: with its weight, with its weight transposed, and
    of its weight gradient."""
    rows = PRODUCT_ROWS_QUICK if quick else PRODUCT_ROWS
    widths = PRODUCT_SIZES_QUICK if quick else PRODUCT_SIZES
    for m in rows:
        for n in widths:
            for k in widths:
                yield (
                    "product",
                    "nt",
                    (m, n, k),
                    product_case((n, k), (m, k), lambda weight, x: x @ weight.t(), pools),
                    1.0,
                )
                yield "product", "nn", (m, n, k), product_case((k, n), (m, k), lambda weight, x: x @ weight, pools), 1.0
    for k in rows:  # of a weight gradient the tokens are what is summed over
        for m in widths:
            for n in widths:
                yield (
                    "product",
                    "tn",
                    (m, n, k),
                    product_case((k, m), (k, n), lambda x, dy: x.t() @ dy, pools),
                    1.0,
                )
                yield "product", "tn_", (m, n, k), _added_case(m, n, k, pools), 1.0


def product_case(
    far: tuple[int, int], near: tuple[int, int], multiply: Callable[..., Any], pools: Pools
) -> Callable[[], Sequence[Call]]:
    """A maker of calls `multiply(far operand, near operand)`."""

    def make() -> Sequence[Call]:
        operands = [(pools.far.take(*far), pools.just_made(*near)) for _ in range(pools.sets(math.prod(far)))]
        return [partial(multiply, a, b) for a, b in operands]

    return make


def _added_case(m: int, n: int, k: int, pools: Pools) -> Callable[[], Sequence[Call]]:
    """A maker of calls that add a weight gradient [m, n] to a sum."""

    def make() -> Sequence[Call]:
        count = pools.sets(k * m + m * n)
        operands = [(pools.far.take(m, n), pools.far.take(k, m), pools.just_made(k, n)) for _ in range(count)]
        return [partial(_add_product, *each) for each in operands]

    return make


def _add_product(total: Any, x: Any, dy: Any) -> None:
    total.addmm_(x.t(), dy, alpha=1e-9)


def _several(make: Callable[[], Call], count: int) -> list[Call]:
    return [make() for _ in range(count)]


def kernels(pools: Pools, *, quick: bool) -> Iterator[Case]:
    """Every other kernel of the backend's layers and optimizer, by elements; attention cores by tokens, per head."""
    import torch

    sizes, device = KERNEL_SIZES_QUICK if quick else KERNEL_SIZES, pools.device
    for name, make in _elementwise(pools).items():
        for elements in sizes:
            sets = pools.sets(4 * ADAMW_TENSORS * elements if name == "adamw" else 2 * elements)
            yield (
                "kernel",
                name,
                (elements,),
                partial(_several, partial(make, elements), sets),
                float(ADAMW_TENSORS) if name == "adamw" else 1.0,
            )
    for name, operation in _heads().items():
        for elements in (size for size in sizes if size >= HEAD_WIDTH * HEAD_TOKENS):
            yield "kernel", name, (elements,), partial(_several, partial(operation, pools, elements), 4), 1.0
    for name, call in _function_calls(device).items():
        yield "kernel", name, (1,), partial(list, (call,)), 1.0
    for head_dim in ATTENTION_HEAD_DIMS_QUICK if quick else ATTENTION_HEAD_DIMS:
        for s in ATTENTION_SEQUENCES_QUICK if quick else ATTENTION_SEQUENCES:
            for name in ("attention", "attention_backward"):
                shape = (1, ATTENTION_HEADS, s, head_dim)
                sets = min(4, pools.sets(8 * math.prod(shape)))
                attend = partial(_several, partial(_attention, torch, name, shape, device), sets)
                yield "kernel", f"{name}_{head_dim}", (s,), attend, float(ATTENTION_HEADS)


def _attention(torch: Any, name: str, shape: tuple[int, ...], device: Any) -> Call:
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    if name == "attention":
        return lambda: attend(q, k, v, is_causal=True)
    output, gradient = attend(q, k, v, is_causal=True), torch.randn(shape, device=device)
    return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)


def _elementwise(pools: Pools) -> dict[str, Callable[[int], Call]]:
    """Name -> a call on so many elements: kernels of which the backend's layers and optimizer are made."""
    import torch
    from torch.nn import functional as F
    from torch.optim.adamw import adamw as update

    device = pools.device

    def near(operation: Callable[..., Any]) -> Callable[[int], Call]:
        def make(elements: int) -> Call:
            a, b = pools.just_made(elements), pools.just_made(elements)
            return lambda: operation(a, b)

        return make

    def far(operation: Callable[..., Any]) -> Callable[[int], Call]:
        def make(elements: int) -> Call:
            a, b = pools.far.take(elements), pools.just_made(elements)
            return lambda: operation(a, b)

        return make

    def rows(operation: Callable[..., Any]) -> Callable[[int], Call]:
        def make(elements: int) -> Call:
            x = pools.just_made(1, elements // NORM_WIDTH, NORM_WIDTH)
            return lambda: operation(x)

        return make

    def transposed(elements: int) -> Call:
        x = pools.just_made(1, elements // 64, 2, 32).transpose(1, 2)
        return lambda: x.contiguous()

    def norm_backward(elements: int) -> Call:
        x, dy = pools.far.take(elements // NORM_WIDTH, NORM_WIDTH), pools.just_made(elements // NORM_WIDTH, NORM_WIDTH)
        weight = torch.ones(NORM_WIDTH, device=device)
        _, mean, rstd = torch.native_layer_norm(x, (NORM_WIDTH,), weight, weight, 1e-5)
        backward = torch.ops.aten.native_layer_norm_backward
        return lambda: backward(dy, x, (NORM_WIDTH,), mean, rstd, weight, weight, [True, False, False])

    def adamw(elements: int) -> Call:
        sizes = range(ADAMW_TENSORS)
        updated, gradients, first, second = ([pools.far.take(elements).clone() for _ in sizes] for _ in range(4))
        counts, scale = [torch.zeros((), device=device) for _ in sizes], torch.tensor(2.0, device=device)
        second = [moment.square_() for moment in second]
        choice: dict[str, Any] = {
            "lr": 1e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        }
        return lambda: update(
            updated, gradients, first, second, [], counts, foreach=False, fused=True, grad_scale=scale, **choice
        )

    def loss(elements: int) -> Call:
        x, targets = logits(elements)
        return lambda: F.cross_entropy(x, targets, reduction="none")

    def loss_backward(elements: int) -> Call:
        x, targets = logits(elements)
        losses = F.cross_entropy(x.requires_grad_(), targets, reduction="none")
        gradient = torch.ones_like(losses)
        return lambda: torch.autograd.grad(losses, x, gradient, retain_graph=True)

    def logits(elements: int) -> tuple[Any, Any]:
        rows = elements // NORM_WIDTH
        return pools.just_made(rows, NORM_WIDTH).detach(), torch.arange(rows, device=device) % NORM_WIDTH

    weight = torch.ones(NORM_WIDTH, device=device)
    return {
        "add": near(lambda a, b: a + b),
        "add_": far(lambda a, b: a.add_(b, alpha=1e-9)),
        "gelu": near(lambda a, _: F.gelu(a)),
        "gelu_backward": far(lambda a, b: torch.ops.aten.gelu_backward(b, a)),
        "gelu_tanh": near(lambda a, _: F.gelu(a, approximate="tanh")),
        "gelu_tanh_backward": far(lambda a, b: torch.ops.aten.gelu_backward(b, a, approximate="tanh")),
        "silu": near(lambda a, _: F.silu(a)),
        "silu_backward": far(lambda a, b: torch.ops.aten.silu_backward(b, a)),
        "exp": near(lambda a, _: a.exp()),
        "transpose": transposed,
        "cross_entropy": loss,
        "cross_entropy_backward": loss_backward,
        "row_norm": rows(lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
        "row_mean": rows(lambda x: x.mean(-1, keepdim=True)),
        "token_sum": rows(lambda x: x.sum((0, 1))),
        "layer_norm": rows(lambda x: torch.native_layer_norm(x, (NORM_WIDTH,), weight, weight, 1e-5)),
        "layer_norm_backward": norm_backward,
        "square_sum": far(lambda a, _: torch.linalg.vector_norm(a.view(-1, NORM_WIDTH), dim=-1).double()),
        "adamw": adamw,
    }


def _heads() -> dict[str, Callable[[Pools, int], Call]]:
    """Name -> a call on heads of `HEAD_WIDTH` elements and `HEAD_TOKENS` tokens: rotation of heads that lie next to
    each other, its backward, and repetition."""
    import torch

    from ..model.rotary import rope_table, turned

    frequencies = [1e4 ** (-pair / HEAD_WIDTH) for pair in range(0, HEAD_WIDTH, 2)]

    def operands(pools: Pools, elements: int) -> tuple[Any, Any, Any]:
        cos, sin = (part[:, None, None] for part in rope_table(HEAD_TOKENS, frequencies, pools.device))
        return (
            pools.just_made(HEAD_TOKENS, elements // (HEAD_TOKENS * HEAD_WIDTH), 1, HEAD_WIDTH),
            cos,
            sin.chunk(2, -1)[0],
        )

    def rotated(pools: Pools, elements: int) -> Call:
        x, cos, sin = operands(pools, elements)
        return lambda: turned(x, cos, sin)

    def rotated_back(pools: Pools, elements: int) -> Call:
        dy, cos, sin = operands(pools, elements)
        out = torch.empty_like(dy)
        return lambda: turned(dy, cos, sin, back=True, out=out)

    def repeated(pools: Pools, elements: int) -> Call:
        heads = max(elements // 2 // (HEAD_TOKENS * HEAD_WIDTH), 1)
        x = pools.just_made(1, heads, HEAD_TOKENS, HEAD_WIDTH)
        return lambda: x.repeat_interleave(2, dim=1)

    return {"rotate": rotated, "rotate_backward": rotated_back, "repeat": repeated}


def _function_calls(device: Any) -> dict[str, Call]:
    """A layer that does nothing, forward and backward: what Python and autograd cost besides the kernels."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, layer: Any) -> Any:
            ctx.layer = layer
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            (_,) = ctx.saved_tensors
            return dy.contiguous(), None

    x = torch.zeros(1, device=device, requires_grad=True)
    deep = x
    for _ in range(16):
        deep = Nothing.apply(deep, None)
    gradient = torch.ones(1, device=device)
    return {
        "function": lambda: Nothing.apply(x, None),
        "function_backward_16": lambda: torch.autograd.grad(deep, x, gradient, retain_graph=True),
    }


def collective_call(op: str, num_bytes: int, transport: Any, group: Any) -> Call:
    """What fast and exact numerics ask of a group of all ranks, for a whole tensor of so many bytes."""
    import torch

    size, device = transport.world_size, transport.device
    whole = torch.zeros(max(1, num_bytes // 4), device=device)
    part = torch.zeros(max(1, num_bytes // 4 // size), device=device)
    match op:
        case "all_reduce":
            return lambda: group.all_reduce(whole, "sum")
        case "all_gather":
            return lambda: group.all_gather(part)
        case _:
            assert op == "all_to_all", op
            return lambda: group.all_to_all([part] * size, [tuple(part.shape)] * size)
