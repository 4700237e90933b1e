"""Cases of every kernel: what each floor runs on processes that share memory, with an oracle in torch.

A case calls its kernel several times, one call right after the other without waiting for peers on the host, a rank
slower than the others where it says so; the oracle knows what every rank shared, because numbers come from seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...backend.kernels import catalog
from ...core.base.reduction import merges_of
from .processes import Peer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """`calls` calls of a kernel over elements of `dtype`, `n` of them a rank, by `num_blocks` blocks of `block`."""

    kernel: str
    world_size: int
    dtype: str
    n: int
    block: int = 64
    num_blocks: int = 2
    calls: int = 3
    slow_rank: int | None = None

    def __str__(self) -> str:
        slow = "" if self.slow_rank is None else f"-slow{self.slow_rank}"
        return f"{self.kernel}-w{self.world_size}-{self.dtype}-{self.n}of{self.block}x{self.num_blocks}{slow}"


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case: bits of its results that differ from the oracle's, values left in its pad."""

    wrong_bits: int
    signals_left: int

    @property
    def right(self) -> bool:
        """No bit differs and no signal is left."""
        return self == Outcome(0, 0)


Story = Callable[[Peer, Case, int], tuple[Tensor, Tensor]]
"""One call of a case: what the kernel made and what the oracle makes."""


def run_case(peer: Peer, case: Case) -> Outcome:
    """The job of a case, in a peer."""
    wrong = 0
    for call in range(case.calls):
        if peer.memory.rank == case.slow_rank:
            time.sleep(0.02)
        got, want = STORIES[case.kernel](peer, case, call)
        wrong += different_bits(got, want)
    return Outcome(wrong, int(peer.ground.own_pad.count_nonzero()))


def different_bits(got: Tensor, want: Tensor) -> int:
    """How many bits two tensors of equal shape and type differ in."""
    assert got.shape == want.shape and got.dtype == want.dtype
    bits = torch.bitwise_xor(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    return sum(int((bits >> place & 1).sum()) for place in range(8))


def numbers(seed: tuple[int, ...], n: int, dtype: torch.dtype) -> Tensor:
    """`n` numbers of very different size, so that a sum in another order has other bits."""
    state = 0
    for part in seed:
        state = state * 1_000_003 + part + 1
    generator = torch.Generator().manual_seed(state % (1 << 62))
    scale = torch.exp2(torch.randint(-8, 8, (n,), generator=generator).float())
    return (torch.randn(n, generator=generator) * scale).to(dtype)


def canonical(leaves: list[Tensor]) -> Tensor:
    """The canonical sum in fp32: a left part that is the largest power of two below the whole, then the rest."""
    if len(leaves) == 1:
        return leaves[0].float()
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return canonical(leaves[:left]) + canonical(leaves[left:])


def share(peer: Peer, values: Tensor) -> None:
    """Writes `values` to the begin of this rank's buffer."""
    peer.memory.own[: values.numel() * values.element_size()].view(values.dtype).copy_(values)


def launch(peer: Peer, case: Case, out: Tensor, **constants: object) -> Tensor:
    """Runs the kernel of a case with the arguments that most have; `out` comes back."""
    memory = peer.memory
    peer.ground.begin()
    peer.launch(
        catalog.kernel(case.kernel),
        case.num_blocks,
        {"table": memory.table, "pads": memory.pads, "out": out, "n": case.n, "rank": memory.rank},
        {"WORLD": memory.world_size, "BLOCK": case.block, **constants},
    )
    return out


def triton_type(dtype: torch.dtype) -> object:
    """The type's name in Triton, for a constant of a kernel."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def one_leaf_each(case: Case) -> dict[str, object]:
    """The constants of a sum to which every rank ships one leaf."""
    leaves = [(rank, rank + 1) for rank in range(case.world_size)]
    merges = merges_of(case.world_size, leaves)
    return {"NODES": (1,) * case.world_size, "MERGES": merges, "LEAF": triton_type(DTYPES[case.dtype])}


def gathered(peer: Peer, case: Case, call: int) -> tuple[Tensor, Tensor]:
    """All-gather: the parts of all ranks one after the other."""
    dtype = DTYPES[case.dtype]
    parts = [numbers((call, rank, case.n), case.n, dtype) for rank in range(case.world_size)]
    share(peer, parts[peer.memory.rank])
    return launch(peer, case, torch.full((case.world_size * case.n,), 7.0, dtype=dtype)), torch.cat(parts)


def scattered(peer: Peer, case: Case, call: int) -> tuple[Tensor, Tensor]:
    """Reduce-scatter: this rank's part of the canonical sum."""
    dtype, rank = DTYPES[case.dtype], peer.memory.rank
    wholes = [numbers((call, other, case.n), case.world_size * case.n, dtype) for other in range(case.world_size)]
    share(peer, wholes[rank])
    got = launch(peer, case, torch.full((case.n,), 7.0, dtype=dtype), **one_leaf_each(case))
    return got, canonical([whole[rank * case.n : (rank + 1) * case.n] for whole in wholes]).to(dtype)


def reduced(peer: Peer, case: Case, call: int) -> tuple[Tensor, Tensor]:
    """All-reduce: the canonical sum, whole."""
    dtype = DTYPES[case.dtype]
    wholes = [numbers((call, other, case.n), case.n, dtype) for other in range(case.world_size)]
    share(peer, wholes[peer.memory.rank])
    got = launch(peer, case, torch.full((case.n,), 7.0, dtype=dtype), **one_leaf_each(case))
    return got, canonical(wholes).to(dtype)


STORIES: dict[str, Story] = {
    "all_gather": gathered,
    "reduce_scatter": scattered,
    "all_reduce_one_shot": reduced,
}


def cases_of(kernel: str, world_size: int, *, block: int = 64, num_blocks: int = 2) -> tuple[Case, ...]:
    """Sizes about the edges of blocks and of 16 bytes, both types, and one slow rank."""
    edge = block * num_blocks
    sizes = (1, 8, block - 1, block, block + 1, edge, edge + 8, 2 * edge + 3)
    found = [Case(kernel, world_size, dtype, n, block, num_blocks, calls=2) for dtype in DTYPES for n in sizes]
    slow = Case(kernel, world_size, "bf16", edge + 8, block, num_blocks, calls=4, slow_rank=world_size - 1)
    return (*found, slow)
