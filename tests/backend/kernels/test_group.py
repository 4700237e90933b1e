"""A group by kernels, interpreted by processes that share memory, against the tree in torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.gates import sampled
from shardproof.backend.kernels.group import KernelGroup
from shardproof.backend.kernels.kernel import Kernel
from shardproof.backend.transport.process_group import ProcessGroupTransport
from shardproof.core.base.reduction import cut
from shardproof.verify.doctor.gpu_kernels import AllReduce
from shardproof.verify.kernels.oracle import Sum, canonical, different_bits, numbers
from shardproof.verify.kernels.processes import PTX_EXECUTED, Peer, Peers

LEAVES = 7
COUNTS = (1, 126, 131)
ROOM = 640
"""Bytes of memory in the second round, so that calls take several pieces or go over gloo."""


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with Peers(3, patience_s=30.0) as found:
        yield found


class TwoShots(KernelGroup):
    one_shot_bytes = 0


def run_group(
    peer: Peer, folder: str, room: int, leaves: int, kind: type[KernelGroup], multicast: bool
) -> tuple[set[str], list[int]]:
    """The kernels that ran, and wrong bits of all-gathers, of sums on all ranks and of sums of parts."""
    rank, size, names = peer.memory.rank, peer.memory.world_size, set()
    memory = replace(peer.memory, own=peer.memory.own[:room], multicast=multicast and peer.memory.multicast)

    def launch(
        kernel: Kernel, num_blocks: int, arguments: Mapping[str, Any], constants: Mapping[str, Any], *rest: Any
    ) -> None:
        names.add(kernel.name)
        peer.launch(kernel, num_blocks, arguments, constants, *rest)

    store = dist.FileStore(str(Path(folder) / "store"), size)
    with ProcessGroupTransport(store, rank, size, timeout_s=30.0) as transport:
        group = kind(transport, "g", "tp", range(size), memory, launch)
        gathered = sum(_gathered(group, dtype) for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int64))
        added = [_added(group, count, leaves) for count in COUNTS]
        group.release()
    return names, [gathered, sum(each for each, _ in added), sum(each for _, each in added)]


def run_all_reduce(peer: Peer, kernel: str, dtype: torch.dtype) -> int:
    leaves = [numbers((rank,), 1500, dtype) for rank in range(peer.memory.world_size)]
    call = AllReduce(peer, leaves[peer.memory.rank], kernel)
    call()
    return different_bits(call.out, canonical(leaves).to(dtype))


def _gathered(group: KernelGroup, dtype: torch.dtype) -> int:
    wrong = 0
    for shape in ((3,), (2, 129)):
        values = [
            (numbers((rank, *shape), torch.Size(shape).numel(), torch.float32) * 8).to(dtype).view(shape)
            for rank in range(group.size)
        ]
        got = group.all_gather(values[group.rank])
        wrong += sum(different_bits(one, other) for one, other in zip(got, values, strict=True))
    uneven = [torch.arange(rank + 1).to(dtype) for rank in range(group.size)]
    got = group.all_gather(uneven[group.rank], [(rank + 1,) for rank in range(group.size)])
    return wrong + sum(different_bits(one, other) for one, other in zip(got, uneven, strict=True))


def _added(group: KernelGroup, count: int, num_leaves: int) -> tuple[int, int]:
    leaves = [numbers((leaf, count), count, torch.float32) for leaf in range(num_leaves)]
    tree, total = Sum(num_leaves, group.size), canonical(leaves)
    rows = [len(nodes) for nodes in tree.nodes]
    shipped = tree.shipped(leaves, group.rank).view(rows[group.rank], count)
    whole = group.tree_all_reduce(shipped.clone(), rows, tree.merges, torch.bfloat16)
    lo, hi = cut(count, group.size, group.rank)
    parts = [shipped[:, slice(*cut(count, group.size, member))].clone() for member in range(group.size)]
    return different_bits(whole, total.bfloat16()), different_bits(
        group.tree_sum(parts, rows, tree.merges), total[lo:hi]
    )


@pytest.mark.parametrize(("kind", "shots"), [(KernelGroup, "one"), (TwoShots, "two")])
@pytest.mark.parametrize("room", [1 << 16, ROOM])
@pytest.mark.parametrize(("world_size", "leaves"), [(2, LEAVES), (3, LEAVES), (3, 2)])
def test_a_group_by_kernels_has_the_bits_of_any_other(peers, tmp_path, world_size, leaves, room, kind, shots):
    found = peers.run(run_group, str(tmp_path), room, leaves, kind, False, world_size=world_size)
    assert [wrong for _, wrong in found] == [[0, 0, 0]] * world_size
    used = {"all_gather", f"all_reduce_{shots}_shot", "reduce_scatter_rows", "reduce_scatter"}
    assert all(names == used or (names < used and room == ROOM) for names, _ in found), found


@sampled("room", [ROOM, 1 << 16], on_push=1)
def test_a_group_with_multicast_sends_large_sums_by_it(tmp_path, room):
    with Peers(3, floor=PTX_EXECUTED, environment={}) as peers:
        found = peers.run(run_group, str(tmp_path), room, LEAVES, TwoShots, True)
    assert [wrong for _, wrong in found] == [[0, 0, 0]] * 3
    assert all("exact_all_reduce_multicast" in names for names, _ in found), found


@pytest.mark.parametrize("kernel", ["all_reduce_one_shot", "all_reduce_two_shot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduces_of_the_doctor_have_the_sum(peers, kernel, dtype):
    assert peers.run(run_all_reduce, kernel, dtype, world_size=2) == [0, 0]
