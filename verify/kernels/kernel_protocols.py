"""The protocols of the compiled collectives: each kernel of the catalog compiled, carried out by `ptx_accesses`, put
into the words of the table, and explored. Imports Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from ...backend.kernels.kernel import Kernel
from ...backend.transport.symmetric.barrier import COLLECTIVES, Step
from ...core.base.reduction import merges_of
from . import compiling
from .memory_model import Explored, Op, Program, explore
from .protocols import SIZES, UnreadProtocol, pad, pads_of
from .ptx_accesses import MULTICAST, PADS, PRIVATE, TABLE, Access, Launch, accesses

WIDTH, BLOCK = 4, 64
"""Elements of a row or of a part, and of a block. A rank has as many rows as there are ranks: each is somebody's."""

AREA = 1 << 24
"""Bytes between two of the arrays that are a rank's own."""

_TYPES = {"out": "*fp32", "residual": "*fp32", "weight": "*fp32", "tensors": "*i64", "counts": "*i32"}

BlockAccesses = Sequence[list[Access]]
"""What a block does, for each rank."""


@dataclass(frozen=True)
class Compiled:
    """A kernel's PTX for `world_size` ranks, and the names of its parameters."""

    kernel: Kernel
    world_size: int
    ptx: str
    names: tuple[str, ...]


def compiled(kernel: Kernel, world_size: int, architecture: int = 90) -> Compiled:
    """The kernel, with one node of the tree a rank and fp32 elements."""
    constants: dict[str, Any] = {
        "WORLD": world_size,
        "BLOCK": BLOCK,
        "NODES": (1,) * world_size,
        "MERGES": merges_of(world_size, [(leaf, leaf + 1) for leaf in range(world_size)]),
        "LEAF": tl.float32,
        "UNITS_OF": (4,),
    }
    parameters = kernel.function.params
    signature = {
        each.name: "constexpr" if each.is_constexpr else _TYPES.get(each.name) or each.annotation for each in parameters
    }
    used = {each.name: constants[each.name] for each in parameters if each.is_constexpr}
    ptx = str(compiling.compiled(kernel, signature, used, architecture=architecture).asm["ptx"])
    return Compiled(kernel, world_size, ptx, tuple(each.name for each in parameters if not each.is_constexpr))


def launch(compiled: Compiled, rank: int, block: int = 0, num_blocks: int = 1) -> Launch:
    """A block of a launch on small arrays: `WIDTH` elements of every rank for every other."""
    world_size = compiled.world_size
    # of an all-reduce: parts are multiples of 16 elements
    n = 16 * world_size if "all_reduce" in compiled.kernel.name else WIDTH
    n = n if num_blocks == 1 else num_blocks * BLOCK * world_size
    area = {name: PRIVATE + AREA * index for index, name in enumerate(compiled.names)}
    numbers = {"table": TABLE, "pads": PADS, "multicast": MULTICAST, "n": n, "rank": rank, "width": WIDTH, "eps": 0}
    numbers |= {"tokens": num_blocks * world_size, "hidden": WIDTH}
    memory: dict[int, int] = {}
    if "counts" in area:
        memory |= {area["counts"] + 4 * peer: num_blocks * BLOCK // WIDTH for peer in range(world_size)}
    if "tensors" in area:
        result = PRIVATE + AREA * len(area)
        memory |= {area["tensors"] + 8 * index: value for index, value in enumerate((0, 4 * WIDTH, result))}
    values = [numbers.get(name, area[name]) for name in compiled.names]
    return Launch(world_size, 32 * compiled.kernel.num_warps, values, memory, block, num_blocks)


def block_accesses(compiled: Compiled, block: int = 0, num_blocks: int = 1) -> BlockAccesses:
    """What that block does on each rank. Raises `UnreadProtocol`."""
    ranks = range(compiled.world_size)
    return [accesses(compiled.ptx, launch(compiled, rank, block, num_blocks)) for rank in ranks]


def steps_of(found: BlockAccesses, rank: int = 0) -> tuple[Step, ...]:
    """The block's accesses on one rank as steps of the table: between two barriers one read and one write, in the order
    of the first thread. What a rank does in its own buffer is a step where it reads what a peer has written, or writes
    where a peer comes. Raises `UnreadProtocol` where a barrier is not one swap for each rank."""
    by_peers = {kind: _places_of_peers(found, kind) for kind in ("read", "write")}
    peers_come = by_peers["read"] | by_peers["write"]
    steps: list[Step] = []
    met: list[int] = []
    between: set[Step] = set()
    for access in found[rank]:
        matters = by_peers["write"] if access.kind == "read" else peers_come
        if access.kind != "swap" and access.owner == rank and (access.owner, access.offset) not in matters:
            continue
        if access.kind != "swap":
            step = Step(access.kind)
        else:
            step = Step("signal" if access.value else "wait", access.order)
            peer = access.owner if access.value else access.offset // 4 % len(found)
            if not steps or steps[-1] != step:
                _all_met(met, len(found))
                met = []
            met.append(peer)
            between = set()
        if step not in between and (not steps or steps[-1] != step):
            steps.append(step)
        if access.kind != "swap":
            between.add(step)
    _all_met(met, len(found))
    return tuple(steps)


def _places_of_peers(found: BlockAccesses, kind: str) -> set[Place]:
    """Words of buffers that somebody else than their owner reads, or writes, which is by multicast."""
    return {
        (access.owner, access.offset)
        for rank, of_rank in enumerate(found)
        for access in of_rank
        if access.kind == kind and access.owner != rank
    }


def _all_met(met: list[int], world_size: int) -> None:
    if met and sorted(met) != list(range(world_size)):
        raise UnreadProtocol(f"signals are put or taken for the ranks {met}, of {world_size}.")


def programs_of(found: BlockAccesses, num_rounds: int) -> dict[str, list[Program]]:
    """For each place that ranks share, what all do to it and to the signals, `num_rounds` launches in a row; before
    each the owner writes what it shares.

    Loads and stores of different places do not wait for each other, and a release only waits for more with more of
    them; so what is right for each place alone is right for all together. Places that all use equally are one.
    """
    return {
        place: [_program(found, rank, used[0], num_rounds) for rank in range(len(found))]
        for place, used in _places(found).items()
    }


Place = tuple[int, int]


def _places(found: BlockAccesses) -> dict[str, list[Place]]:
    """The words of buffers that somebody else reads or writes, those together that all use at the same points."""
    uses: dict[Place, list[tuple[int, int, str]]] = defaultdict(list)
    for rank, of_rank in enumerate(found):
        num_swaps = 0
        for access in of_rank:
            if access.kind == "swap":
                num_swaps += 1
            else:
                uses[access.owner, access.offset].append((rank, num_swaps, access.kind))
    together: dict[tuple[object, ...], list[Place]] = defaultdict(list)
    for place, use in uses.items():
        if any(rank != place[0] for rank, _, _ in use):
            together[(place[0], *use)].append(place)
    return {f"data of rank {places[0][0]} at {places[0][1]}": places for places in together.values()}


def _program(found: BlockAccesses, rank: int, place: Place, num_rounds: int) -> Program:
    owner, world_size = place[0], len(found)
    name = f"data of rank {owner}"
    writers = [each for each, of_rank in enumerate(found) if any(_is_write(access, place) for access in of_rank)]
    if len(writers) > 1:
        raise UnreadProtocol(f"ranks {writers} write to one place in the buffer of rank {owner}.")
    writer = writers[0] if writers else owner
    writes = [waits for access, waits in _with_waits(found[writer]) if _is_write(access, place)]
    ops: list[Op] = []
    for first in range(1, num_rounds * (len(writes) + 1) + 1, len(writes) + 1):
        num_written = 0
        if rank == owner == writer:
            ops.append(Op("store", name, first))
        for access, waits in _with_waits(found[rank]):
            if access.kind == "swap":
                source = access.offset // 4 % world_size
                ops.append(Op("swap", pad(source, access.owner), access.value, access.expected, access.order))
            elif _is_write(access, place):
                num_written += 1
                ops.append(Op("store", name, first + num_written))
            elif (access.owner, access.offset) == place and (rank != owner or writer != owner):
                load = Op("load", name, first + sum(before < waits for before in writes))
                if ops[-1:] != [load]:  # what one of several loads may see each of them may
                    ops.append(load)
    return tuple(ops)


def _is_write(access: Access, place: Place) -> bool:
    return access.kind == "write" and (access.owner, access.offset) == place


def _with_waits(found: Sequence[Access]) -> list[tuple[Access, int]]:
    """Each access, with how many signals were waited for before it."""
    num_waits, numbered = 0, []
    for access in found:
        numbered.append((access, num_waits))
        num_waits += access.kind == "swap" and access.expected == 1
    return numbered


def check_kernel(found: BlockAccesses, num_rounds: int) -> Explored:
    """What a block does on all ranks, explored place by place: what is wrong first, or all states."""
    num_states = 0
    for programs in programs_of(found, num_rounds).values():
        explored = explore(programs, reset=pads_of(programs))
        num_states += explored.num_states
        if not explored.ok:
            return explored
    return Explored("ok", num_states)


def crossing(compiled: Compiled, num_blocks: int = 2) -> list[Place]:
    """Words of buffers that one block writes and another one, of whatever rank, uses. Blocks only meet the same block
    of peers, so nothing orders such accesses."""
    written: dict[Place, set[int]] = defaultdict(set)
    used: dict[Place, set[int]] = defaultdict(set)
    for block in range(num_blocks):
        for of_rank in block_accesses(compiled, block, num_blocks):
            for access in of_rank:
                if access.kind != "swap":
                    used[access.owner, access.offset].add(block)
                    if access.kind == "write":
                        written[access.owner, access.offset].add(block)
    return sorted(place for place, blocks in written.items() if len(blocks | used[place]) > 1)


def what_is_wrong(kernel: Kernel, architecture: int = 90) -> str:
    """Of a kernel as it is compiled for each of `SIZES`: what its exploration found, or how it is not the table's
    protocol; empty for nothing."""
    try:
        words = (_wrong_of(kernel, size, architecture) for size in SIZES)
        return next((each for each in words if each), "")
    except UnreadProtocol as error:
        return f"refused: {error}"


def _wrong_of(kernel: Kernel, size: tuple[int, int], architecture: int) -> str:
    world_size, num_rounds = size
    made = compiled(kernel, world_size, architecture)
    found = block_accesses(made)
    explored = check_kernel(found, num_rounds)
    if not explored.ok:
        return f"{explored.kind}: {'; '.join(explored.trace)}"
    if (steps := steps_of(found)) != COLLECTIVES[kernel.name][1:]:
        return f"other steps than the table's: {' '.join(f'{step.act}.{step.order}' for step in steps)}"
    writes = size == SIZES[0] and any(access.kind == "write" for access in found[0])
    places = crossing(made) if writes else []
    return f"blocks use what others write: {places[:4]}" if places else ""


def check_kernels(names: Sequence[str] = (), architectures: Iterable[int] = (90,)) -> dict[str, str]:
    """`what_is_wrong` with each kernel of those names, without them of all that meet, for the first architecture where
    something is. They are compiled in a process of its own, which Triton's compiler may fill with its messages."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"]
    asked = json.dumps([list(names), list(architectures)])
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kernels are not compiled: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def main() -> None:
    """The process of `check_kernels`: names and architectures on standard input, what is wrong on standard output."""
    from ...backend.kernels.catalog import KERNELS

    names, architectures = json.loads(sys.stdin.read())
    found = {}
    for kernel in (each for each in KERNELS if (each.name in names if names else each.meets)):
        wrong = (
            (architecture, what_is_wrong(kernel, architecture))
            for architecture in architectures
            if architecture >= kernel.least_architecture
        )
        found[kernel.name] = next((f"sm_{architecture}: {words}" for architecture, words in wrong if words), "")
    json.dump(found, sys.stdout)
