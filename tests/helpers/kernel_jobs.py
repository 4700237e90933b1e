"""Jobs for peers of `verify.kernels.processes`: small kernels of their own, and launchers that spoil a kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from shardproof.backend.kernels.kernel import Kernel
from shardproof.backend.kernels.meet import meet_at_entry, meet_at_exit
from shardproof.backend.kernels.peers import buffer_of
from shardproof.verify.kernels.case import Case
from shardproof.verify.kernels.cases import Outcome, run_case
from shardproof.verify.kernels.compiling import code_of_launch
from shardproof.verify.kernels.processes import Peer


@triton.jit
def convert(source, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(source + lane).to(out.dtype.element_ty))


@triton.jit
def add(source, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(source + lane) + tl.load(source + lane))


@triton.jit
def product(a, b, out, k, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, k, BLOCK):
        total = tl.dot(tl.load(a + row * k + first + column), tl.load(b + (first + row) * BLOCK + column), total)
    tl.store(out + row * BLOCK + column, total)


@triton.jit
def gather_without_meeting(
    table: tl.uint64, pads: tl.uint64, out, n: tl.int64, rank: tl.int32, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        for peer in tl.static_range(WORLD):
            values = tl.load(buffer_of(table, peer, out.dtype.element_ty) + first + lane, mask=lane < n - first)
            tl.store(out + peer * n + first + lane, values, mask=lane < n - first)
        first += tl.num_programs(0) * BLOCK


def converted(peer: Peer, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(source.shape, dtype=dtype)
    _launch(peer, convert, {"source": source, "out": out}, {"N": source.numel()})
    return out


def added(peer: Peer, source: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(source)
    _launch(peer, add, {"source": source, "out": out}, {"N": source.numel()})
    return out


def multiplied(peer: Peer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(b.shape[1], b.shape[1])
    _launch(peer, product, {"a": a, "b": b, "out": out, "k": a.shape[1]}, {"BLOCK": b.shape[1]})
    return out


def run_case_unless(peer: Peer, case: Case, absent: int, how: str) -> Outcome | None:
    """A case to which rank `absent` does not come: it returns, raises or ends."""
    if peer.memory.rank != absent:
        return run_case(peer, case)
    if how == "raises":
        raise ValueError("a job of rank 1")
    if how == "ends":
        time.sleep(0.1)
        os._exit(1)
    return None


def run_case_added_in_sequence(peer: Peer, case: Case) -> Outcome:
    """Adds the leaves from left to right instead of by the canonical tree."""

    def launch(
        kernel: Kernel, num_blocks: int, arguments: Mapping[str, Any], constants: Mapping[str, Any], *rest: Any
    ) -> None:
        merges = (0, *(1 for _ in constants["MERGES"][1:]))
        peer.launch(kernel, num_blocks, arguments, {**constants, "MERGES": merges}, *rest)

    return run_case(replace(peer, launch=launch), case)


def run_case_without_meeting(peer: Peer, case: Case) -> Outcome:
    """An all-gather that waits for nobody."""

    def launch(
        kernel: Kernel, num_blocks: int, arguments: Mapping[str, Any], constants: Mapping[str, Any], *rest: Any
    ) -> None:
        peer.launch(replace(kernel, function=gather_without_meeting), num_blocks, arguments, constants, *rest)

    return run_case(replace(peer, launch=launch), case)


def texts_of(peer: Peer, case: Case) -> list[str]:
    """The PTX of every launch of a case, which is not carried out."""
    found = []

    def launch(
        kernel: Kernel, num_blocks: int, arguments: Mapping[str, Any], constants: Mapping[str, Any], *rest: Any
    ) -> None:
        found.append(code_of_launch(kernel, arguments, constants, kernel.executed_architecture).ptx)

    run_case(replace(peer, launch=launch), case)
    return found


def process_of(peer: Peer) -> int:
    return os.getpid()


def _launch(peer: Peer, function: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    peer.launch(Kernel("job", function, ("interpreted",), exact=True), 1, arguments, constants)


def converted_beyond(peer: Peer, source: torch.Tensor) -> torch.Tensor:
    """Reads 16 elements where there are fewer."""
    out = torch.empty(16)
    _launch(peer, convert, {"source": source, "out": out}, {"N": 16})
    return out


@triton.jit
def sum_by_switch(
    table: tl.uint64,
    pads: tl.uint64,
    window: tl.uint64,
    out,
    rank: tl.int32,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """16 bytes a lane: the sum of all ranks' buffers, one of whose results the switch gives."""
    meet_at_entry(pads, rank, WORLD)
    lane = tl.arange(0, BLOCK)
    a, b, c, d = tl.inline_asm_elementwise(
        "multimem.ld_reduce.relaxed.sys.global.add" + KIND + " {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [window + lane.to(tl.uint64) * 16],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )
    words = out.to(tl.pointer_type(tl.uint32), bitcast=True) + lane * 4
    tl.store(words, a)
    tl.store(words + 1, b)
    tl.store(words + 2, c)
    tl.store(words + 3, d)
    meet_at_exit(pads, rank, WORLD)


LANES = 64


def own_values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    num = LANES * 16 // dtype.itemsize
    return torch.randn(num, generator=torch.Generator().manual_seed(7 + rank)).to(dtype)


def multicast_sum(peer: Peer, dtype: torch.dtype) -> torch.Tensor:
    """The sum of `own_values` of all ranks."""
    memory = peer.memory
    values = own_values(memory.rank, dtype)
    memory.own[: values.nbytes].view(dtype).copy_(values)
    out = torch.zeros_like(values)
    kind = ".acc::f32.v4.bf16x2" if dtype == torch.bfloat16 else ".v4.f32"
    arguments = {"table": memory.table, "pads": memory.pads, "window": memory.multicast, "out": out}
    constants = {"WORLD": memory.world_size, "KIND": kind, "BLOCK": LANES}
    _launch(peer, sum_by_switch, {**arguments, "rank": memory.rank}, constants)
    return out


@triton.jit
def multiply_and_add(a, b, c, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(a + lane) * tl.load(b + lane) + tl.load(c + lane))


def multiplied_and_added(peer: Peer, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """a * b + c of an exact kernel, and of one that may be contracted."""
    outs = [torch.zeros_like(c) for _ in range(2)]
    for out, exact in zip(outs, (True, False), strict=True):
        kernel = Kernel("job", multiply_and_add, ("PTX executed",), exact=exact)
        peer.launch(kernel, 1, {"a": a, "b": b, "c": c, "out": out}, {"N": c.numel()})
    return outs


@triton.jit
def turn_through_memory(scratch, out, N: tl.constexpr, WAITS: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(scratch + lane, lane)
    if WAITS:
        tl.debug_barrier()
    tl.store(out + lane, tl.load(scratch + N - 1 - lane))


def turned_through_memory(peer: Peer, waits: bool) -> torch.Tensor:
    """Numbers in the opposite order, each read from where another thread wrote it."""
    scratch, out = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    _launch(peer, turn_through_memory, {"scratch": scratch, "out": out}, {"N": 128, "WAITS": waits})
    return out
