"""Transports against each other: the same bytes, the same sums; how fast they are; and what a lost rank looks like."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...backend.launching.launch import run_ranks, scratch_folder
from ...backend.numerics.summands import Summands, sum_over
from ...backend.transport.base import Group, Transport
from ...backend.transport.symmetric.shared_memory import SharedMemoryTransport
from ...backend.watch.rank_messages import TransportName
from ...core.base.digest import digest
from ...core.base.errors import RankFailure
from .checks import Result, Table, seconds_of
from .machine import Machine

LIMIT_S = 50.0
"""Of one job on ranks; a check's own limit is a little longer."""

SIZES = (4096, 1 << 20, 1 << 24)
COUNTS = (1, 1000, 300_001)
NUM_RANKS = 3
"""Three, because a sum of two has one order only."""

NUM_ROUNDS = 50_000
NAMED_WITHIN_S = 1.0


def names(machine: Machine) -> tuple[TransportName, ...]:
    """The transports that this machine can start: of NCCL each rank needs a GPU of its own."""
    always: tuple[TransportName, ...] = ("memory", "gloo", "shm")
    return (*always, "nccl") if len(machine.gpus) >= NUM_RANKS else always


def values_of(rank: int, count: int) -> np.ndarray:
    """fp32 numbers of very different size, so that sums in another order have other bits."""
    generator = np.random.default_rng([rank, count])
    return (generator.standard_normal(count) * np.exp2(generator.integers(-12, 12, count))).astype(np.float32)


def exchange(transport: Transport, payload: None) -> list[tuple[str, tuple[int, int]]]:
    """The job of `bits`: digests of what every collective and a message bring to this rank, by name."""
    here, size = transport.global_rank, transport.world_size
    group = transport.group("world", "dp", range(size))
    line = transport.channel("0-1", 0, 1) if here < 2 else None
    found = []
    for count in COUNTS:
        own = torch.from_numpy(values_of(here, count)).to(transport.device)
        part = own[: count // size]
        arrived = {
            "all_gather": torch.cat(group.all_gather(own)),
            "all_to_all": torch.cat(
                group.all_to_all([part + peer for peer in range(size)], [tuple(part.shape)] * size)
            ),
            "sum": sum_over(group, own.clone()[None], Summands.one_each(size)),
        }
        if line is not None and here == 0:
            line.send(own)
        elif line is not None:
            arrived["message"] = line.receive((count,), torch.float32)
        found += [(f"{name} of {count}", digest(value.cpu().numpy())) for name, value in arrived.items()]
    return found


def awaited(rank: int, size: int) -> list[tuple[str, tuple[int, int]]]:
    """What `exchange` must find on a rank of `size`, by numpy."""
    found = []
    for count in COUNTS:
        values = [values_of(peer, count) for peer in range(size)]
        part = count // size
        arrived = {
            "all_gather": np.concatenate(values),
            "all_to_all": np.concatenate([each[:part] + np.float32(rank) for each in values]),
            "sum": _canonical(values),
        }
        if rank == 1:
            arrived["message"] = values[0]
        found += [(f"{name} of {count}", digest(value)) for name, value in arrived.items()]
    return found


def _canonical(values: list[np.ndarray]) -> np.ndarray:
    """The tree over all: the largest power of two below their number, then the rest."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return np.asarray(_canonical(values[:left]) + _canonical(values[left:]))


def bits(machine: Machine) -> Result:
    """Every transport brings what numpy says, and so what every other brings."""
    used = names(machine)
    wrong = []
    for transport in used:
        for rank, found in enumerate(run_ranks(exchange, world_size=NUM_RANKS, transport=transport, timeout_s=LIMIT_S)):
            pairs = zip(found, awaited(rank, NUM_RANKS), strict=True)
            wrong += [f"{transport}, rank {rank}: {got[0]}" for got, due in pairs if got != due]
    if wrong:
        return Result("failed", f"other bits than numpy's: {'; '.join(wrong[:4])}", len(wrong), "results")
    return Result("ok", f"{', '.join(used)} carry and add up the same", 0, "different results")


def measure(transport: Transport, payload: None) -> list[tuple[int, float, float]]:
    """The job of `speed`: bytes, seconds of an all-gather, seconds of an exact sum."""
    size = transport.world_size
    group = transport.group("measured", "dp", range(size))
    found = []
    for num_bytes in SIZES:
        own = torch.rand(num_bytes // 4, device=transport.device)
        most = max(3, min(300, (1 << 23) // num_bytes))
        gather = timed(group, lambda own=own: group.all_gather(own), most)
        add = timed(group, lambda own=own: sum_over(group, own.clone()[None], Summands.one_each(size)), most)
        found.append((num_bytes, gather, add))
    return found


def timed(group: Group, call: Any, times: int) -> float:
    """Seconds of a call that all members make `times` times a round, begun together."""
    group.barrier()
    return seconds_of(call, least_s=0, most=times)


def speed(machine: Machine) -> Result:
    """Latency and bandwidth of two ranks over every transport; the figure is the smallest all-gather of the fastest
    processes."""
    rows: list[tuple[str | float, ...]] = []
    smallest = math.inf
    for transport in names(machine):
        of_ranks = run_ranks(measure, world_size=2, transport=transport, timeout_s=LIMIT_S)
        for slowest in zip(*of_ranks, strict=True):
            num_bytes = slowest[0][0]
            gather, add = (max(each[place] for each in slowest) for place in (1, 2))
            rate = round(num_bytes / gather / 1e9, 3)
            rows.append((transport, num_bytes, round(gather * 1e6, 1), rate, round(add * 1e6, 1)))
            if transport != "memory" and num_bytes == SIZES[0]:
                smallest = min(smallest, gather)
    columns = ("transport", "bytes", "all-gather us", "GB/s", "exact sum us")
    return Result("ok", "", round(smallest * 1e6, 1), "us", (Table("two ranks", columns, tuple(rows)),))


def meet(transport: Transport, rounds: int) -> tuple[int, float, tuple[str, ...]]:
    """The job of `barriers`: rounds counted when all ranks were in the same one, and seconds."""
    group = transport.group("world", "dp", range(transport.world_size))
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        group.barrier()
        if number % 100 == 0:
            seen = [int(each.item()) for each in group.all_gather(torch.tensor(number))]
            if seen != [number] * group.size:
                raise AssertionError(f"round {number} of this rank is {seen} of all")
    notes = transport.notes if isinstance(transport, SharedMemoryTransport) else ()
    return rounds, time.perf_counter() - start, notes


def barriers(machine: Machine) -> Result:
    """Rounds of a barrier in shared memory, none of them lost."""
    of_ranks = run_ranks(meet, NUM_ROUNDS, world_size=2, transport="shm", timeout_s=LIMIT_S)
    rounds, seconds, notes = of_ranks[0]
    if notes:
        return Result("failed", f"the ranks do not share memory: {' '.join(notes)}")
    return Result("ok", f"{rounds:,} rounds, none lost", round(seconds / rounds * 1e6, 2), "us a round")


def end_one(transport: Transport, note: str) -> None:
    """The job of `lost_rank`: collectives until rank 1 kills itself."""
    group = transport.group("world", "dp", range(transport.world_size))
    for number in range(1000):
        if number == 100 and transport.global_rank == 1:
            Path(note).write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_gather(torch.ones(1000))


def lost_rank(machine: Machine) -> Result:
    """A rank that is killed in the middle of collectives is named, soon, over shared memory and over gloo."""
    slowest = 0.0
    with scratch_folder("lost-") as folder:
        transport: TransportName
        for transport in ("shm", "gloo"):
            note = folder / transport
            try:
                run_ranks(end_one, str(note), world_size=NUM_RANKS, transport=transport, timeout_s=LIMIT_S)
            except RankFailure as failure:
                took = time.monotonic() - float(note.read_text())
                if "rank 1" not in str(failure):
                    return Result("failed", f"{transport} does not name the lost rank: {failure}")
                slowest = max(slowest, took)
            else:
                return Result("failed", f"{transport}: rank 1 was killed, and nobody noticed")
    late = slowest > NAMED_WITHIN_S
    return Result("failed" if late else "ok", f"named after {slowest:.2f} s" if late else "", round(slowest, 3), "s")
