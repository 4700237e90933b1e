"""`Ranks`: jobs on GPUs, several on the only one or one on each, and how long a call takes there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...backend.launching.launch import run_ranks, scratch_folder
from ...backend.transport.base import Transport
from .machine import Machine

LIMIT_S = 100.0
ON_ONE = 3
"""Ranks on the only GPU."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its number, how many there are, its GPU, and whether each has one of its own."""

    rank: int
    size: int
    device: torch.device
    apart: bool


@dataclass(frozen=True)
class Ranks:
    """Starts ranks on GPUs: one on each of up to `most`, over NCCL, or three on the only one, taking turns, over gloo;
    with three, who waits for one peer alone is found."""

    machine: Machine
    most: int = 8

    def run(self, job: Callable[[Place], Any]) -> list[Any]:
        """What `job` returned on each rank. It has torch's default process group, and its GPU is the current one."""
        num_gpus = len(self.machine.gpus)
        size = min(num_gpus, self.most) if num_gpus > 1 else ON_ONE
        with scratch_folder("gpus-") as folder:
            payload = job, num_gpus > 1, str(folder / "store")
            limit_s = self.machine.patience * LIMIT_S
            return run_ranks(_on_gpu, payload, world_size=size, transport="gloo", timeout_s=limit_s)


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


def seconds_in_graph(work: Callable[[int], object], times: int) -> float:
    """Seconds of one of `times` calls, which `work(times)` makes, by the GPU's clock and without the host: they are
    replayed from a graph."""
    work(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(times)
    return seconds_on_gpu(graph.replay, 1) / times


def seconds_of_calls(call: Callable[[], object], times: int) -> float:
    """The same of calls one after the other."""

    def work(number: int) -> None:
        for _ in range(number):
            call()

    return seconds_in_graph(work, times)
