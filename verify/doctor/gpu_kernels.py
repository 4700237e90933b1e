"""Our kernels on GPUs: their cases, rounds of their barrier, capture and replay, and how fast they add."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from ...backend.kernels import catalog
from ...backend.kernels.launch import DeviceLauncher
from ...backend.transport.symmetric.device_heap import device_memory, memory_on_one_device
from ...core.base.reduction import merges_of
from ..kernels.cases import few_cases, run_case
from ..kernels.floors import HOLDS
from ..kernels.processes import Peer
from .checks import Result, Table
from .gpu_ranks import ON_ONE, Place, Ranks, seconds_in_graph, seconds_of_calls
from .machine import Machine
from .sizes import Sizes, sizes_for

BUFFER_BYTES = 1 << 28
BLOCK = 1024
"""Elements of a block of an all-reduce."""


PRETENDED = "pretended device"
"""The floor of cases on pretended GPUs: no evidence of what a GPU does."""


def peer_on(place: Place, num_bytes: int = BUFFER_BYTES) -> Peer:
    """This rank's symmetric memory on its GPU, and what launches kernels there."""
    world = dist.group.WORLD
    assert world is not None, "a rank has torch's default process group"
    memory = device_memory(world, place.device, num_bytes)

    def gathered(number: int) -> Sequence[int]:
        numbers: list[int] = [0] * place.size
        dist.all_gather_object(numbers, number)
        return numbers

    return Peer(memory, DeviceLauncher(memory, gathered))


class Streams:
    """Ranks of one process on one GPU, a stream each, whose kernels run at the same time; where GPUs are pretended,
    in threads of the host, since a kernel that waits for peers would let nobody launch theirs."""

    def __init__(self, size: int, num_bytes: int, machine: Machine):
        device = torch.device("cuda", torch.cuda.current_device())
        self.peers = [
            Peer(memory, DeviceLauncher(memory, lambda number: [number] * size, sharing=size))
            for memory in memory_on_one_device(size, device, num_bytes)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(size)]
        self._threads = ThreadPoolExecutor(size) if machine.pretended else None
        torch.cuda.synchronize()  # pads are zero

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """Launches the call of every rank on its stream. What they load the first time is loaded before any of them
        waits, since `DeviceLauncher` compiles before it launches and every rank launches the same."""
        if self._threads is not None:
            list(self._threads.map(_on_stream, calls, self._streams))
            return
        for call, stream in zip(calls, self._streams, strict=True):
            _on_stream(call, stream)

    def together(self, calls: Sequence[Callable[[], object]], times: int) -> None:
        """So many rounds of calls, all after what the current stream has done and before what it does next."""
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for _ in range(times):
            self.run(calls)
        for stream in self._streams:
            current.wait_stream(stream)

    def seconds(self, calls: Sequence[Callable[[], object]], times: int) -> float:
        """Of one round of calls, of `times` in a graph."""
        return seconds_in_graph(lambda number: self.together(calls, number), times)


def _on_stream(call: Callable[[], object], stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        call()


def _cases(sizes: Sizes, place: Place) -> dict[str, str]:
    peer, found = peer_on(place), {}
    architecture = 10 * torch.cuda.get_device_capability(place.device)[0]
    for kernel in catalog.KERNELS:
        lacks = "multicast" in kernel.function.arg_names and not peer.memory.multicast
        if not lacks and kernel.least_architecture <= architecture:
            shape = {"block": sizes.case_block, "num_blocks": sizes.case_blocks}
            cases = few_cases(kernel.name, place.size, compiled=True, **shape)[: sizes.most_cases]
            wrong = [f"{case}: {outcome}" for case in cases if not (outcome := run_case(peer, case)).right]
            found[kernel.name] = "; ".join(wrong)
    return found


def cases(machine: Machine) -> Result:
    """Every kernel's cases on GPUs: the bits of the tree in torch, and no signal left in a pad."""
    of_ranks = Ranks(machine).run(functools.partial(_cases, sizes_for(machine)))
    rows = []
    for kernel in of_ranks[0]:
        wrong = [f"rank {rank}: {found[kernel]}" for rank, found in enumerate(of_ranks) if found[kernel]]
        rows.append((kernel, PRETENDED if machine.pretended else "device", "; ".join(wrong) or HOLDS))
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


class Rounds:
    """Calls of an all-reduce of one block in which every rank brings more each time; `wrong` counts, on the device, the
    values that are not the sum of this round: of a rank that was late, or early."""

    def __init__(self, peer: Peer):
        device = peer.memory.own.device
        self.all_reduce = AllReduce(peer, torch.zeros(BLOCK, device=device), "all_reduce_one_shot")
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._due = torch.zeros((), device=device)
        self._own, self._all = peer.memory.rank + 1, sum(range(1, peer.memory.world_size + 1))
        self._before()
        self._after()  # what the driver loads at a first launch is loaded before a kernel waits for peers
        for each in (self.all_reduce.values, self.wrong, self._due):
            each.zero_()

    def __call__(self) -> None:
        """One round, on the current stream."""
        self._before()
        self.all_reduce()
        self._after()

    def _before(self) -> None:
        self.all_reduce.values.add_(self._own)

    def _after(self) -> None:
        self._due.add_(self._all)
        self.wrong.add_((self.all_reduce.out != self._due).sum())


def _meet(sizes: Sizes, place: Place) -> tuple[int, float]:
    rounds = Rounds(peer_on(place, 1 << 20))
    for _ in range(sizes.checked):
        rounds()
    return int(rounds.wrong), seconds_of_calls(rounds.all_reduce, sizes.timed)


def _meet_on_streams(sizes: Sizes, machine: Machine) -> tuple[int, float]:
    streams = Streams(ON_ONE, 1 << 20, machine)
    rounds = [Rounds(peer) for peer in streams.peers]
    streams.together(rounds, sizes.checked)
    torch.cuda.synchronize()
    return sum(int(each.wrong) for each in rounds), streams.seconds([each.all_reduce for each in rounds], sizes.timed)


def barriers(machine: Machine) -> Result:
    """Rounds of the barrier at which our kernels meet, in all-reduces of one block; what peers wrote is there then."""
    sizes = sizes_for(machine)
    if len(machine.gpus) > 1:
        of_ranks = Ranks(machine).run(functools.partial(_meet, sizes))
    else:
        of_ranks = [_meet_on_streams(sizes, machine)]
    if wrong := sum(each for each, _ in of_ranks):
        return Result("failed", "a rank reads what a peer had not written yet", wrong, "values")
    how = f"{len(of_ranks)} GPUs" if len(of_ranks) > 1 else f"{ON_ONE} streams of one GPU"
    slowest_s = max(seconds for _, seconds in of_ranks)
    return Result("ok", f"{2 * sizes.checked:,} rounds, {how}", round(slowest_s * 1e6, 2), "us an all-reduce")


def _replay(sizes: Sizes, place: Place) -> int:
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
    for replayed in range(2, sizes.replays + 2):
        graph.replay()
        wrong += int((call.out != replayed * place.size * (place.size + 1) // 2).sum())
    return wrong


def capture(machine: Machine) -> Result:
    """A CUDA graph with an all-reduce of ours, replayed; each result is known."""
    sizes = sizes_for(machine)
    wrong = sum(Ranks(machine).run(functools.partial(_replay, sizes)))
    if wrong:
        return Result("failed", "a replayed graph gives another sum than its launches", wrong, "values")
    return Result("ok", f"{sizes.replays:,} replays", 0, "wrong values")


def exact_all_reduces(peer: Peer, sizes: Sequence[int]) -> dict[tuple[str, int], Callable[[], object]]:
    """Our all-reduces in bf16, whose sums follow the canonical tree, by name and bytes."""
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for num_bytes in sizes:
        values = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=peer.memory.own.device)
        for shots in ("one", "two") if num_bytes <= 1 << 20 else ("two",):
            calls[f"exact, {shots} shot", num_bytes] = AllReduce(peer, values, f"all_reduce_{shots}_shot")
    return calls
