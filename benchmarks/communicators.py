"""Set-up of 4,096 ranks: what each opens, in which order, and how long that takes; prints one JSON line.

Usage: python benchmarks/communicators.py             4,096 ranks: tp 8, cp 2, pp 16, dp 16, experts over 8
       python benchmarks/communicators.py PP DP       another size

Every rank of the world makes its mesh, one after the other in this process, over process groups of torch's fake
backend: no sockets, so the seconds are those of working out the groups and of torch's own objects. Then the openings of
all ranks are replayed with the meaning of a rendezvous (a communicator is there when all its members have come to it),
which must come to its end. Next to it what torch's own `init_device_mesh` takes on one rank for the five axes alone,
where every rank makes the groups of all.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.backend.transport.mesh import Mesh
from shardproof.backend.transport.process_group import ProcessGroup, ProcessGroupTransport
from shardproof.core.layout.layout import Layout
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.schedule import Schedule

TP, CP, PP, DP, EP = 8, 2, 16, 16, 8
NUM_MICROBATCHES = 64
TARGET_S = 0.05
"""Most seconds of one rank's own share."""

Opening = tuple[str, tuple[int, ...]]
"""The name and the members of a communicator."""


class FakeTransport(ProcessGroupTransport):
    """The real transport, but for the library behind it."""

    def connect(self, name: str, axis: str, ranks: Sequence[int]) -> Any:
        """A process group that talks to nobody."""
        return FakeProcessGroup._create_internal(ranks.index(self.global_rank), len(ranks))


def main() -> None:
    """One size."""
    pp, dp = (int(argument) for argument in sys.argv[1:]) if len(sys.argv) > 1 else (PP, DP)
    layout = Layout(tp=TP, cp=CP, pp=pp, dp=dp, ep=EP, sequence_parallel=True, zero=1)
    schedule = lower(build("1F1B", pp=pp, num_microbatches=NUM_MICROBATCHES))
    openings, seconds = zip(*(set_up(layout, schedule, rank) for rank in range(layout.world_size)), strict=True)
    waited = rounds_until_all_are_open(openings)
    counts = [len(each) for each in openings]
    everything = {opening for each in openings for opening in each}
    report = {
        "benchmark": "communicators",
        "layout": layout.degrees,
        "ranks": layout.world_size,
        "communicators": len(everything),
        "largest": max(len(members) for _, members in everything),
        "of_one_rank": {"least": min(counts), "most": max(counts)},
        "of_one_rank_by_axis": dict(
            Counter(name.split("/")[0].rstrip("0123456789") for name, _ in max(openings, key=len))
        ),
        "rounds": waited,
        "seconds_of_one_rank": {"median": sorted(seconds)[len(seconds) // 2], "most": max(seconds)},
        "seconds_of_all": sum(seconds),
        "torch_device_mesh_s": device_mesh_s(layout),
    }
    print(json.dumps(report))
    assert sorted(seconds)[len(seconds) // 2] < TARGET_S, "too slow"


def set_up(layout: Layout, schedule: Schedule, global_rank: int) -> tuple[list[Opening], float]:
    """What one rank opens, in its order, and the seconds that takes. Groups of one rank are no communicators."""
    start = perf_counter()
    transport = FakeTransport(dist.HashStore(), global_rank, layout.world_size)
    Mesh(transport, layout, schedule, experts=True)
    elapsed_s = perf_counter() - start
    opened = [
        (each.name, each.ranks if isinstance(each, ProcessGroup) else (each.source, each.destination))
        for each in transport.opened
    ]
    transport.close()
    return [(name, members) for name, members in opened if len(members) > 1], elapsed_s


def rounds_until_all_are_open(openings: Sequence[Sequence[Opening]]) -> int:
    """Rounds in which all ranks that can go on do, one communicator each. Raises `RuntimeError` when ranks
    wait in a circle, and `ValueError` when two ranks know different members of a communicator, or one opens
    what it is no member of."""
    members: Mapping[str, tuple[int, ...]] = dict(opening for each in openings for opening in each)
    for rank, each in enumerate(openings):
        for name, ranks in each:
            if members[name] != ranks or rank not in ranks:
                raise ValueError(f"rank {rank} opens {name!r} over {ranks}, others over {members[name]}.")
    cursor, rounds = [0] * len(openings), 0
    waiting = set(range(len(openings)))
    while waiting:
        came = Counter(openings[rank][cursor[rank]][0] for rank in waiting if cursor[rank] < len(openings[rank]))
        going = [rank for name, count in came.items() if count == len(members[name]) for rank in members[name]]
        waiting = {rank for rank in waiting if cursor[rank] < len(openings[rank])}
        if waiting and not going:
            raise RuntimeError(
                f"{len(waiting)} ranks wait for each other, rank {min(waiting)} at "
                f"{openings[min(waiting)][cursor[min(waiting)]]}."
            )
        for rank in going:
            cursor[rank] += 1
        rounds += bool(going)
    return rounds


def device_mesh_s(layout: Layout) -> float:
    """Seconds of torch's own mesh of the same degrees, on rank 0."""
    shape = (layout.pp, layout.dp, layout.cp, layout.tp)
    start = perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    dist.init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    elapsed_s = perf_counter() - start
    dist.destroy_process_group()
    return elapsed_s


if __name__ == "__main__":
    main()
