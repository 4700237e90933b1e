"""Leaf sizes: which pieces of a tensor a canonical sum is made of, and which pieces a rank owns.

They follow from the model, the sequence and the `[numerics]` section alone, never from the layout; only fast numerics,
which sum in no fixed order, make them fine enough for degrees above `MAX_DEGREE` when the layout has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..base.errors import LayoutError
from ..base.reduction import Node, cut, maximal_nodes
from ..model.model import ModelSpec
from ..model.operators import Feature
from ..model.parameters import Parameter
from .chunks import Chunks
from .layout import Layout

MAX_DEGREE = 8
"""Default blocks admit every tensor-parallel degree up to this one that divides the heads."""

BLOCK_KEYS = {"num_kv_heads": "head_block", "ffn_hidden_size": "ffn_block", "vocab_size": "vocab_block"}
"""The key of `[numerics]` that says how long a leaf of a size of the model is."""


@dataclass(frozen=True)
class Leaves:
    """`num_items` items in blocks of `block`; the last block may be shorter, in every layout the same."""

    num_items: int
    block: int

    @property
    def num_leaves(self) -> int:
        """Number of blocks."""
        return -(-self.num_items // self.block)

    def items(self, lo_leaf: int, hi_leaf: int) -> tuple[int, int]:
        """The items `[lo, hi)` of an interval of leaves."""
        return min(lo_leaf * self.block, self.num_items), min(hi_leaf * self.block, self.num_items)

    def owned(self, tp: int, tp_rank: int) -> tuple[int, int]:
        """The leaves `[lo, hi)` of a tensor-parallel rank."""
        return cut(self.num_leaves, tp, tp_rank)

    def owned_items(self, tp: int, tp_rank: int) -> tuple[int, int]:
        """The items `[lo, hi)` of a tensor-parallel rank."""
        return self.items(*self.owned(tp, tp_rank))


@dataclass(frozen=True)
class LeafSizes:
    """Resolved leaf sizes of one problem, as written into every ledger."""

    heads: Leaves
    ffn: Leaves
    vocab: Leaves
    gradient_token_block: int
    reduction_token_block: int
    expert_ffn: Leaves | None = None
    shared_ffn: Leaves | None = None

    def feature(self, feature: Feature) -> Leaves:
        """Leaves of a feature axis, which the model must have."""
        leaves: Leaves | None = getattr(self, feature)
        assert leaves is not None, f"the model has no {feature}"
        return leaves

    def tokens(self, sequence: int) -> Leaves:
        """The blocks of a sequence that norms and biases sum over."""
        return Leaves(sequence, self.reduction_token_block)

    def head_sums(self, sequence: int) -> int:
        """Leaves of the sums over heads and tokens that norms of query and key heads have, whatever a leaf of the heads
        is elsewhere: leaf `head * blocks + block`."""
        return self.heads.num_items * self.tokens(sequence).num_leaves

    def nodes_of(
        self, known: Literal["tokens", "heads"], sequence: int, tp: int, tp_rank: int, *, cp: int = 1, cp_rank: int = 0
    ) -> tuple[Node, ...]:
        """The nodes that a rank computes of the tree over a sequence's blocks of tokens, from its own tokens, or of the
        tree over heads and tokens, from its own heads. A context-parallel rank has its chunks of the tokens."""
        blocks = Chunks(self.tokens(sequence).num_leaves, cp, cp_rank)
        if known == "tokens":
            return blocks.nodes(*cut(blocks.num_own, tp, tp_rank))
        spans: list[tuple[int, int]] = []
        for head in range(*self.heads.owned_items(tp, tp_rank)):
            for lo, hi in blocks.spans:
                first, last = head * blocks.num_items + lo, head * blocks.num_items + hi
                spans[-1:] = [(spans[-1][0], last)] if spans and spans[-1][1] == first else [*spans[-1:], (first, last)]
        return tuple(node for span in spans for node in maximal_nodes(self.head_sums(sequence), *span))

    def local_slices(self, parameter: Parameter, tp: int, tp_rank: int) -> tuple[slice, ...]:
        """The slice of the full parameter, which is no expert's, that a tensor-parallel rank holds."""
        slices = [slice(0, size) for size in parameter.shape]
        if parameter.cut is not None:
            dim, feature = parameter.cut
            lo, hi = self.feature(feature).owned_items(tp, tp_rank)
            slices[dim] = slice(lo * parameter.unit, hi * parameter.unit)
        return tuple(slices)

    def expert_slices(
        self, parameter: Parameter, *, ep: int, ep_rank: int, etp: int, etp_rank: int
    ) -> tuple[slice, ...]:
        """The slice of an expert parameter that a rank holds: its experts, and of each its part over
        expert tensor parallelism."""
        slices = [slice(*cut(parameter.shape[0], ep, ep_rank)), *(slice(0, size) for size in parameter.shape[1:])]
        if parameter.cut is not None:
            dim, feature = parameter.cut
            lo, hi = self.feature(feature).owned_items(etp, etp_rank)
            slices[dim] = slice(lo * parameter.unit, hi * parameter.unit)
        return tuple(slices)

    def check(self, tp: int) -> None:
        """Raises `LayoutError` when `tp` ranks cannot each own whole leaves."""
        problems = []
        for name, leaves in (("num_kv_heads", self.heads), ("ffn_hidden_size", self.ffn), ("vocab_size", self.vocab)):
            if leaves.num_leaves < tp:
                remedy = f" or numerics.{BLOCK_KEYS[name]} <= {max(1, leaves.num_items // tp)}"
                problems.append(
                    f"tp={tp} cuts {name}={leaves.num_items} inside a leaf of {leaves.block}: there are only "
                    f"{leaves.num_leaves} leaves. "
                    f"Use tp <= {leaves.num_leaves}{remedy}."
                )
        if problems:
            raise LayoutError(problems)


def degree_to_admit(mode: str, layout: Layout) -> int:
    """The largest tensor-parallel degree that leaf sizes must admit: that of the layout where numerics are
    fast and it is larger."""
    return MAX_DEGREE if mode == "exact" else max(MAX_DEGREE, layout.tp, layout.expert_tp)


def leaf_sizes(
    model: ModelSpec,
    sequence: int,
    *,
    head_block: int | None = None,
    ffn_block: int | None = None,
    vocab_block: int | None = None,
    gradient_token_block: int | None = None,
    reduction_token_block: int | None = None,
    max_degree: int = MAX_DEGREE,
) -> LeafSizes:
    """Leaf sizes with defaults filled in: one key/value group per head leaf, ffn and vocabulary blocks that admit every
    degree up to `max_degree` that divides the key/value heads, blocks of experts that admit every such degree that
    divides their width, and blocks of tokens for sums over them that leave eight or more in a sequence."""
    widths = (model.num_kv_heads, model.ffn_hidden_size, model.vocab_size)
    experts = model.expert_width if model.is_moe else None
    shared = model.shared_expert_width if model.num_shared_experts else None
    token_blocks = (gradient_token_block, reduction_token_block)
    return _leaf_sizes(
        widths, experts, shared, sequence, (head_block, ffn_block, vocab_block), token_blocks, max_degree
    )


@lru_cache(maxsize=256)
def _leaf_sizes(
    widths: tuple[int, int, int],
    expert_width: int | None,
    shared_width: int | None,
    sequence: int,
    own_blocks: tuple[int | None, int | None, int | None],
    token_blocks: tuple[int | None, int | None],
    max_degree: int,
) -> LeafSizes:
    """Those of so many heads, and of layers and a table of such widths; kept, because a search asks for few again and
    again."""
    (num_heads, ffn_width, vocab_size), (head_block, ffn_block, vocab_block) = widths, own_blocks

    def parts(number: int) -> int:
        return math.lcm(*(degree for degree in range(1, max_degree + 1) if number % degree == 0))

    def blocks(width: int, block: int | None) -> Leaves:
        return Leaves(width, block or -(-width // parts(num_heads)))

    gradient_block, reduction_block = token_blocks[0] or min(128, sequence), token_blocks[1]
    return LeafSizes(
        heads=Leaves(num_heads, head_block or 1),
        ffn=blocks(ffn_width, ffn_block),
        vocab=blocks(vocab_size, vocab_block),
        gradient_token_block=gradient_block,
        reduction_token_block=reduction_block or min(32, gradient_block, max(1, sequence // MAX_DEGREE)),
        expert_ffn=None if expert_width is None else Leaves(expert_width, expert_width // parts(expert_width)),
        shared_ffn=None if shared_width is None else blocks(shared_width, None),
    )
