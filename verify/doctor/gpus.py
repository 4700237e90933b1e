"""Checks of GPUs: `Ranks` starts several on one GPU or one on each; products, barriers, capture and tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...backend.launching.launch import run_ranks, scratch_folder
from ...backend.transport.base import Transport
from .checks import Result, Table
from .machine import Machine

LIMIT_S = 100.0
NUM_ROUNDS = 25_000
"""Of a barrier, three times over, by ranks with GPUs of their own."""

ROUNDS_IN_TURN = 2_000
"""By ranks that take turns on one: each round may take a time slice or two, some milliseconds."""

SIZES = (4096, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 8192))


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its number, how many there are, its GPU, and whether each has one of its own."""

    rank: int
    size: int
    device: torch.device
    apart: bool


@dataclass(frozen=True)
class Ranks:
    """Starts ranks on GPUs: one on each of up to `most`, over NCCL, or two on the only one, over gloo."""

    num_gpus: int
    most: int = 8

    def run(self, job: Callable[[Place], Any]) -> list[Any]:
        """What `job` returned on each rank. It has torch's default process group, and its GPU is the current one."""
        size = min(self.num_gpus, self.most) if self.num_gpus > 1 else 2
        with scratch_folder("gpus-") as folder:
            payload = job, self.num_gpus > 1, str(folder / "store")
            return run_ranks(_on_gpu, payload, world_size=size, transport="gloo", timeout_s=LIMIT_S)


def _on_gpu(transport: Transport, payload: tuple[Callable[[Place], Any], bool, str]) -> Any:
    job, apart, store = payload
    rank, size = transport.global_rank, transport.world_size
    device = torch.device("cuda", rank if apart else 0)
    torch.cuda.set_device(device)
    backend = "nccl" if apart else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        return job(Place(rank, size, device, apart))
    finally:
        dist.destroy_process_group()


def seconds_on_gpu(call: Callable[[], object], times: int) -> float:
    """Seconds of one call by the GPU's clock: the least of three rounds of `times` calls."""
    call()
    rounds = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / times)
    return min(rounds)


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
    rows: list[tuple[str | float, ...]] = []
    best = 0.0
    for m, n, k in SHAPES:
        generator = torch.Generator("cuda").manual_seed(m + n + k)
        left = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, generator=generator)
        right = torch.randn(k, n, device="cuda", dtype=torch.bfloat16, generator=generator)
        first = left @ right
        if not all(torch.equal(first.view(torch.int16), (left @ right).view(torch.int16)) for _ in range(20)):
            return Result("failed", f"a product of {m}x{k} and {k}x{n} has other bits the second time")
        rate = 2.0 * m * n * k / seconds_on_gpu(functools.partial(torch.matmul, left, right), 20) / 1e12
        rows.append((f"{m}x{n}x{k}", "bf16", round(rate, 1)))
        best = max(best, rate)
    table = Table("products by cuBLAS", ("m x n x k", "dtype", "TFLOP/s"), tuple(rows))
    return Result("ok", value=round(best, 1), unit="TFLOP/s", tables=(table,))


def _meet(place: Place) -> tuple[int, float]:
    rounds = NUM_ROUNDS if place.apart else ROUNDS_IN_TURN
    values, handle = shared(place, 1024, torch.float32)
    seconds = seconds_on_gpu(lambda: handle.barrier(channel=0), rounds)
    values.fill_(place.rank + 1)
    handle.barrier(channel=0)
    wrong = sum(int((handle.get_buffer(peer, (1024,), torch.float32) != peer + 1).sum()) for peer in range(place.size))
    handle.barrier(channel=0)
    return wrong, seconds


def barriers(machine: Machine) -> Result:
    """Rounds of torch's barrier in symmetric memory, and what peers wrote before the last is there after it."""
    of_ranks = Ranks(len(machine.gpus)).run(_meet)
    if wrong := sum(each for each, _ in of_ranks):
        return Result("failed", "a rank reads what a peer had not written yet", wrong, "values")
    rounds = 3 * (NUM_ROUNDS if len(machine.gpus) > 1 else ROUNDS_IN_TURN)
    return Result("ok", f"{rounds:,} rounds", round(max(s for _, s in of_ranks) * 1e6, 2), "us a round")


def _replay(place: Place) -> int:
    values, handle = shared(place, 4096, torch.float32)
    out, number = torch.empty_like(values), torch.zeros((), device=place.device)

    def work() -> None:
        number.add_(1)
        values.copy_(number.expand(4096) * (place.rank + 1))
        handle.barrier(channel=0)
        out.zero_()
        for peer in range(place.size):
            out.add_(handle.get_buffer(peer, (4096,), torch.float32))
        handle.barrier(channel=0)

    side = torch.cuda.Stream()
    torch.cuda.synchronize()  # what was zeroed above is zero before the other stream begins
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    wrong = 0
    for replayed in range(2, 1002):
        graph.replay()
        wrong += int((out != replayed * place.size * (place.size + 1) // 2).sum())
    return wrong


def capture(machine: Machine) -> Result:
    """A CUDA graph of reads of peers between barriers, replayed a thousand times; each result is known."""
    wrong = sum(Ranks(len(machine.gpus)).run(_replay))
    if wrong:
        return Result("failed", "a replayed graph gives another sum than its launches", wrong, "values")
    return Result("ok", "1,000 replays", 0, "wrong values")


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


def _all_reduces(place: Place) -> list[tuple[str, int, float]]:
    found = []
    for num_bytes in SIZES:
        times = max(5, min(200, (1 << 28) // num_bytes))
        found += [(name, num_bytes, seconds_on_gpu(call, times)) for name, call in _operators(place, num_bytes).items()]
    return found


def all_reduces(machine: Machine) -> Result:
    """Latency and bandwidth of all-reduces in bf16: NCCL's, and torch's own in symmetric memory."""
    of_ranks = Ranks(len(machine.gpus)).run(_all_reduces)
    rows, smallest = [], float("inf")
    for each in zip(*of_ranks, strict=True):
        name, num_bytes, _ = each[0]
        seconds = max(s for _, _, s in each)
        rows.append((name, num_bytes, round(seconds * 1e6, 1), round(num_bytes / seconds / 1e9, 2)))
        smallest = min(smallest, seconds)
    table = Table(f"all-reduce in bf16, {len(of_ranks)} ranks", ("operator", "bytes", "us", "GB/s"), tuple(rows))
    why = "" if len(machine.gpus) > 1 else "two ranks on one GPU take turns: NCCL is left out, rates are no link's"
    return Result("ok", why, round(smallest * 1e6, 1), "us", (table,))
