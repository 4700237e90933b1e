"""Shared memory and gloo: collectives and messages of both, in turn in the same processes.

`python benchmarks/shared_memory.py [--ranks 2 4] [--rounds 7] [--kills 50]`: microseconds of a call of each, as the
least and the median over rounds. `ratio` is gloo's median over that of shared memory, `to gloo best` its best round
over that. `copy` is one thread's copy of as many bytes, and `share` what an all-gather reaches of its rate: by the
result of n parts, and in brackets by the n - 1 parts that arrive (the algorithm and bus bandwidths of nccl-tests'
doc/PERFORMANCE.md). With `--kills` ranks are killed in the middle of collectives, and the seconds until the others
name them are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.numerics.summands import Summands, sum_over
from shardproof.backend.transport.base import Channel, Group, Transport
from shardproof.backend.transport.process_group import ProcessGroupTransport

SIZES = (4096, 65536, 1 << 20, 1 << 24)
LEAST_S = 0.02
"""A round repeats a call until it takes about so long."""

Seconds = dict[str, list[float]]


def calls_of(group: Group, there: Channel, back: Channel, here: int, count: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name; values are fp32."""
    values, used_up = torch.rand(count), torch.rand(count)
    part = count // group.size
    parts, shapes = list(values[: part * group.size].split(part)), [(part,)] * group.size

    def round_trip() -> None:
        if here == 0:
            there.send(values)
            back.receive((count,), torch.float32)
        elif here == 1:
            there.receive((count,), torch.float32)
            back.send(values)

    return {
        "all_gather": lambda: group.all_gather(values),
        "all_to_all": lambda: group.all_to_all(parts, shapes),
        "exact all_reduce": lambda: sum_over(group, used_up[None], Summands.one_each(group.size)),
        "fast all_reduce": lambda: group.all_reduce(values, "sum"),
        "round trip": round_trip,
    }


def measure(transport: Transport, rounds: int) -> dict[str, Seconds]:
    """Seconds of a call by name, transport and round; those of the slowest rank."""
    here, size = transport.global_rank, transport.world_size
    assert isinstance(transport, ProcessGroupTransport)
    over_gloo = ProcessGroupTransport(transport._store, here, size)
    ends = {}
    for name, way in (("shm", transport), ("gloo", over_gloo)):
        group = way.group("world", "dp", range(size))
        lines = [way.channel(f"{a}-{b}", a, b) if here in (a, b) else None for a, b in ((0, 1), (1, 0))]
        ends[name] = group, *lines
    found: dict[str, Seconds] = {}
    for num_bytes in SIZES:
        calls = {name: calls_of(*end, here, num_bytes // 4) for name, end in ends.items()}
        for call in calls["shm"]:
            key = f"{call} {num_bytes}"
            times = {name: _repeats(of[call], ends["shm"][0]) for name, of in calls.items()}
            found[key] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, of in calls.items():
                    found[key][name].append(_seconds(of[call], times[name], ends["shm"][0]))
    source, target = torch.rand(SIZES[-1] // 4), torch.rand(SIZES[-1] // 4)
    found["copy"] = {"one": [_seconds(lambda: target.copy_(source), 5, None) for _ in range(rounds)]}
    over_gloo.close()
    return found


def _repeats(call: Callable[[], object], world: Group) -> int:
    call()
    once = _seconds(call, 1, world)
    longest = max(tensor.item() for tensor in world.all_gather(torch.tensor(once, dtype=torch.float64)))
    return max(1, min(200, int(LEAST_S / longest)))


def _seconds(call: Callable[[], object], times: int, world: Group | None) -> float:
    if world is not None:
        world.barrier()
    start = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - start) / times


def main() -> None:
    """Prints a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    for size in args.ranks:
        of_ranks = run_ranks(measure, args.rounds, world_size=size, transport="shm")
        copy_s = median(of_ranks[0].pop("copy")["one"])
        print(f"{size} ranks; copy of {SIZES[-1]:,} bytes {copy_s * 1e6:,.0f} us")
        print(f"{'call':18}{'bytes':>12}{'shm us':>20}{'gloo us':>20}{'ratio':>10}{'to gloo best':>15}{'share':>10}")
        for key in of_ranks[0]:
            call, num_bytes = key.rsplit(" ", 1)
            rounds = {
                name: [max(s) for s in zip(*(found[key][name] for found in of_ranks), strict=True)]
                for name in ("shm", "gloo")
            }
            shm, gloo = rounds["shm"], rounds["gloo"]
            least = [f"{min(of) * 1e6:,.0f} / {median(of) * 1e6:,.0f}" for of in (shm, gloo)]
            part = copy_s * int(num_bytes) / SIZES[-1] / median(shm)
            share = f"{size * part:.0%} ({(size - 1) * part:.0%})" if call == "all_gather" else ""
            print(
                f"{call:18}{int(num_bytes):12,}{least[0]:>20}{least[1]:>20}{median(gloo) / median(shm):10.1f}"
                f"{min(gloo) / median(shm):15.1f} {share:>9}"
            )
    for size in args.ranks if args.kills else ():
        command = [sys.executable, "-m", "shardproof.tests.helpers.killed_ranks", str(args.kills), str(size), "1"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = [json.loads(line) for line in lines]
        named = sum(all(f"rank {each['victim']} has ended" in words for words in each["words"]) for each in found)
        slowest = max(each["seconds"] for each in found)
        print(f"{size} ranks, {len(found)} kills: {named} named by all others, the slowest after {slowest:.2f} s")


if __name__ == "__main__":
    main()
