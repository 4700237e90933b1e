"""What this machine takes for the pieces of a training step: products, kernels, collectives and messages, measured.

Cases take turns, round after round, so that a machine that is slower for a while is slower for all of them; each
case is timed in short bursts over operands from all over a large pool, and the result is a quantile over the rounds,
the median unless asked otherwise. Ranks are those of training: processes with one thread each, MKL in its reproducible
mode, our groups and channels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from ..launching.launch import Workers
from .cases import Call, Case, Measurement, Pools, kernels, products
from .layers import layers
from .steps import steps
from .transfers import measure_transfers

BURST_S = 0.6e-3
"""A burst has as many calls as fill about this time: long against the clock's resolution, short against
what else a machine does."""

MOST_CALLS = 5
"""Calls of a burst: the first finds its code and scratch pushed out of the caches by other kernels, as in a step."""

ROUNDS, ROUNDS_QUICK = 25, 5
RECENT_BYTES = 32 << 20
"""Results stay until so many bytes came after them, as activations do, so that new ones are written where no
cache has been lately."""


@dataclass(frozen=True)
class MeasureJob:
    """What the ranks do: `compute` measures products, kernels and steps on one rank, `sharing` steps on one rank
    and on all at once, `transfers` collectives and messages."""

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
    transport: Literal["shm", "gloo", "nccl"] = "shm",
    report: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Everything measured: one rank for products, kernels and steps, as many ranks as cores for what they lose to each
    other, then groups of ranks for collectives and messages.

    `quick` takes fewer sizes, two ranks and fewer rounds: seconds instead of minutes. `report` hears of the progress.
    """
    rounds = rounds or (ROUNDS_QUICK if quick else ROUNDS)
    found: list[Measurement] = []
    cores = os.cpu_count() or 1
    jobs: list[tuple[int, Literal["compute", "sharing", "transfers"]]] = [(1, "compute")]
    jobs += [(cores, "sharing")] if cores > 1 and transport != "nccl" else []
    for size, part in (*jobs, *((size, "transfers") for size in ((2,) if quick else groups))):
        report(f"{_PARTS[part]} on {size} rank{'s' * (size > 1)}")
        with Workers(size, transport) as workers:
            found += workers.run(measure_rank, MeasureJob(part, rounds, quick, quantile))[0]
    return found


_PARTS = {
    "compute": "products, kernels and steps",
    "sharing": "what ranks that compute at once lose to each other",
    "transfers": "collectives and messages",
}


def measure_rank(transport: Any, job: MeasureJob) -> list[Measurement]:
    """The job of one rank; global rank 0 has the result."""
    if job.part == "sharing":
        return _sharing(transport, job)
    if job.part == "transfers":
        return measure_transfers(transport, rounds=job.rounds, quick=job.quick, quantile=job.quantile)
    pools, alone = Pools(transport.device), transport.group("measure", "tp", [transport.global_rank])
    cases = [
        *products(pools, quick=job.quick),
        *kernels(pools, quick=job.quick),
        *layers(alone, transport.recorder, transport.device),
        *steps(transport.device),
    ]
    seconds = _measured(cases, job.rounds, transport.device)
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
    """Steps on global rank 0 while the others wait, and on all ranks at once, by turns: until the slowest is done, for
    which the others wait in any training."""
    world = transport.group("measure", "tp", range(transport.world_size))
    cases = list(steps(transport.device))
    alone: list[list[float]] = [[] for _ in cases]
    simultaneous: list[list[float]] = [[] for _ in cases]
    made = [make()[0] for _, _, _, make, _ in cases]
    for turn in range(1 + job.rounds):
        for call, *found in zip(made, alone, simultaneous, strict=True):
            for at_once, seconds in enumerate(found):
                world.barrier()
                start_s = perf_counter()
                if at_once or transport.global_rank == 0:
                    _timed([call], transport.device)
                world.barrier()
                if turn:  # first steps take their memory from the system
                    seconds.append(perf_counter() - start_s)
    if transport.global_rank:
        return []
    ranks = transport.world_size
    return [
        *_measurements(cases, alone, ranks, job.quantile, "alone"),
        *_measurements(cases, simultaneous, ranks, job.quantile, "together"),
    ]


def _measured(cases: Sequence[Case], rounds: int, device: Any) -> list[list[float]]:
    """Seconds of one call of each case, round by round."""
    seconds: list[list[float]] = [[] for _ in cases]
    made = [list(make()) for _, _, _, make, _ in cases]
    recent = _RecentResults()
    counts = []
    for calls in made:
        _timed(calls[:1], device)
        counts.append(max(1, min(MOST_CALLS, int(BURST_S / _timed(calls[-1:], device)[0]))))
    for turn in range(rounds):
        for found, calls, count in zip(seconds, made, counts, strict=True):
            total_s, results = _timed([calls[(turn * count + number) % len(calls)] for number in range(count)], device)
            found.append(total_s / count)
            recent.add(results)
    return seconds


def _timed(calls: Sequence[Call], device: Any) -> tuple[float, list[Any]]:
    """Seconds of some calls until the device has done them, and their results."""
    import torch

    start_s = perf_counter()
    results = [call() for call in calls]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start_s, results


class _RecentResults:
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
        while self._num_bytes > RECENT_BYTES:
            self._num_bytes -= self._results.popleft().nbytes
