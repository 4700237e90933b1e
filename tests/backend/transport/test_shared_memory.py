"""Ranks of one host through shared memory: messages of any size, ends of any kind, and when they go over gloo."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.plans import training_plan
from shardproof import Layout
from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.transport.base import Transport, TransportError
from shardproof.backend.transport.symmetric.heap import Neighbour, SharedMemoryHeap
from shardproof.backend.transport.symmetric.membership import compiled
from shardproof.backend.transport.symmetric.shared_memory import (
    BOARD_BYTES,
    ONE_SHOT_BYTES,
    ONE_SHOT_OF_TWO_BYTES,
    SLOT_BYTES,
    SharedMemoryChannel,
    SharedMemoryGroup,
    SharedMemoryTransport,
)
from shardproof.verify.dynamic.proof import prove

pytestmark = pytest.mark.skipif(compiled is None, reason="the package was installed without a C compiler")


def sizes_job(transport: Transport, sizes: list[int]) -> list[bool]:
    group, here = transport.group("world", "dp", range(transport.world_size)), transport.global_rank
    assert isinstance(group, SharedMemoryGroup)
    found = []
    for size in sizes:
        own = torch.arange(size, dtype=torch.int32) + here
        gathered = group.all_gather(own)
        found.append(all(torch.equal(each, own - here + peer) for peer, each in enumerate(gathered)))
        sent = [own * 100 + peer for peer in range(group.size)]
        arrived = group.all_to_all(sent, [(size,)] * group.size)
        expected = [(own - here + peer) * 100 + here for peer in range(group.size)]
        found.append(all(map(torch.equal, arrived, expected)))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_messages_of_all_sizes_around_the_edges_of_slots_arrive(workers: Any, world_size: int) -> None:
    slots = (2 * SLOT_BYTES // world_size // 64 * 64 // 4, BOARD_BYTES // 4)
    edges = [edge * times + more for edge in slots for times in (1, 2, 3) for more in (-1, 0, 1)]
    sizes = [0, 1, *edges, 0, 5 * BOARD_BYTES // 4 + 3]
    assert workers(world_size, "shm").run(sizes_job, sizes) == [[True] * 2 * len(sizes)] * world_size


def sums_job(transport: Transport, counts: list[int]) -> list[bool]:
    """Sums over members with one row and with two, the middle one in turn with none, against the sum in place."""
    size, here = transport.world_size, transport.global_rank
    group, found = transport.group("world", "dp", range(size)), []
    for count in counts:
        for rows in ([1] * size, [2] * size, [1 - (member == size // 2) for member in range(size)]):
            made = torch.Generator().manual_seed(count)
            all_rows = torch.randn(sum(rows), count, generator=made)
            own = all_rows[sum(rows[:here]) : sum(rows[: here + 1])]
            merges = [0] + [1] * (len(all_rows) - 1)
            expected = all_rows[0].clone()
            for row in all_rows[1:]:
                expected += row
            found.append(torch.equal(group.tree_all_reduce(own.clone(), rows, merges, torch.float32), expected))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sums_that_are_passed_on_as_they_are_made_are_those_of_one_rank(workers: Any, world_size: int) -> None:
    most = (ONE_SHOT_OF_TWO_BYTES if world_size == 2 else ONE_SHOT_BYTES) // 4 // world_size
    block = 2 * SLOT_BYTES // world_size // 64 * 64 // 4
    counts = [1, world_size - 1, most, most + 1, 2 * block * world_size + 3, 3_000_001]
    assert workers(world_size, "shm").run(sums_job, counts) == [[True] * 3 * len(counts)] * world_size


def both_ways_job(transport: Transport, count: int) -> list[bool]:
    """Both ranks send before they receive, more than once, and end in another order."""
    here, peer = transport.global_rank, 1 - transport.global_rank
    lines = {(a, b): transport.channel(f"{a}-{b}", a, b) for a, b in ((0, 1), (1, 0))}
    ends = [lines[here, peer].begin_send(torch.full((count + i,), float(10 * here + i))) for i in range(3)]
    receives = [lines[peer, here].begin_receive((count + i,), torch.float32) for i in range(3)]
    found = [bool((receive() == 10 * peer + i).all()) for i, receive in enumerate(receives)]
    for end in reversed(ends):
        end()
    return found


def denied_job(transport: Transport, count: int) -> tuple[bool, list[bool]]:
    """One rank finds that the system does not let it read the other's memory; else as `both_ways_job`."""
    if transport.global_rank:
        Neighbour.can_read = lambda self, region: False  # type: ignore[method-assign]
    found = both_ways_job(transport, count)
    line = transport.channel("more", 0, 1)
    assert isinstance(line, SharedMemoryChannel)
    return line.pulls(count), found


def test_messages_arrive_where_memory_of_others_may_not_be_read() -> None:
    assert run_ranks(denied_job, 200_000, world_size=2, transport="shm") == [(False, [True] * 3)] * 2


def test_a_sender_that_has_ended_is_not_read(tmp_path: Path) -> None:
    """Its number may be another process's by then."""
    done = subprocess.run([sys.executable, "-c", ENDED_SENDER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "(0, 1) 7\n(2, 1)\n(5, 1)\n"), done.stderr


ENDED_SENDER = """
import ctypes, os, sys, time
from shardproof.backend.transport.symmetric.heap import compiled
size = compiled.region_size(2, 4096, 4096)
memory = [ctypes.create_string_buffer(size + 64) for _ in range(2)]
bases = tuple((ctypes.addressof(each) + 63) // 64 * 64 for each in memory)
source, target = (ctypes.c_char * 8)(7), (ctypes.c_char * 8)()
child = os.fork()
if not child:
    time.sleep(60)
alive = os.pidfd_open(child)
here = compiled.join(0, bases, (alive, alive), 4096, 4096)
def pull(process, address):
    return compiled.pull(here, 1, process, address, ctypes.addressof(target), 8)
print(pull(child, ctypes.addressof(source)), target[0][0])
os.kill(child, 9)
os.waitpid(child, 0)
print(pull(os.getpid(), ctypes.addressof(source)))
living = os.pidfd_open(os.getpid())
here = compiled.join(0, bases, (living, living), 4096, 4096)
print(pull(os.getpid(), 8))
"""


@pytest.mark.parametrize("count", [0, 1, 1_000_000])
def test_sends_that_have_begun_wait_for_no_other_call(workers: Any, count: int) -> None:
    assert workers(2, "shm").run(both_ways_job, count) == [[True] * 3] * 2


def growth_job(transport: Transport, rounds: int) -> tuple[int, int]:
    """Open files and bytes of shared memory after some rounds, and after many."""
    group = transport.group("world", "dp", range(transport.world_size))
    line = transport.channel("0-1", 0, 1)

    def held() -> int:
        shared = [text for text in Path("/proc/self/maps").read_text().splitlines() if "shardproof-heap" in text]
        return len(list(Path("/proc/self/fd").iterdir())) + len(shared)

    found = []
    for number in range(rounds):
        group.all_reduce(torch.ones(1 + number % 70), "sum")
        if transport.global_rank == 0:
            line.send(torch.ones(1 + number % 5000))
        else:
            line.receive((1 + number % 5000,), torch.float32)
        if number in (rounds // 10, rounds - 1):
            found.append(held())
    return found[0], found[1]


def test_two_thousand_rounds_take_no_more_than_two_hundred(workers: Any) -> None:
    assert all(early == late for early, late in workers(2, "shm").run(growth_job, 2000))


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_within_a_second_and_leaves_nothing(size: int) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "shardproof.tests.helpers.killed_ranks", "6", str(size), "20261123"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 6
    for each in found:
        assert len(each["heard"]) == size - 1
        assert all(f"rank {each['victim']} has ended" in words for words in each["words"]), each
        assert each["seconds"] < 10  # a second on a machine at rest: benchmarks/shared_memory.py
    assert sorted(Path("/dev/shm").iterdir()) == before


def closed_job(transport: Transport, _: None) -> str:
    group = transport.group("world", "dp", range(transport.world_size))
    if transport.global_rank == 0:
        group.release()
        return ""
    try:
        group.all_gather(torch.ones(3))
    except TransportError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_closed_is_named_by_those_who_wait_for_it(workers: Any) -> None:
    _, one, two = workers(3, "shm").run(closed_job, None)
    assert "rank 1, group 'world'" in one and "all_gather failed: rank 0 has closed its transport" in one
    assert "rank 0 has closed its transport" in two or "rank 1 has closed its transport" in two


def other_sizes_job(transport: Transport, _: None) -> str:
    group = transport.group("world", "dp", (0, 1))
    try:
        group.all_gather(torch.ones(4 if transport.global_rank else 3))
    except TransportError as error:
        return str(error)
    return "nothing was raised"


def test_another_number_of_bytes_is_an_error_with_the_rank(workers: Any) -> None:
    messages = workers(2, "shm").run(other_sizes_job, None)
    assert all(f"rank {1 - here} came with another number of bytes" in words for here, words in enumerate(messages))


def limited_job(transport: Transport, limited: int) -> tuple[dict[str, str], float]:
    """One rank may write no larger files, which memory without a name is to the system."""
    assert isinstance(transport, SharedMemoryTransport)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if transport.global_rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        group = transport.group("world", "dp", range(transport.world_size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return transport.reasons, float(group.all_reduce(torch.ones(1), "sum"))


def test_without_memory_all_members_go_over_gloo_for_the_same_reason(workers: Any) -> None:
    results = workers(3, "shm").run(limited_job, 1)
    assert {total for _, total in results} == {3.0}
    reasons = [reason["world"] for reason, _ in results]
    assert len(set(reasons)) == 1 and reasons[0].startswith("rank 1: no shared memory: ")


def test_bits_over_shared_memory_are_those_of_one_device() -> None:
    proof = prove(training_plan(Layout(tp=3, dp=2), num_heads=6, num_kv_heads=6), transport="shm", steps=2)
    assert proof.findings == () and proof.report["bits_different"] == 0


def test_memory_that_is_not_there_is_not_taken() -> None:
    heap = SharedMemoryHeap()
    first, _ = heap.allocate(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            heap.allocate(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    second, mapped = heap.allocate(1 << 20)
    assert second.offset == first.num_bytes and bytes(mapped.view[:64]) == bytes(64)


@pytest.mark.parametrize(
    ("bases", "rank", "slot_bytes"), [((1,), 0, 64), (tuple(range(65)), 0, 64), ((1, 2), 2, 64), ((1, 2), 0, 8)]
)
def test_impossible_groups_are_refused(bases: tuple[int, ...], rank: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="2 to 64 members"):
        compiled.join(rank, bases, bases, slot_bytes, 64)


SLOW_POLL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <time.h>
int poll(struct pollfd *asked, nfds_t count, int timeout) {
    int (*real)(struct pollfd *, nfds_t, int) = dlsym(RTLD_NEXT, "poll");
    struct timespec wait = {0, 200000000};
    if (count == 1 && timeout == 0) nanosleep(&wait, 0);
    return real(asked, count, timeout);
}
"""
"""Whoever asks whether a peer has ended gets the answer late: meanwhile the peer acts and closes."""

LAST_ACT = """
import ctypes, os, sys, threading, time
from shardproof.backend.transport.symmetric.heap import compiled
size = compiled.region_size(2, 4096, 4096)
memory = [ctypes.create_string_buffer(size + 64) for _ in range(2)]
bases = tuple((ctypes.addressof(each) + 63) // 64 * 64 for each in memory)
alive = os.pipe()[0]  # never readable: both live
here, peer = (compiled.join(rank, bases, (alive, alive), 4096, 4096) for rank in range(2))
pairs = {"posts": (compiled.wait_posted, compiled.post), "takes": (compiled.wait_taken, compiled.take)}
waits, acts = pairs[sys.argv[1]]
def last_act():
    time.sleep(0.15)
    acts(peer, 0)
    compiled.close(peer)
thread = threading.Thread(target=last_act)
thread.start()
print(waits(here, 1, 1, 5.0)[0])
thread.join()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("act", ["posts", "takes"])
def test_what_a_peer_does_right_before_it_closes_is_heard(act: str, tmp_path: Path) -> None:
    source, library = tmp_path / "slow_poll.c", tmp_path / "slow_poll.so"
    source.write_text(SLOW_POLL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", LAST_ACT, act], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
