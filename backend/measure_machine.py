"""What this machine takes for the pieces of a training step: products, kernels, collectives and messages, measured.

Cases take turns, round after round, so that a machine that is slower for a while is slower for all of them alike; each case is timed
in short bursts over operands that do not stay in the nearest cache, and the result is a quantile over the rounds, the median unless
asked otherwise. Ranks are those of training: processes with one thread each, MKL in its reproducible mode, our groups and channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from .launch import Workers

PRODUCT_ROWS, PRODUCT_ROWS_QUICK = (32, 128, 512, 1024), (64, 512)
PRODUCT_SIZES, PRODUCT_SIZES_QUICK = (32, 128, 512, 2048), (64, 256, 1024)
"""Sizes of products: tokens, and widths."""

KERNEL_SIZES, KERNEL_SIZES_QUICK = (1 << 8, 1 << 11, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22), (1 << 10, 1 << 16, 1 << 20)
"""Elements of memory-bound kernels."""

ATTENTION_SEQUENCES, ATTENTION_SEQUENCES_QUICK = (16, 32, 64, 128, 256, 512), (64, 256)
ATTENTION_HEAD_DIMS, ATTENTION_HEAD_DIMS_QUICK = (16, 32, 64), (32,)
ATTENTION_HEADS = 4
"""Heads of one measured attention; seconds are given per head."""

TRANSFER_BYTES, TRANSFER_BYTES_QUICK = (8, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23), (1 << 12, 1 << 19)
"""Bytes of the whole tensor of a collective, or of a message."""

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")

BURST_S = 1.5e-3
"""A burst has as many calls as fill about this time: long beside the clock's resolution, short beside what else a machine does."""

MOST_CALLS = 64
ROUNDS, ROUNDS_QUICK = 25, 5
CACHE_BYTES = 8 << 20
"""Operands of a case alternate over about so many bytes: more than a core's own cache, as in a step, where weights come from farther."""

NORM_WIDTH = 256
"""Columns of the rows that norms and sums are measured on."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one call: `kind` is product, kernel, collective or message, `sizes` its sizes (m n k; elements; bytes of the tensor).

    `name` says which: `nt`, `nn`, `tn` of products (which operand lies transposed), the kernel, the collective. `seconds` is the
    quantile that was asked for, `spread` the distance of the quartiles over the median, `ranks` how many processes took part.
    """

    kind: Literal["product", "kernel", "collective", "message"]
    name: str
    sizes: tuple[int, ...]
    ranks: int
    seconds: float
    spread: float


Call = Callable[[], Any]
Case = tuple[Literal["product", "kernel", "collective", "message"], str, tuple[int, ...], Callable[[], Sequence[Call]], float]
"""Kind, name, sizes, a maker of equal calls on different operands, and what one result is divided by."""


@dataclass(frozen=True)
class MeasureJob:
    """What the ranks are told."""

    compute: bool
    rounds: int
    quick: bool
    quantile: float


def measure_machine(
    *,
    quick: bool = False,
    groups: Sequence[int] = (2, 4, 8),
    rounds: int | None = None,
    quantile: float = 0.5,
    transport: Literal["gloo", "nccl"] = "gloo",
    report: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Everything measured: one rank alone for products and kernels, then groups of ranks for collectives and messages.

    `quick` takes fewer sizes, two ranks and fewer rounds: seconds instead of minutes. `report` hears of the progress.
    """
    rounds = rounds or (ROUNDS_QUICK if quick else ROUNDS)
    found: list[Measurement] = []
    for size in (1, *((2,) if quick else groups)):
        report(f"{'products and kernels' if size == 1 else 'collectives and messages'} on {size} rank{'s' * (size > 1)}")
        with Workers(size, transport) as workers:
            found += workers.run(measure_rank, MeasureJob(size == 1, rounds, quick, quantile))[0]
    return found


def measure_rank(transport: Any, job: MeasureJob) -> list[Measurement]:
    """The job of one rank; global rank 0 has the result."""
    import torch

    if job.compute:
        cases = [*_products(transport.device, quick=job.quick), *_kernels(transport.device, quick=job.quick)]
        seconds = _measured(cases, job.rounds, lambda: None, transport.device)
    else:
        world = transport.group("measure", "tp", range(transport.world_size))
        cases = [*_collectives(transport, world, quick=job.quick), *_messages(transport, quick=job.quick)]
        seconds = _measured(cases, job.rounds, world.barrier, transport.device, together=world)
    table = torch.tensor(seconds, dtype=torch.float64)
    quartiles = torch.quantile(table, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1)
    chosen = torch.quantile(table, job.quantile, dim=1).tolist()
    spreads = ((quartiles[2] - quartiles[0]) / quartiles[1]).tolist()
    return [
        Measurement(kind, name, sizes, transport.world_size, value / per, spread)
        for (kind, name, sizes, _, per), value, spread in zip(cases, chosen, spreads, strict=True)
    ]


def _measured(
    cases: Sequence[Case], rounds: int, barrier: Callable[[], None], device: Any, *, together: Any = None
) -> list[list[float]]:
    """Seconds of one call of each case, round by round."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds: list[list[float]] = [[] for _ in cases]
    made = [list(make()) for _, _, _, make, _ in cases]
    counts = []
    for calls in made:
        barrier()
        calls[0]()
        finish()
        barrier()
        start_s = perf_counter()
        calls[-1]()
        finish()
        once_s = perf_counter() - start_s
        counts.append(max(1, min(MOST_CALLS, int(BURST_S / once_s))))
    if together is not None:  # every rank makes as many calls
        counts = together.all_reduce(torch.tensor(counts, device=device), "max").tolist()
    for _ in range(rounds):
        for number, (calls, count) in enumerate(zip(made, counts, strict=True)):
            barrier()
            calls[0]()
            finish()
            start_s = perf_counter()
            for turn in range(count):
                calls[turn % len(calls)]()
            finish()
            seconds[number].append((perf_counter() - start_s) / count)
    return seconds


def _copies(num_bytes: int) -> int:
    """How many operand sets keep a case out of the nearest cache."""
    return max(1, min(8, CACHE_BYTES // max(1, num_bytes)))


def _products(device: Any, *, quick: bool) -> Iterator[Case]:
    rows = PRODUCT_ROWS_QUICK if quick else PRODUCT_ROWS
    widths = PRODUCT_SIZES_QUICK if quick else PRODUCT_SIZES
    for m in rows:
        for n in widths:
            for k in widths:
                yield "product", "nt", (m, n, k), _product((m, k), (n, k), lambda a, b: a @ b.t(), device), 1.0
                yield "product", "nn", (m, n, k), _product((m, k), (k, n), lambda a, b: a @ b, device), 1.0
    for k in rows:  # of a weight gradient the tokens are what is summed over
        for m in widths:
            for n in widths:
                yield "product", "tn", (m, n, k), _product((k, m), (k, n), lambda a, b: a.t() @ b, device), 1.0


def _product(one: tuple[int, int], two: tuple[int, int], multiply: Callable[..., Any], device: Any) -> Callable[[], Sequence[Call]]:
    import torch

    def make() -> Sequence[Call]:
        sets = _copies(4 * (one[0] * one[1] + two[0] * two[1]))
        operands = [(torch.randn(*one, device=device), torch.randn(*two, device=device)) for _ in range(sets)]
        return [lambda a=a, b=b: multiply(a, b) for a, b in operands]

    return make


def _kernels(device: Any, *, quick: bool) -> Iterator[Case]:
    import torch

    from .model.attention import rope_table

    sizes = KERNEL_SIZES_QUICK if quick else KERNEL_SIZES
    for name, make in _elementwise(device).items():
        for elements in sizes:
            yield "kernel", name, (elements,), lambda make=make, elements=elements: [make(elements) for _ in range(_copies(8 * elements))], 1.0
    for elements in sizes[:4]:
        call = lambda elements=elements: rope_table(elements // 16, 16, 1e4, device)  # noqa: E731
        yield "kernel", "rope_table", (elements,), lambda call=call: [call], 1.0
    for name, call in _function_calls(device).items():
        yield "kernel", name, (1,), lambda call=call: [call], 1.0
    for head_dim in ATTENTION_HEAD_DIMS_QUICK if quick else ATTENTION_HEAD_DIMS:
        for s in ATTENTION_SEQUENCES_QUICK if quick else ATTENTION_SEQUENCES:
            for name in ("attention", "attention_backward"):
                shape = (1, ATTENTION_HEADS, s, head_dim)
                make = lambda name=name, shape=shape: [_attention(torch, name, shape, device)]  # noqa: E731
                yield "kernel", f"{name}_{head_dim}", (s,), make, float(ATTENTION_HEADS)


def _attention(torch: Any, name: str, shape: tuple[int, ...], device: Any) -> Call:
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    if name == "attention":
        return lambda: attend(q, k, v, is_causal=True)
    output, gradient = attend(q, k, v, is_causal=True), torch.randn(shape, device=device)
    return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)


def _elementwise(device: Any) -> dict[str, Callable[[int], Call]]:
    """Name -> a call on so many elements: kernels of which the backend's layers and optimizer are made."""
    import torch
    from torch.nn import functional as F

    def pair(operation: Callable[..., Any]) -> Callable[[int], Call]:
        def make(elements: int) -> Call:
            a, b = torch.randn(elements, device=device), torch.randn(elements, device=device)
            return lambda: operation(a, b)

        return make

    def rows(operation: Callable[..., Any]) -> Callable[[int], Call]:
        def make(elements: int) -> Call:
            x = torch.randn(1, elements // NORM_WIDTH, NORM_WIDTH, device=device)
            return lambda: operation(x)

        return make

    def transposed(elements: int) -> Call:
        x = torch.randn(1, elements // 64, 2, 32, device=device).transpose(1, 2)
        return lambda: x.contiguous()

    def norm_backward(elements: int) -> Call:
        x = torch.randn(elements // NORM_WIDTH, NORM_WIDTH, device=device)
        weight = torch.ones(NORM_WIDTH, device=device)
        _, mean, rstd = torch.native_layer_norm(x, (NORM_WIDTH,), weight, weight, 1e-5)
        backward = torch.ops.aten.native_layer_norm_backward
        return lambda: backward(x, x, (NORM_WIDTH,), mean, rstd, weight, weight, [True, False, False])

    def adamw(elements: int) -> Call:
        parameter = torch.randn(elements, device=device)
        optimizer = torch.optim.AdamW([parameter], lr=1e-4, foreach=False)
        parameter.grad = torch.randn(elements, device=device)
        return lambda: optimizer.step()

    weight = torch.ones(NORM_WIDTH, device=device)
    return {
        "add": pair(lambda a, b: a + b),
        "add_": pair(lambda a, b: a.add_(b, alpha=1e-9)),
        "gelu": pair(lambda a, _: F.gelu(a)),
        "gelu_backward": pair(lambda a, b: torch.ops.aten.gelu_backward(b, a)),
        "gelu_tanh": pair(lambda a, _: F.gelu(a, approximate="tanh")),
        "gelu_tanh_backward": pair(lambda a, b: torch.ops.aten.gelu_backward(b, a, approximate="tanh")),
        "silu": pair(lambda a, _: F.silu(a)),
        "silu_backward": pair(lambda a, b: torch.ops.aten.silu_backward(b, a)),
        "exp": pair(lambda a, _: a.exp()),
        "transpose": transposed,
        "row_mean": rows(lambda x: x.mean(-1, keepdim=True)),
        "token_sum": rows(lambda x: x.sum((0, 1))),
        "layer_norm": rows(lambda x: torch.native_layer_norm(x, (NORM_WIDTH,), weight, weight, 1e-5)),
        "layer_norm_backward": norm_backward,
        "square_sum": pair(lambda a, _: a.double().square().sum().item()),
        "adamw": adamw,
    }


def _function_calls(device: Any) -> dict[str, Call]:
    """A layer that does nothing, forward and backward: what Python and autograd cost beside the kernels."""
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


def _collectives(transport: Any, group: Any, *, quick: bool) -> Iterator[Case]:
    import torch

    size, device = transport.world_size, transport.device
    for num_bytes in TRANSFER_BYTES_QUICK if quick else TRANSFER_BYTES:
        for op in COLLECTIVES:

            def make(op: str = op, num_bytes: int = num_bytes) -> Sequence[Call]:
                whole = torch.zeros(max(1, num_bytes // 4), device=device)
                part = torch.zeros(max(1, num_bytes // 4 // size), device=device)
                if op == "all_reduce":
                    return [lambda: group.all_reduce(whole, "sum")]
                if op == "all_gather":
                    return [lambda: group.all_gather(part)]
                return [lambda: group.all_to_all([part] * size, [tuple(part.shape)] * size)]

            yield "collective", op, (num_bytes,), make, 1.0


def _messages(transport: Any, *, quick: bool) -> Iterator[Case]:
    """A message from rank 0 to rank 1 and one back; the others wait at the barrier."""
    import torch

    if transport.world_size != 2:
        return
    ends = [transport.channel(f"measure/{source}", source, 1 - source) for source in (0, 1)]
    for num_bytes in TRANSFER_BYTES_QUICK if quick else TRANSFER_BYTES:
        payload = torch.zeros(max(1, num_bytes // 4), device=transport.device)

        def there_and_back(payload: Any = payload) -> None:
            for source, channel in enumerate(ends):
                if transport.global_rank == source:
                    channel.send(payload)
                else:
                    channel.receive(tuple(payload.shape), payload.dtype)

        yield "message", "message", (num_bytes,), lambda call=there_and_back: [call], 2.0
