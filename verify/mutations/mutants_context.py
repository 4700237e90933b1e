"""Attention under context parallelism, and its heads: keys that come from elsewhere, stale or without their sums."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...backend.launching.launch import private_folder
from ...backend.model import attention_core, attention_exchange
from ...backend.model.attention_blocks import Block
from ...backend.model.attention_core import AttentionCore
from ...backend.tensor_parallel import LayerContext
from ...core.layout.layout import Layout
from ...core.plan.runtime import Runtime
from ..ledger.ledger import ACTIVATION, ACTIVATION_GRADIENT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import tiny

if TYPE_CHECKING:
    from torch import Tensor

    from ...backend.base.microbatch import Microbatch
    from ...backend.transport.base import Group
    from ...core.plan.plan import Plan


def keeps_the_block_before(patches: Patches) -> None:
    """In a backward the last step of the ring uses the keys and values that came in the step before it."""
    inside = threading.local()

    def record_backward(original: Function) -> Function:
        def recorded(*given: object) -> None:
            inside.backward = True
            original(*given)

        return recorded

    def ring(original: Function) -> Function:
        def blocks(group: Group, own: object) -> object:
            found = original(group, own)
            if inside.__dict__.pop("backward", False):
                last, before = (group.rank + 1) % group.size, (group.rank + 2) % group.size
                found[last] = found[before]
            return found

        return blocks

    patches.replace(AttentionCore, "record_backward", record_backward)
    patches.replace(attention_exchange, "_ring_gather", ring)


def forgets_the_window(patches: Patches) -> None:
    """Blocks of queries do not know how many keys they may see."""
    patches.replace(Block, "mask", lambda original: lambda block, *given, window: original(block, *given))


def does_not_wait_for_key_gradients(patches: Patches) -> None:
    """The gradients of keys go on to their norm before those of other ranks have come."""

    def scattered(original: Function) -> Function:
        def own(context: LayerContext, sums: Any, dtype: torch.dtype) -> object:
            nodes = [sums.tree.value(node).clone() for node in sums.tree.nodes]
            found = original(context, sums, dtype)
            keys = found.shape[-1] // 2
            found[..., :keys] = 0
            for node in nodes:
                whole = torch.nn.functional.pad(node, (0, 0, 0, context.chunks.num_items - node.shape[2]))
                found[..., :keys] += torch.cat([whole[:, :, lo:hi, :keys] for lo, hi in context.chunks.spans], 2)
            return found

        return own

    patches.replace(attention_core, "scattered", scattered)


def gathers_along_heads(patches: Patches) -> None:
    """Keys and values of all ranks are put together along the dimension of heads, and read as if along the sequence."""

    def gathered(original: Function) -> Function:
        def joined(context: Any, parts: Any) -> Any:
            own = torch.cat(list(parts), -1)
            whole = torch.cat(context.cp.all_gather(own), 1).reshape(*own.shape[:2], -1, own.shape[3])
            return [part.contiguous() for part in whole.split([part.shape[-1] for part in parts], -1)]

        return joined

    patches.replace(attention_core, "gathered", gathered)


def joins_chunks_in_order_of_ranks(patches: Patches) -> None:
    """Keys and values are put together rank by rank, though each has an early and a late chunk of the sequence."""

    def gathered(original: Function) -> Function:
        def joined(context: Any, parts: Any) -> Any:
            whole = torch.cat(context.cp.all_gather(torch.cat(list(parts), -1)), 2)
            return [part.contiguous() for part in whole.split([part.shape[-1] for part in parts], -1)]

        return joined

    patches.replace(attention_core, "gathered", gathered)


def takes_one_level_for_the_other(patches: Patches) -> None:
    """Heads are exchanged between the ranks that should exchange keys and values, and these between neighbours."""
    patches.replace(
        Layout, "context_groups_of", lambda original: lambda layout, global_rank: original(layout, global_rank)[::-1]
    )


def joins_neighbours_in_order_of_ranks(patches: Patches) -> None:
    """The tokens of neighbours are put together rank by rank, though each has an early and a late chunk."""
    patches.replace(attention_exchange, "in_order", lambda original: lambda pieces, dim: torch.cat(list(pieces), dim))


def counts_places_of_its_own(patches: Patches) -> None:
    """Positions go by the token among those of this context-parallel rank."""
    patches.replace(LayerContext, "places", lambda original: lambda context: torch.arange(len(original(context))))


def does_not_transpose_heads(patches: Patches) -> None:
    """The result of attention, head by head, is read as if it lay token by token."""

    def forward(original: Function) -> Function:
        def attended(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor) -> object:
            y = original(core, q, k, v)
            samples, heads, tokens, width = y.shape
            return y.reshape(samples, tokens, heads, width).transpose(1, 2)

        return attended

    patches.replace(AttentionCore, "forward", forward)


def forgets_where_documents_begin(patches: Patches) -> None:
    """The positions of the later one of a rank's two chunks of packed documents count from the
    beginning of the sequence."""

    def positions(original: Function) -> Function:
        def counted(context: LayerContext, microbatch: Microbatch) -> object:
            found, half = original(context, microbatch), context.chunks.size
            return torch.cat([found[:, :half], context.places()[half:].expand(len(found), -1)], 1)

        return counted

    patches.replace(LayerContext, "positions", positions)


@functools.cache
def _documents() -> Path:
    """A folder of short documents, of which a sequence has several; it goes with the process."""
    folder = private_folder("documents-")
    for number in range(100):
        Path(folder, f"{number:03}.txt").write_text(f"{number:03} sheep go")
    return folder


def _context() -> Plan:
    return tiny(tp=2, cp=2, model={"qk_norm": True, "sliding_window": 6})


MUTANTS = (
    Mutant(
        "MR19",
        "one step of the ring of a backward uses a stale block of keys and values",
        "NVIDIA/Megatron-LM#1464",
        plan=lambda: tiny(cp=3, sequence=24, sections={"runtime": Runtime(context_parallel="ring")}),
        breaks=keeps_the_block_before,
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.attention.norm", ("other values",), ("B",)),
    ),
    Mutant(
        "MR20",
        "an optional argument of attention (here its window) is not handed on where sequences are cut",
        "NVIDIA/TransformerEngine#3551",
        plan=_context,
        breaks=forgets_the_window,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "MR21",
        "the backward of the keys' norm runs before the exchange of its gradient is over",
        "ByteDance-Seed/VeOmni#419",
        plan=_context,
        breaks=does_not_wait_for_key_gradients,
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.attention.norm", ("missing",), ("B",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "LY01",
        "heads are reshaped without a transpose",
        "deepspeedai/DeepSpeed#5664",
        plan=_context,
        breaks=does_not_transpose_heads,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "LY02",
        "keys and values are gathered along the heads in place of the sequence",
        "pytorch/torchtitan#3206",
        plan=_context,
        breaks=gathers_along_heads,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "LY02-b",
        "keys and values are joined rank by rank, and chunks lie otherwise on ranks",
        "pytorch/torchtitan#3206",
        plan=_context,
        breaks=joins_chunks_in_order_of_ranks,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "LY04-b",
        "rotary positions count a rank's own tokens where sequences are cut",
        "NVIDIA/Megatron-LM#5243",
        plan=_context,
        breaks=counts_places_of_its_own,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "LY04",
        "rotary positions of packed documents lose the document's offset in one of a rank's chunks",
        "NVIDIA/Megatron-LM#5243",
        plan=lambda: tiny(cp=2, train={"packed": True, "data": str(_documents())}),
        breaks=forgets_where_documents_begin,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1)),
    ),
    Mutant(
        "XX40",
        "heads are exchanged for tokens in a group that is not the one of neighbours",
        "sgl-project/sglang#33353",
        plan=lambda: tiny(cp=4, cp_inner=2, sequence=32),
        breaks=takes_one_level_for_the_other,
        # the last queries of rank 0 see all keys, in another order
        expected=Expected(ACTIVATION, "layers.0.attention", ("order only", "other values"), ("F",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "XX41",
        "after heads have been exchanged tokens lie as ranks do, and not as chunks",
        "feifeibear/long-context-attention#53",
        plan=lambda: tiny(cp=2, cp_inner=2),
        breaks=joins_neighbours_in_order_of_ranks,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1)),
    ),
)
