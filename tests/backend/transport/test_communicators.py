"""Communicators: opened by all ranks in an order that cannot wait in a circle, each by its members
alone, and gone after use."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardproof
from shardproof.backend.launching.torchrun import torchrun_transport
from shardproof.backend.transport.base import Group, TransportError
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.backend.transport.mesh import Mesh
from shardproof.backend.transport.process_group import ProcessGroupTransport
from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.layout import Layout
from shardproof.core.schedule import CATALOG, build, lower

NUM_CYCLES = 20


def load_benchmark():
    path = Path(shardproof.__file__).parent / "benchmarks" / "communicators.py"
    spec = importlib.util.spec_from_file_location("communicators", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["communicators"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


# the order


def random_cases(count):
    """Layouts of up to 120 ranks with every schedule of the catalog, experts, and the axes in any order."""
    chosen, names = random.Random(6), list(CATALOG)
    cases = []
    while len(cases) < count:
        name = names[len(cases) % len(names)]
        vpp = CATALOG[name].nearest_vpp(2)
        tp, cp, dp, ep = (chosen.choice((1, 2, 3, 5)) for _ in range(4))
        pp = chosen.choice((2, 3, 4, 6))
        order = ["tp", "cp", "ep", "dp", "pp"]
        chosen.shuffle(order)
        microbatches = next(
            (m for m in (2 * pp, 3 * pp) if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=m) is None), None
        )
        try:
            layout = Layout(
                tp=tp, cp=cp, dp=dp, ep=ep, pp=pp, vpp=vpp, etp=chosen.choice((None, 1)), order="-".join(order)
            )
        except LayoutError:
            continue
        if microbatches is not None and layout.world_size <= 120:
            cases.append((layout, lower(build(name, pp=pp, vpp=vpp, num_microbatches=microbatches))))
    return cases


CASES = random_cases(len(CATALOG))


@pytest.mark.parametrize(
    ("layout", "schedule"), CASES, ids=[(f"{schedule.name} {layout.degrees}") for layout, schedule in CASES]
)
def test_all_ranks_of_a_world_open_what_is_theirs_without_waiting_in_a_circle(layout, schedule):
    openings = [benchmark.set_up(layout, schedule, rank)[0] for rank in range(layout.world_size)]
    rounds = benchmark.rounds_until_all_are_open(openings)
    assert max(map(len, openings)) <= rounds < sum(map(len, openings)) + 1
    names = [name for each in openings for name, _ in each]
    for members in (dict(each) for each in openings):
        assert all(names.count(name) == len(ranks) for name, ranks in members.items()), "every member opens it, once"


def test_the_replay_finds_ranks_that_wait_in_a_circle_or_know_other_members():
    ab, bc, ca = ("ab", (0, 1)), ("bc", (1, 2)), ("ca", (2, 0))
    assert benchmark.rounds_until_all_are_open([[ab, ca], [ab, bc], [bc, ca]]) == 3
    with pytest.raises(RuntimeError, match="3 ranks wait for each other"):
        benchmark.rounds_until_all_are_open([[ab, ca], [bc, ab], [ca, bc]])
    with pytest.raises(ValueError, match="rank 0 opens 'ab' over"):
        benchmark.rounds_until_all_are_open([[("ab", (1, 0))], [ab]])


def test_directions_and_collectives_of_two_ranks_have_communicators_of_their_own():
    """A vee of two: both directions of both kinds of messages go between the same two ranks."""
    schedule = lower(build("ZBVZeroBubble", pp=2, num_microbatches=4, vpp=2))
    transport = MemoryWorld(4).transport(0)
    mesh = Mesh(transport, Layout(tp=2, pp=2, vpp=2), schedule)
    assert mesh.links == (("B", 0, 1), ("B", 1, 0), ("F", 0, 1), ("F", 1, 0))
    lines = [mesh.channel(*link) for link in mesh.links]
    groups = [mesh.tp, mesh.tp_gradients, mesh.model]
    assert len({id(each) for each in (*lines, *groups)}) == 7 == len({each.name for each in (*lines, *groups)})


# the end


def held():
    """Threads and open files of this process."""
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def cycles_job(transport, path):
    """Meshes that are made, used and closed over one store, while somebody keeps everything of every one."""
    layout, schedule = Layout(pp=2), lower(build("1F1B", pp=2, num_microbatches=2))
    store, here = dist.FileStore(path, transport.world_size), transport.global_rank
    gc.collect()  # what jobs before have left would go at any time
    retained, counts = [], [held()]
    for cycle in range(NUM_CYCLES):
        with ProcessGroupTransport(store, here, layout.world_size) as own:
            mesh = Mesh(own, layout, schedule)
            (total,) = set(mesh.model.all_reduce(torch.tensor([float(here + cycle)]), "sum").tolist())
            assert total == 1 + 2 * cycle
            during = held()
        retained.append((own, mesh))
        counts.append(held())
    errors = []
    own, mesh = retained[0]
    for call in (
        lambda: mesh.model.all_gather(torch.zeros(1)),
        lambda: mesh.channel(*mesh.links[0]).send(torch.zeros(1)),
    ):
        try:
            call()
        except (TransportError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    own.close()
    return counts, during, errors


def test_20_cycles_leave_no_thread_and_no_socket_behind_though_their_groups_are_kept(workers, tmp_path):
    for rank, (counts, during, errors) in enumerate(workers(2).run(cycles_job, str(tmp_path / "store"))):
        threads, files = zip(*counts[1:], strict=True)
        assert len(set(threads)) == 1 and files[-1] <= files[0], "every cycle gives back all it took"
        assert during[0] > threads[0] and during[1] > files[0], "and it took some"
        assert "TransportError" in errors[0] and "the transport was closed, and this group with it" in errors[0]
        # the first link is B 1->0
        assert ("the transport was closed, and this channel with it" in errors[1]) == (rank == 1)


def closed_world_job(transport, _):
    group = transport.group("world", "tp", range(transport.world_size))
    group.barrier()
    transport.close()
    with pytest.raises(TransportError, match="this group with it"):
        group.barrier()
    return isinstance(transport.opened[0], Group)


def test_a_closed_transport_in_memory_refuses_calls_too(workers):
    assert workers(3, "memory").run(closed_world_job) == [True] * 3


def torchrun_job(transport, port):
    """Two transports of a process that torchrun started, one after the other."""
    os.environ |= {
        "RANK": str(transport.global_rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sums = []
    for _ in range(2):
        with torchrun_transport(timeout_s=120) as own:
            group = own.group("world", "dp", (0, 1))
            sums.append(group.all_reduce(torch.tensor([1.0 + own.global_rank]), "sum").item())
    return sums


def test_a_process_that_torchrun_started_may_train_twice(workers):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert workers(2).run(torchrun_job, port) == [[3.0, 3.0]] * 2
