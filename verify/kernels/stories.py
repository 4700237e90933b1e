"""One call of each kernel, and how many bits of its results are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...backend.kernels import catalog
from ...backend.kernels.variable import unit_of
from .case import Case
from .oracle import Sum, beyond, canonical, different_bits, numbers, rms_norm
from .processes import Peer
from .products_story import exact_product

TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
UNWRITTEN = 7
EPS = 1e-5


Story = Callable[[Peer, Case, int], int]
"""One call of a case, numbered: how many bits of its results are wrong."""


def run(
    peer: Peer, case: Case, arguments: Mapping[str, Any], *, reached: Sequence[Tensor] = (), **constants: Any
) -> None:
    """Launches the kernel of a case on the device of the peer's memory; it finds `reached` by addresses in memory."""
    memory, kernel = peer.memory, catalog.kernel(case.kernel)
    places = {"table": memory.table, "pads": memory.pads, "rank": memory.rank, "multicast": memory.multicast}
    peer.launch(
        kernel,
        case.num_blocks,
        {**{name: value for name, value in places.items() if name in kernel.function.arg_names}, **arguments},
        {"WORLD": case.world_size, "BLOCK": case.block, **constants},
        reached,
    )


def share(peer: Peer, values: Tensor, at: int = 0) -> None:
    """Writes `values` into this rank's buffer, from byte `at` on."""
    flat = values.contiguous().view(-1)
    peer.memory.own[at : at + flat.numel() * flat.element_size()].view(flat.dtype).copy_(flat)


def unwritten(peer: Peer, n: int, dtype: torch.dtype) -> Tensor:
    """A result that no kernel has written yet."""
    return torch.full((n,), UNWRITTEN, dtype=dtype, device=peer.memory.own.device)


def here(peer: Peer, values: Tensor) -> Tensor:
    """`values` where the peer's kernels can read them."""
    return values.to(peer.memory.own.device)


def share_leaves(peer: Peer, case: Case, call: int, n: int, multiple: int = 1) -> tuple[Tensor, dict[str, Any]]:
    """Shares this rank's nodes of a sum of `n` elements, each of which takes a `multiple` of them; the canonical sum of
    all leaves, and the sum's constants."""
    num_leaves = case.leaves or case.world_size
    leaves = [numbers((call, leaf, n), n, case.type) for leaf in range(num_leaves)]
    tree = Sum(num_leaves, case.world_size)
    shipped = tree.shipped(leaves, peer.memory.rank)
    nodes = padded(shipped.view(len(tree.nodes[peer.memory.rank]), n), multiple)  # also where a call has no tokens
    share(peer, nodes if case.leaves else nodes.to(case.type))
    constants = {
        "NODES": tuple(len(nodes) for nodes in tree.nodes),
        "MERGES": tree.merges,
        "LEAF": tl.float32 if case.leaves else TYPES[case.dtype],
    }
    return canonical(leaves), constants


def padded(rows: Tensor, multiple: int) -> Tensor:
    """Rows that take a multiple of elements each."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % multiple))


def all_gather(peer: Peer, case: Case, call: int) -> int:
    """The parts of all ranks one after the other."""
    parts = [numbers((call, rank, case.n), case.n, case.type) for rank in case.ranks]
    share(peer, parts[peer.memory.rank])
    out = unwritten(peer, case.world_size * case.n, case.type)
    run(peer, case, {"out": out, "n": case.n})
    return different_bits(out, torch.cat(parts))


def reduce_scatter(peer: Peer, case: Case, call: int) -> int:
    """This rank's part of the canonical sum."""
    total, constants = share_leaves(peer, case, call, case.world_size * case.n)
    out = unwritten(peer, case.n, case.type)
    run(peer, case, {"out": out, "n": case.n}, **constants)
    first = peer.memory.rank * case.n
    return different_bits(out, total[first : first + case.n].to(case.type))


def all_reduce(peer: Peer, case: Case, call: int) -> int:
    """The canonical sum, whole."""
    total, constants = share_leaves(peer, case, call, case.n)
    out = unwritten(peer, case.n, case.type)
    run(peer, case, {"out": out, "n": case.n}, **constants)
    return different_bits(out, total.to(case.type))


def exact_all_reduce_multicast(peer: Peer, case: Case, call: int) -> int:
    """The canonical sum, whole; nodes take multiples of 16 elements."""
    total, constants = share_leaves(peer, case, call, case.n, multiple=16)
    out = unwritten(peer, case.n, case.type)
    run(peer, case, {"out": out, "n": case.n}, **constants)
    return different_bits(out, total.to(case.type))


def whole_numbers(case: Case, call: int, n: int) -> list[Tensor]:
    """What each rank shares of a sum that the switch makes: numbers whose sum is the same in every order."""
    return [(numbers((call, rank, n), n, torch.float32) % 8).floor().to(case.type) for rank in case.ranks]


def all_reduce_multicast(peer: Peer, case: Case, call: int) -> int:
    """A sum by the switch, whole."""
    values = whole_numbers(case, call, case.n)
    share(peer, values[peer.memory.rank])
    out = unwritten(peer, case.n, case.type)
    run(peer, case, {"out": out, "n": case.n})
    return different_bits(out, torch.stack(values).sum(0))


def reduce_scatter_multicast(peer: Peer, case: Case, call: int) -> int:
    """This rank's part of a sum by the switch; parts take multiples of 16 bytes."""
    values = [each.view(case.world_size, case.n) for each in whole_numbers(case, call, case.world_size * case.n)]
    share(peer, padded(values[peer.memory.rank], 16 // case.type.itemsize))
    out = unwritten(peer, case.n, case.type)
    run(peer, case, {"out": out, "n": case.n})
    return different_bits(out, torch.stack(values).sum(0)[peer.memory.rank])


def token_counts(case: Case, call: int) -> list[int]:
    """How many of `case.n` tokens each rank has: all, some, or none."""
    return [(case.n * (rank + call)) % 4 * case.n // 3 for rank in case.ranks]


def gather_rows(peer: Peer, case: Case, call: int) -> int:
    """Three tensors: hidden states of `width`, one fp32 probability a token, and three bytes."""
    counts = token_counts(case, call)
    widths, types = (case.width, 1, 3), (case.type, torch.float32, torch.uint8)
    rows = [
        [
            (numbers((call, rank, part, case.n), count * width, torch.float32) * 16).to(dtype)
            for rank, count in enumerate(counts)
        ]
        for part, (width, dtype) in enumerate(zip(widths, types, strict=True))
    ]
    outs = [unwritten(peer, sum(counts) * width, dtype) for width, dtype in zip(widths, types, strict=True)]
    table, begin = [], 0
    for part, (out, width) in enumerate(zip(outs, widths, strict=True)):
        table.append([begin, width * out.element_size(), out.data_ptr()])
        share(peer, rows[part][peer.memory.rank], at=begin)
        begin += -(-max(counts) * width * out.element_size() // 16) * 16
    run(
        peer,
        case,
        {"tensors": here(peer, torch.tensor(table)), "counts": here(peer, torch.tensor(counts, dtype=torch.int32))},
        reached=outs,
        UNITS_OF=tuple(unit_of(row_bytes) for _, row_bytes, _ in table),
    )
    return sum(different_bits(out, torch.cat(parts)) for out, parts in zip(outs, rows, strict=True))


def reduce_scatter_rows(peer: Peer, case: Case, call: int) -> int:
    """The canonical sum of this rank's tokens."""
    counts, rank = token_counts(case, call), peer.memory.rank
    total, constants = share_leaves(peer, case, call, sum(counts) * case.width)
    out = unwritten(peer, counts[rank] * case.width, case.type)
    run(
        peer,
        case,
        {"out": out, "counts": here(peer, torch.tensor(counts, dtype=torch.int32)), "width": case.width},
        **constants,
    )
    first = sum(counts[:rank]) * case.width
    return different_bits(out, total[first : first + out.numel()].to(case.type))


def add_norm_gather(peer: Peer, case: Case, call: int) -> int:
    """The new residual to the bit; the norm of all tokens against fp64, and equal on all ranks is what gathers do."""
    tokens, hidden = case.n, case.width
    total, constants = share_leaves(peer, case, call, tokens * hidden)
    residual = numbers((call, 99, tokens), tokens * hidden, case.type)
    weight = numbers((98, hidden), hidden, case.type)
    leaf = torch.float32 if case.leaves else case.type
    new = (total.to(leaf).float() + residual.float()).to(case.type).view(tokens, hidden)
    rows = -(-tokens // case.world_size)
    own = slice(min(tokens, peer.memory.rank * rows), min(tokens, (peer.memory.rank + 1) * rows))
    shard = here(peer, residual.view(tokens, hidden)[own].clone())
    out = unwritten(peer, tokens * hidden, case.type)
    run(
        peer,
        case,
        {"residual": shard, "weight": here(peer, weight), "out": out, "tokens": tokens, "hidden": hidden, "eps": EPS},
        **constants,
    )
    return different_bits(shard, new[own]) + beyond(out.cpu().view(tokens, hidden), rms_norm(new, weight, EPS))


STORIES: dict[str, Story] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce_one_shot": all_reduce,
    "all_reduce_two_shot": all_reduce,
    "gather_rows": gather_rows,
    "reduce_scatter_rows": reduce_scatter_rows,
    "add_norm_gather": add_norm_gather,
    "all_gather_multicast": all_gather,
    "all_reduce_multicast": all_reduce_multicast,
    "reduce_scatter_multicast": reduce_scatter_multicast,
    "exact_all_reduce_multicast": exact_all_reduce_multicast,
    "add_norm_gather_multicast": add_norm_gather,
    "exact_product": exact_product,
}
