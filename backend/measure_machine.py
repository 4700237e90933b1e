"""What this machine takes for the pieces of a training step: products, kernels, collectives and messages, measured.

Cases take turns, round after round, so that a machine that is slower for a while is slower for all of them alike; each case is timed
in short bursts over operands from all over a large pool, and the result is a quantile over the rounds, the median unless
asked otherwise. Ranks are those of training: processes with one thread each, MKL in its reproducible mode, our groups and channels.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
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

BURST_S = 0.6e-3
"""A burst has as many calls as fill about this time: long beside the clock's resolution, short beside what else a machine does."""

MOST_CALLS = 5
"""Calls of a burst: the first finds its code and scratch pushed out of the caches by other kernels, as in a step."""

MOST_TRANSFERS = 8
"""The same of collectives and messages."""

WORK = (256, 512, 256)
"""A product before every collective: in a step ranks come to it from work of their own, never quite at the same moment."""

ROUNDS, ROUNDS_QUICK = 25, 5
NEAR_BYTES, FAR_BYTES = 4 << 20, 96 << 20
"""Operands of a case lie all over so many bytes: near ones, which the kernel before has just made, outside a core's own caches at most;
far ones (weights, sums of gradients, optimizer state, activations kept for the backward) in main memory."""

KEPT_BYTES = 32 << 20
"""Results stay until so many bytes came after them, as activations do, so that new ones are written where no cache has been lately."""

MOST_SETS = 64

HEAD_TOKENS, HEAD_WIDTH = 64, 32
"""Tokens and elements of a head of the kernels that work head by head."""

ADAMW_TENSORS = 8
"""Tensors of one measured update, whose seconds are given per tensor."""

NORM_WIDTH = 256
"""Columns of the rows that norms and sums are measured on."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one call: `kind` is product, kernel, collective or message, `sizes` its sizes (m n k; elements; bytes of the tensor).
    `alone` and `together` are products and kernels on one rank while the others wait, and on all ranks at once.

    `name` says which: `nt`, `nn`, `tn` of products (which operand lies transposed), the kernel, the collective. `seconds` is the
    quantile that was asked for, `spread` the distance of the quartiles over the median, `ranks` how many processes took part.
    """

    kind: Literal["product", "kernel", "collective", "message", "alone", "together"]
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
    """What the ranks are told: `compute` measures products and kernels on one rank, `sharing` on one rank and on all at once, `transfers`
    collectives and messages."""

    part: Literal["compute", "sharing", "transfers"]
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
    """Everything measured: one rank for products and kernels, as many ranks as cores for what they lose to each other, then groups of
    ranks for collectives and messages.

    `quick` takes fewer sizes, two ranks and fewer rounds: seconds instead of minutes. `report` hears of the progress.
    """
    rounds = rounds or (ROUNDS_QUICK if quick else ROUNDS)
    found: list[Measurement] = []
    cores = os.cpu_count() or 1
    jobs: list[tuple[int, Literal["compute", "sharing", "transfers"]]] = [(1, "compute")]
    jobs += [(cores, "sharing")] if cores > 1 and transport == "gloo" else []
    for size, part in (*jobs, *((size, "transfers") for size in ((2,) if quick else groups))):
        report(f"{_PARTS[part]} on {size} rank{'s' * (size > 1)}")
        with Workers(size, transport) as workers:
            found += workers.run(measure_rank, MeasureJob(part, rounds, quick or part == "sharing", quantile))[0]
    return found


_PARTS = {
    "compute": "products and kernels",
    "sharing": "what ranks that compute at once lose to each other",
    "transfers": "collectives and messages",
}


def measure_rank(transport: Any, job: MeasureJob) -> list[Measurement]:
    """The job of one rank; global rank 0 has the result."""
    if job.part == "sharing":
        return _sharing(transport, job)
    if job.part == "compute":
        pools = _Pools(transport.device)
        cases = [*_products(pools, quick=job.quick), *_kernels(pools, quick=job.quick)]
        seconds = _measured(cases, job.rounds, lambda: None, transport.device)
    else:
        world = transport.group("measure", "tp", range(transport.world_size))
        cases = [*_collectives(transport, world, quick=job.quick), *_messages(transport, quick=job.quick)]
        work = _product((WORK[2], WORK[1]), (WORK[0], WORK[2]), lambda weight, x: x @ weight, _Pools(transport.device))()
        turns = itertools.cycle(work)
        seconds = _measured(cases, job.rounds, world.barrier, transport.device, together=world, before=lambda: next(turns)())
    return _measurements(cases, seconds, transport.world_size, job.quantile)


def _measurements(
    cases: Sequence[Case], seconds: Sequence[Sequence[float]], ranks: int, quantile: float, kind: Any = None
) -> list[Measurement]:
    import torch

    table = torch.tensor(seconds, dtype=torch.float64)
    quartiles = torch.quantile(table, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1)
    chosen = torch.quantile(table, quantile, dim=1).tolist()
    spreads = ((quartiles[2] - quartiles[0]) / quartiles[1]).tolist()
    return [
        Measurement(kind or own, name, sizes, ranks, value / per, spread)
        for (own, name, sizes, _, per), value, spread in zip(cases, chosen, spreads, strict=True)
    ]


def _sharing(transport: Any, job: MeasureJob) -> list[Measurement]:
    """Products and kernels on global rank 0 while the others wait, and on all ranks at once, by turns."""
    world = transport.group("measure", "tp", range(transport.world_size))
    pools = _Pools(transport.device)
    cases = [*_products(pools, quick=job.quick), *_kernels(pools, quick=job.quick)]
    alone: list[list[float]] = [[] for _ in cases]
    together: list[list[float]] = [[] for _ in cases]
    for _ in range(job.rounds):
        for found, at_once in ((alone, False), (together, True)):
            world.barrier()
            if at_once or transport.global_rank == 0:
                for seconds, new in zip(found, _measured(cases, 1, lambda: None, transport.device), strict=True):
                    seconds += new
            world.barrier()
    if transport.global_rank:
        return []
    ranks = transport.world_size
    return [
        *_measurements(cases, alone, ranks, job.quantile, "alone"),
        *_measurements(cases, together, ranks, job.quantile, "together"),
    ]


def _measured(
    cases: Sequence[Case],
    rounds: int,
    barrier: Callable[[], None],
    device: Any,
    *,
    together: Any = None,
    before: Callable[[], Any] | None = None,
) -> list[list[float]]:
    """Seconds of one call of each case, round by round. A `together` group makes equally many calls on all ranks; `before` is work of
    its own that comes before every call and does not count."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds: list[list[float]] = [[] for _ in cases]
    made = [list(make()) for _, _, _, make, _ in cases]
    kept = _Kept()
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
        counts.append(max(1, min(MOST_CALLS if together is None else MOST_TRANSFERS, int(BURST_S / once_s))))
    if together is not None:  # every rank makes as many calls
        counts = together.all_reduce(torch.tensor(counts, device=device), "max").tolist()
    for turns in range(rounds):
        for number, (calls, count) in enumerate(zip(made, counts, strict=True)):
            first = turns * count
            barrier()
            results: list[Any] = []
            if before is None:
                start_s = perf_counter()
                for turn in range(count):
                    results.append(calls[(first + turn) % len(calls)]())
                finish()
                total_s = perf_counter() - start_s
            else:
                total_s = 0.0
                for turn in range(count):
                    before()
                    finish()
                    start_s = perf_counter()
                    results.append(calls[(first + turn) % len(calls)]())
                    finish()
                    total_s += perf_counter() - start_s
            seconds[number].append(total_s / count)
            kept.add(results)
    return seconds


class _Kept:
    """The last results, the oldest of which go first."""

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._num_bytes = 0

    def add(self, results: Sequence[Any]) -> None:
        """Keeps the tensors among some results, and lets go of what is too old."""
        for result in results:
            for tensor in result if isinstance(result, tuple) else (result,):
                if hasattr(tensor, "nbytes"):
                    self._results.append(tensor)
                    self._num_bytes += tensor.nbytes
        while self._num_bytes > KEPT_BYTES:
            self._num_bytes -= self._results.popleft().nbytes


class _Pool:
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


class _Pools:
    """Where operands come from: `near` and `far`."""

    def __init__(self, device: Any):
        import torch

        self.device = device
        self.far = _Pool(FAR_BYTES, device)
        self.near = _Pool(NEAR_BYTES, device)
        self._largest = torch.randn(2 * max(KERNEL_SIZES), device=device)

    def just_made(self, *shape: int) -> Any:
        """A near operand; of those larger than that part of memory there is one."""
        size = math.prod(shape)
        return self.near.take(*shape) if size <= len(self.near.flat) else self._largest[:size].view(shape)

    def sets(self, elements: int) -> int:
        """How many operand sets of so many elements a case alternates over: as many as lie side by side."""
        return max(1, min(MOST_SETS, len(self.far.flat) // max(1, elements)))


def _products(pools: _Pools, *, quick: bool) -> Iterator[Case]:
    rows = PRODUCT_ROWS_QUICK if quick else PRODUCT_ROWS
    widths = PRODUCT_SIZES_QUICK if quick else PRODUCT_SIZES
    for m in rows:
        for n in widths:
            for k in widths:
                yield "product", "nt", (m, n, k), _product((n, k), (m, k), lambda weight, x: x @ weight.t(), pools), 1.0
                yield "product", "nn", (m, n, k), _product((k, n), (m, k), lambda weight, x: x @ weight, pools), 1.0
    for k in rows:  # of a weight gradient the tokens are what is summed over
        for m in widths:
            for n in widths:
                yield "product", "tn", (m, n, k), _product((k, m), (k, n), lambda kept, dy: kept.t() @ dy, pools), 1.0


def _product(far: tuple[int, int], near: tuple[int, int], multiply: Callable[..., Any], pools: _Pools) -> Callable[[], Sequence[Call]]:
    def make() -> Sequence[Call]:
        operands = [(pools.far.take(*far), pools.just_made(*near)) for _ in range(pools.sets(math.prod(far)))]
        return [lambda a=a, b=b: multiply(a, b) for a, b in operands]

    return make


def _kernels(pools: _Pools, *, quick: bool) -> Iterator[Case]:
    import torch

    from .model.attention import rope_table

    sizes, device = KERNEL_SIZES_QUICK if quick else KERNEL_SIZES, pools.device
    for name, make in _elementwise(pools).items():
        for elements in sizes:
            sets = pools.sets(4 * ADAMW_TENSORS * elements if name == "adamw" else 2 * elements)
            several = lambda make=make, elements=elements, sets=sets: [make(elements) for _ in range(sets)]  # noqa: E731
            yield "kernel", name, (elements,), several, float(ADAMW_TENSORS) if name == "adamw" else 1.0
    for name, operation in _heads().items():
        for elements in (size for size in sizes if size >= HEAD_WIDTH * HEAD_TOKENS):
            several = lambda operation=operation, elements=elements: [operation(pools, elements) for _ in range(4)]  # noqa: E731
            yield "kernel", name, (elements,), several, 1.0
    for elements in sizes[:4]:
        call = lambda elements=elements: rope_table(elements // 16, 16, 1e4, device)  # noqa: E731
        yield "kernel", "rope_table", (elements,), lambda call=call: [call], 1.0
    for name, call in _function_calls(device).items():
        yield "kernel", name, (1,), lambda call=call: [call], 1.0
    for head_dim in ATTENTION_HEAD_DIMS_QUICK if quick else ATTENTION_HEAD_DIMS:
        for s in ATTENTION_SEQUENCES_QUICK if quick else ATTENTION_SEQUENCES:
            for name in ("attention", "attention_backward"):
                shape = (1, ATTENTION_HEADS, s, head_dim)
                sets = min(4, pools.sets(8 * math.prod(shape)))
                make = lambda name=name, shape=shape, sets=sets: [_attention(torch, name, shape, device) for _ in range(sets)]  # noqa: E731
                yield "kernel", f"{name}_{head_dim}", (s,), make, float(ATTENTION_HEADS)


def _attention(torch: Any, name: str, shape: tuple[int, ...], device: Any) -> Call:
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    if name == "attention":
        return lambda: attend(q, k, v, is_causal=True)
    output, gradient = attend(q, k, v, is_causal=True), torch.randn(shape, device=device)
    return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)


def _elementwise(pools: _Pools) -> dict[str, Callable[[int], Call]]:
    """Name -> a call on so many elements: kernels of which the backend's layers and optimizer are made."""
    import torch
    from torch.nn import functional as F

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
        parameters = [pools.far.take(elements).clone() for _ in range(ADAMW_TENSORS)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
        for parameter in parameters:
            parameter.grad = pools.far.take(elements)
        return lambda: optimizer.step()

    def every_second(elements: int) -> Call:
        x = pools.just_made(elements, 2)
        return lambda: x.unbind(-1)[1].contiguous()

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
        "take_second": every_second,
        "interleave": near(lambda a, b: torch.stack((a, b), -1)),
        "row_mean": rows(lambda x: x.mean(-1, keepdim=True)),
        "token_sum": rows(lambda x: x.sum((0, 1))),
        "layer_norm": rows(lambda x: torch.native_layer_norm(x, (NORM_WIDTH,), weight, weight, 1e-5)),
        "layer_norm_backward": norm_backward,
        "square_sum": far(lambda a, _: a.double().square().sum().item()),
        "adamw": adamw,
    }


def _heads() -> dict[str, Callable[[_Pools, int], Call]]:
    """Name -> a call on heads of `HEAD_WIDTH` elements and `HEAD_TOKENS` tokens: rotation, its backward, and repetition."""
    import torch

    from .model.attention import rope_table, rotate

    def heads(pools: _Pools, elements: int) -> Any:
        return pools.just_made(1, elements // (HEAD_TOKENS * HEAD_WIDTH), HEAD_TOKENS, HEAD_WIDTH)

    def rotated(pools: _Pools, elements: int) -> Call:
        x, (cos, sin) = heads(pools, elements), rope_table(HEAD_TOKENS, HEAD_WIDTH, 1e4, pools.device)
        return lambda: rotate(x, cos, sin)

    def rotated_back(pools: _Pools, elements: int) -> Call:
        x, dy = heads(pools, elements).requires_grad_(), heads(pools, elements).clone()
        y = rotate(x, *rope_table(HEAD_TOKENS, HEAD_WIDTH, 1e4, pools.device))
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    def repeated(pools: _Pools, elements: int) -> Call:
        x = heads(pools, max(elements // 2, HEAD_TOKENS * HEAD_WIDTH))
        return lambda: x.repeat_interleave(2, dim=1)

    return {"rotate": rotated, "rotate_backward": rotated_back, "repeat": repeated}


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
