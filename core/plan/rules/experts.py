"""The rules that tie experts and routers to the rest of a plan; `table` has them in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ...base.divisors import divisors
from ...layout.layout import DEFAULT_ORDER, Layout
from ...layout.leaves import leaf_sizes
from ...layout.microbatches import microbatch_counts
from ...layout.routed_tokens import RoutedTokens
from ...model.model import ModelSpec
from ..batch_sizes import said, sizes_of
from ..sections import Batch, Numerics
from ..train import Train

MAX_NAMED_DEGREE = 64
"""Messages offer degrees up to this one; wider tensor parallelism is nowhere in use."""


def experts_divide(layout: Layout, model: ModelSpec) -> Iterator[str]:
    """ep divides the experts, etp the width of one, tp that of the shared ones; experts lie on the pipeline
    ranks of their attention."""
    if not model.is_moe:
        if layout.ep > 1:
            yield f"ep={layout.ep} spreads experts, but model {model.name} has none (num_experts=0). Use ep=1."
        if layout.expert_tp != layout.tp:
            yield f"etp={layout.etp} cuts experts, but model {model.name} has none (num_experts=0). Leave etp out."
        return
    if model.num_experts % layout.ep:
        legal = divisors(model.num_experts)
        yield (
            f"ep={layout.ep} does not divide num_experts={model.num_experts} (model {model.name}). Use ep among "
            f"{legal}."
        )
    if model.expert_width % layout.expert_tp:
        name = "etp" if layout.etp is not None else "tp"
        yield (
            f"{name}={layout.expert_tp} does not divide expert_ffn_hidden_size={model.expert_width} (model "
            f"{model.name}). "
            f"Use etp among {[degree for degree in divisors(model.expert_width) if degree <= MAX_NAMED_DEGREE]}."
        )
    if model.shared_expert_width % layout.tp:
        yield (
            f"tp={layout.tp} does not divide the shared experts' width {model.shared_expert_width} (model "
            f"{model.name}). Use another tp."
        )
    if _pp_stride(layout, layout.sizes) != _pp_stride(layout, layout.expert_sizes):
        yield (
            f"order={layout.order!r} puts pp before axes that experts cut otherwise, so experts of one layer would "
            "lie on other pipeline "
            f"ranks than its attention. Use order={DEFAULT_ORDER!r}."
        )


def _pp_stride(layout: Layout, sizes: Mapping[str, int]) -> int:
    """Distance of neighbouring pipeline ranks; an axis that the order leaves out varies slowest."""
    before, _, _ = f"{layout.order}-pp".partition("pp")
    return math.prod(sizes[axis] for axis in before.split("-") if axis) if layout.pp > 1 else 1


def experts_see_whole_blocks(numerics: Numerics, layout: Layout, model: ModelSpec, batch: Batch) -> Iterator[str]:
    """Exact gradients of experts have whole token blocks as leaves, so every copy of the experts sees whole blocks."""
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if numerics.mode != "exact" or not model.is_moe or batch.sequence % chunks or model.num_experts % layout.ep:
        return

    def cut_with(block: int | None) -> RoutedTokens:
        sizes = leaf_sizes(
            model, batch.sequence, gradient_token_block=block, reduction_token_block=numerics.reduction_token_block
        )
        return RoutedTokens(
            batch.sequence, layout.tp, layout.cp, True, sizes.gradient_token_block, sizes.reduction_token_block
        )

    tokens = cut_with(numerics.gradient_token_block)
    cut_experts = (
        f"etp*ep={layout.expert_tp * layout.ep} gives the tp={layout.tp} ranks that share a sequence different "
        "copies of the experts"
    )
    idle = [tp_rank for tp_rank in range(layout.tp) if len({*tokens.own(tp_rank)}) == 1]
    if idle and layout.expert_tp * layout.ep % layout.tp:
        yield (
            f"{cut_experts}, but its {batch.sequence // layout.cp} tokens have fewer than {layout.tp} blocks of "
            f"reduction_token_block={tokens.reduction_block}. Use an etp*ep that tp divides, or a smaller block."
        )
    elif piece := tokens.split_piece(layout):
        end = piece.first if piece.first % tokens.gradient_block else piece.last
        finer = range(tokens.gradient_block, 0, -1)
        admitted = next((block for block in finer if cut_with(block).split_piece(layout) is None), 1)
        yield (
            f"{cut_experts}, cut at token {end} inside a block of gradient_token_block={tokens.gradient_block}, a "
            "leaf of their exact "
            f"gradients. Use an etp*ep that tp divides, or numerics.gradient_token_block = {admitted}."
        )


def expert_leaves_admit_etp(numerics: Numerics, layout: Layout, model: ModelSpec) -> Iterator[str]:
    """Every etp rank owns at least one whole leaf of the width of an expert, where numerics are exact."""
    if numerics.mode != "exact" or not model.is_moe or model.expert_width % layout.expert_tp:
        return
    leaves = leaf_sizes(model, 1).feature("expert_ffn")
    if leaves.num_leaves < layout.expert_tp:
        admitted = [degree for degree in divisors(model.expert_width) if degree <= leaves.num_leaves]
        yield (
            f"etp={layout.expert_tp} cuts expert_ffn_hidden_size={model.expert_width} inside a leaf of "
            f"{leaves.block}: there are only "
            f"{leaves.num_leaves} leaves. Use etp among {admitted}."
        )


def routers_exist(train: Train, model: ModelSpec) -> Iterator[str]:
    """Losses, noise and bias of routers are given where there are such."""
    for name in ("router_aux_loss", "router_z_loss", "router_jitter"):
        if (value := getattr(train, name)) and not model.is_moe:
            yield f"{name}={value} is for routers, but model {model.name} has none (num_experts=0). Leave it out."
    if train.expert_bias_rate != Train.expert_bias_rate and not model.expert_bias:
        yield (
            f"expert_bias_rate={train.expert_bias_rate} changes the bias of experts, but model {model.name} has none. "
            "Set model.expert_bias = true, or leave it out."
        )


def experts_see_equal_microbatches(layout: Layout, batch: Batch, model: ModelSpec) -> Iterator[str]:
    """Ranks that send tokens to each other's experts have equally many microbatches."""
    uneven = {
        size: counts
        for size in sizes_of(batch)
        if len(counts := microbatch_counts(size, batch.micro_size, layout.dp)) > 1
    }
    if not model.is_moe or not uneven:
        return
    if not any(len({layout.coordinates(rank)["dp"] for rank in group}) > 1 for group in layout.expert_groups("tp-ep")):
        return
    per_round = batch.micro_size * layout.dp
    if counts := uneven.pop(batch.global_size, ()):
        yield (
            f"etp*ep={layout.expert_tp * layout.ep} spreads experts over data-parallel ranks, which send them tokens "
            "in every "
            f"microbatch, but global={batch.global_size} gives some of the dp={layout.dp} ranks {counts[0]} and "
            f"others {counts[1]} "
            f"microbatches. Use global = {counts[1] * per_round} or {counts[0] * per_round}."
        )
    if uneven:
        yield (
            f"{said(batch, tuple(uneven))}: not equally many microbatches on all dp={layout.dp} ranks, over which "
            f"etp*ep={layout.expert_tp * layout.ep} spreads experts. Use multiples of micro*dp={per_round}."
        )
