"""Our kernels on GPUs: their cases, rounds of their barrier, capture and replay, and how fast they add."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...backend.kernels import catalog
from ...backend.kernels.launch import DeviceLauncher
from ...backend.transport.symmetric.device_heap import device_memory
from ...core.base.reduction import merges_of
from ..kernels.cases import few_cases, run_case
from ..kernels.floors import HOLDS
from ..kernels.processes import Peer
from .checks import Result, Table
from .gpu_ranks import Place, Ranks, seconds_on_gpu
from .machine import Machine

BUFFER_BYTES = 1 << 28
BLOCK = 1024
NUM_BLOCKS = 4
"""Of a case, whose sizes follow from it."""

NUM_ROUNDS = 100_000
"""Of a barrier in all, by ranks with GPUs of their own; each launch meets twice."""

ROUNDS_IN_TURN = 6_000
"""By ranks that take turns on one: each round may take a time slice or two, some milliseconds."""

NUM_REPLAYS = 1_000


def peer_on(place: Place, num_bytes: int = BUFFER_BYTES) -> Peer:
    """This rank's symmetric memory on its GPU, and what launches kernels there."""
    store = dist.distributed_c10d._get_default_store()
    memory = device_memory(store, "doctor", place.rank, place.size, place.device, num_bytes)

    def gathered(number: int) -> Sequence[int]:
        numbers: list[int] = [0] * place.size
        dist.all_gather_object(numbers, number)
        return numbers

    return Peer(memory, DeviceLauncher(memory, gathered))


def _cases(place: Place) -> dict[str, str]:
    peer, found = peer_on(place), {}
    architecture = 10 * torch.cuda.get_device_capability(place.device)[0]
    for kernel in catalog.KERNELS:
        lacks = "multicast" in kernel.function.arg_names and not peer.memory.multicast
        if not lacks and kernel.least_architecture <= architecture:
            cases = few_cases(kernel.name, place.size, block=BLOCK, num_blocks=NUM_BLOCKS)
            wrong = [f"{case}: {outcome}" for case in cases if not (outcome := run_case(peer, case)).right]
            found[kernel.name] = "; ".join(wrong)
    return found


def cases(machine: Machine) -> Result:
    """Every kernel's cases on GPUs: the bits of the tree in torch, and no signal left in a pad."""
    of_ranks = Ranks(len(machine.gpus)).run(_cases)
    rows = []
    for kernel in of_ranks[0]:
        wrong = [f"rank {rank}: {found[kernel]}" for rank, found in enumerate(of_ranks) if found[kernel]]
        rows.append((kernel, "device", "; ".join(wrong) or HOLDS))
    bad = [f"{kernel}: {what}" for kernel, _, what in rows if what != HOLDS]
    return Result(
        "failed" if bad else "ok",
        "; ".join(bad)[:400],
        len(rows),
        "kernels",
        (Table("kernels", ("kernel", "floor", "result"), tuple(rows)),),
    )


class AllReduce:
    """Calls of one of our all-reduces of `values`, which are copied into the buffer first; `out` has the sum."""

    def __init__(self, peer: Peer, values: Tensor, kernel: str):
        self.values, self.out = values, torch.empty_like(values)
        self._peer, self._kernel = peer, catalog.kernel(kernel)
        self._own = peer.memory.own[: values.nbytes].view(values.dtype)

    def __call__(self) -> None:
        """One call, on the current stream."""
        import triton.language as tl

        self._own.copy_(self.values)
        memory, size, n = self._peer.memory, self._peer.memory.world_size, self.out.numel()
        self._peer.launch(
            self._kernel,
            -(-n // BLOCK),
            {"table": memory.table, "pads": memory.pads, "rank": memory.rank, "out": self.out, "n": n},
            {
                "WORLD": size,
                "BLOCK": BLOCK,
                "NODES": (1,) * size,
                "MERGES": merges_of(size, [(rank, rank + 1) for rank in range(size)]),
                "LEAF": {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[self.values.dtype],
            },
        )


def _meet(place: Place) -> tuple[int, float]:
    calls = (NUM_ROUNDS if place.apart else ROUNDS_IN_TURN) // 6
    call = AllReduce(peer_on(place, 1 << 20), torch.full((BLOCK,), 1.0, device=place.device), "all_reduce_one_shot")
    seconds = seconds_on_gpu(call, calls)
    call.values.fill_(float(place.rank))
    call()
    return int((call.out != place.size * (place.size - 1) / 2).sum()), seconds


def barriers(machine: Machine) -> Result:
    """Rounds of the barrier at which our kernels meet, in all-reduces of one block; what peers wrote is there then."""
    of_ranks = Ranks(len(machine.gpus)).run(_meet)
    if wrong := sum(each for each, _ in of_ranks):
        return Result("failed", "a rank reads what a peer had not written yet", wrong, "values")
    rounds = NUM_ROUNDS if len(machine.gpus) > 1 else ROUNDS_IN_TURN
    return Result("ok", f"{rounds:,} rounds", round(max(s for _, s in of_ranks) * 1e6, 2), "us an all-reduce")


def _replay(place: Place) -> int:
    call = AllReduce(peer_on(place, 1 << 20), torch.zeros(4096, device=place.device), "all_reduce_two_shot")
    number = torch.zeros((), device=place.device)

    def work() -> None:
        number.add_(1)
        call.values.copy_(number.expand(4096) * (place.rank + 1))
        call()

    side = torch.cuda.Stream()
    torch.cuda.synchronize()  # what was zeroed above is zero before the other stream begins
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    wrong = 0
    for replayed in range(2, NUM_REPLAYS + 2):
        graph.replay()
        wrong += int((call.out != replayed * place.size * (place.size + 1) // 2).sum())
    return wrong


def capture(machine: Machine) -> Result:
    """A CUDA graph with an all-reduce of ours, replayed; each result is known."""
    wrong = sum(Ranks(len(machine.gpus)).run(_replay))
    if wrong:
        return Result("failed", "a replayed graph gives another sum than its launches", wrong, "values")
    return Result("ok", f"{NUM_REPLAYS:,} replays", 0, "wrong values")


def exact_all_reduces(place: Place, sizes: Sequence[int]) -> dict[tuple[str, int], Callable[[], object]]:
    """Our all-reduces in bf16, whose sums follow the canonical tree, by name and bytes."""
    peer = peer_on(place, max(sizes))
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for num_bytes in sizes:
        values = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=place.device)
        for shots in ("one", "two") if num_bytes <= 1 << 20 else ("two",):
            calls[f"exact, {shots} shot", num_bytes] = AllReduce(peer, values, f"all_reduce_{shots}_shot")
    return calls
