"""Ranks that torchrun started on several hosts: the same bytes and sums over the network, and how fast."""

from __future__ import annotations

import math

from ...backend.launching.torchrun import torchrun_transport
from ...backend.transport.base import Transport
from ...backend.transport.symmetric.shared_memory import SharedMemoryTransport
from .checks import Result, Table
from .machine import Machine
from .transports import awaited, exchange, measure

LIMIT_S = 100.0
"""In which the ranks of all hosts come to this check."""


def hosts(machine: Machine) -> Result:
    """Every rank receives what numpy says: over shared memory inside a host and gloo between hosts, and over NCCL where
    there are GPUs. The figure is the time of the smallest all-gather."""
    rows: list[tuple[str | float, ...]] = []
    smallest, notes = math.inf, ""
    for name in ("shm", "nccl") if machine.gpus else ("shm",):
        with torchrun_transport(backend=name, timeout_s=LIMIT_S) as transport:
            if wrong := _wrong(transport):
                return Result(
                    "failed", f"{name}: other bits than numpy's: {'; '.join(wrong[:4])}", len(wrong), "results"
                )
            for num_bytes, gather_s, sum_s in measure(transport, None):
                rate = round(num_bytes / gather_s / 1e9, 3)
                rows.append((name, num_bytes, round(gather_s * 1e6, 1), rate, round(sum_s * 1e6, 1)))
                smallest = min(smallest, gather_s)
            if isinstance(transport, SharedMemoryTransport):
                notes = " ".join(transport.notes)
            size = transport.world_size
    columns = ("transport", "bytes", "all-gather us", "GB/s", "exact sum us")
    table = Table(f"{size} ranks on {machine.num_hosts} hosts", columns, tuple(rows))
    return Result("ok", notes, round(smallest * 1e6, 1), "us", (table,))


def _wrong(transport: Transport) -> list[str]:
    """What this rank received and should not have."""
    pairs = zip(exchange(transport, None), awaited(transport.global_rank, transport.world_size), strict=True)
    return [got[0] for got, due in pairs if got != due]
