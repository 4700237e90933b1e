"""What GPUs do: products by cuBLAS, and all-reduces by NCCL, by torch and by our kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import Result, Table
from .gpu_kernels import Streams, exact_all_reduces, peer_on
from .gpu_ranks import Place, Ranks, seconds_of_calls, seconds_on_gpu
from .machine import Machine
from .sizes import Sizes, sizes_for


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a rank has torch's default process group"
    return world


def shared(place: Place, count: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Symmetric memory of torch, zeroed, and the handle that all ranks have of it."""
    from torch.distributed import _symmetric_memory as symmetric

    values = symmetric.empty(count, dtype=dtype, device=place.device).zero_()
    return values, symmetric.rendezvous(values, group=_world())


def products(machine: Machine) -> Result:
    """Products by cuBLAS: the same bits twenty times over, and their rate."""
    sizes = sizes_for(machine)
    rows: list[tuple[str | float, ...]] = []
    best = 0.0
    for m, n, k in sizes.products:
        generator = torch.Generator("cuda").manual_seed(m + n + k)
        left = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, generator=generator)
        right = torch.randn(k, n, device="cuda", dtype=torch.bfloat16, generator=generator)
        first = left @ right
        if not all(torch.equal(first.view(torch.int16), (left @ right).view(torch.int16)) for _ in range(20)):
            return Result("failed", f"a product of {m}x{k} and {k}x{n} has other bits the second time")
        seconds = seconds_on_gpu(functools.partial(torch.matmul, left, right), sizes.product_calls)
        rate = 2.0 * m * n * k / seconds / 1e12
        rows.append((f"{m}x{n}x{k}", "bf16", round(rate, 1)))
        best = max(best, rate)
    table = Table("products by cuBLAS", ("m x n x k", "dtype", "TFLOP/s"), tuple(rows))
    return Result("ok", value=round(best, 1), unit="TFLOP/s", tables=(table,))


def _operators(place: Place, num_bytes: int) -> dict[str, Callable[[], object]]:
    values, handle = shared(place, num_bytes // 2, torch.bfloat16)
    plain, group = torch.zeros_like(values), _world().group_name
    operators = torch.ops.symm_mem
    calls: dict[str, Callable[[], object]] = {}
    if place.apart:
        calls["NCCL"] = lambda: dist.all_reduce(plain)
    if num_bytes <= 1 << 20:
        calls["torch one shot"] = lambda: operators.one_shot_all_reduce(values, "sum", group)
    calls["torch two shot"] = lambda: operators.two_shot_all_reduce_(values, "sum", group)
    if handle.multicast_ptr:
        calls["torch multimem"] = lambda: operators.multimem_all_reduce_(values, "sum", group)
    return calls


def _all_reduces(sizes: Sizes, place: Place) -> list[tuple[str, int, float]]:
    found, ours = [], exact_all_reduces(peer_on(place, max(sizes.buffers)), sizes.buffers)
    for num_bytes in sizes.buffers:
        times = sizes.calls(num_bytes)
        for name, call in _operators(place, num_bytes).items():
            found.append((name, num_bytes, seconds_on_gpu(call, times)))
        for name, size in ours:
            if size == num_bytes:
                found.append((name, num_bytes, seconds_of_calls(ours[name, size], times)))
    return found


def _all_reduces_on_streams(sizes: Sizes, machine: Machine) -> list[tuple[str, int, float]]:
    """Of two ranks that share a GPU, next to the least that an addition of two tensors takes there."""
    streams, found = Streams(2, max(sizes.buffers), machine), []
    ours = [exact_all_reduces(peer, sizes.buffers) for peer in streams.peers]
    for num_bytes in sizes.buffers:
        left, right, out = (torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        add = functools.partial(torch.add, left, right, out=out)
        found.append(("one addition", num_bytes, seconds_of_calls(add, sizes.calls(num_bytes))))
        for name, size in ours[0]:
            if size == num_bytes:
                calls = [calls_of_rank[name, size] for calls_of_rank in ours]
                found.append((name, num_bytes, streams.seconds(calls, sizes.calls(num_bytes))))
    return found


def all_reduces(machine: Machine) -> Result:
    """Latency and bandwidth of all-reduces in bf16: NCCL's, torch's own in symmetric memory, and our exact ones; ours
    alone where ranks are streams of one GPU."""
    several = len(machine.gpus) > 1
    sizes = sizes_for(machine)
    if several:
        of_ranks = Ranks(machine).run(functools.partial(_all_reduces, sizes))
    else:
        of_ranks = [_all_reduces_on_streams(sizes, machine)]
    rows, smallest = [], float("inf")
    for each in zip(*of_ranks, strict=True):
        name, num_bytes, _ = each[0]
        seconds = max(s for _, _, s in each)
        rows.append((name, num_bytes, round(seconds * 1e6, 1), round(num_bytes / seconds / 1e9, 2)))
        smallest = min(smallest, seconds)
    where = f"{len(of_ranks)} GPUs" if several else "2 streams of one GPU"
    table = Table(f"all-reduce in bf16, {where}", ("operator", "bytes", "us", "GB/s"), tuple(rows))
    why = "" if several else "two streams of one GPU: NCCL and torch's need a GPU each, rates are no link's"
    return Result("ok", why, round(smallest * 1e6, 1), "us", (table,))
