"""The rules that tie the cuts of a layout to the model, the batch, the numerics and the machines.
`table` has them in order."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...base.divisors import divisors
from ...base.errors import LayoutError
from ...layout.layout import Layout
from ...layout.leaves import degree_to_admit, leaf_sizes
from ...machine.cluster import ClusterSpec
from ...model.model import ModelSpec
from ..sections import Batch, DataParallel, Numerics
from .experts import MAX_NAMED_DEGREE


def heads_admit_tp(layout: Layout, model: ModelSpec) -> Iterator[str]:
    """Every tp rank holds key/value heads, with their query heads."""
    if layout.tp > model.num_kv_heads:
        yield (
            f"tp={layout.tp} leaves some ranks without any of num_kv_heads={model.num_kv_heads} (model {model.name}). "
            f"Use tp <= {model.num_kv_heads}; divisors, {divisors(model.num_kv_heads)}, give all ranks the same work."
        )


def leaves_admit_tp(layout: Layout, model: ModelSpec, batch: Batch, numerics: Numerics) -> Iterator[str]:
    """Every tp rank owns at least one whole leaf of each feature axis."""
    sizes = leaf_sizes(
        model,
        batch.sequence,
        head_block=numerics.head_block,
        ffn_block=numerics.ffn_block,
        vocab_block=numerics.vocab_block,
        gradient_token_block=numerics.gradient_token_block,
        reduction_token_block=numerics.reduction_token_block,
        max_degree=degree_to_admit(numerics.mode, layout),
    )
    if layout.tp <= model.num_kv_heads:
        try:
            sizes.check(layout.tp)
        except LayoutError as error:
            yield from error.problems


def positions_suffice(batch: Batch, model: ModelSpec) -> Iterator[str]:
    """Learned positions cover the sequence."""
    if model.position == "learned" and batch.sequence > model.max_positions:
        yield (
            f"sequence={batch.sequence} is longer than the learned position table, max_positions={model.max_positions} "
            f"(model {model.name}). Use sequence <= {model.max_positions}, or model.max_positions = {batch.sequence}."
        )


def cluster_is_filled(cluster: ClusterSpec, layout: Layout) -> Iterator[str]:
    """The ranks of the layout are the devices of the cluster."""
    if cluster.num_devices != layout.world_size:
        model_size = layout.tp * layout.cp * layout.pp
        dp, rest = divmod(cluster.num_devices, model_size)
        remedy = f"dp={dp}" if dp and not rest else f"num_devices={layout.world_size}"
        yield (
            f"tp*cp*dp*pp = {layout.tp}*{layout.cp}*{layout.dp}*{layout.pp} = {layout.world_size} ranks, "
            f"but num_devices={cluster.num_devices}. Use {remedy}."
        )


def nodes_are_whole(cluster: ClusterSpec) -> Iterator[str]:
    """Several nodes are whole nodes."""
    if cluster.num_devices > cluster.devices_per_node and cluster.num_devices % cluster.devices_per_node:
        per_node = cluster.devices_per_node
        below = cluster.num_devices // per_node * per_node
        yield (
            f"num_devices={cluster.num_devices} does not fill nodes of devices_per_node={per_node}. Use {below} or "
            f"{below + per_node}."
        )


def sequence_divides(layout: Layout, batch: Batch, numerics: Numerics) -> Iterator[str]:
    """2*cp chunks make up the sequence, and with sequence parallelism tp divides a rank's part,
    where numerics are fast."""
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if batch.sequence % chunks:
        yield (
            f"cp={layout.cp} gives every rank an early and a late chunk of the sequence, 2*cp={chunks} chunks in "
            "all, which do not "
            f"divide sequence={batch.sequence}. Use sequence={batch.sequence // chunks * chunks or chunks}."
        )
    elif layout.sequence_parallel and numerics.mode == "fast" and batch.sequence // layout.cp % layout.tp:
        unit = math.lcm(chunks, layout.cp * layout.tp)
        part = (
            f"the {batch.sequence // layout.cp} tokens that cp={layout.cp} leaves"
            if layout.cp > 1
            else f"sequence={batch.sequence}"
        )
        yield (
            f"sequence_parallel=true cuts {part} over tp={layout.tp}, which does not divide it. "
            f"Use sequence={batch.sequence // unit * unit or unit}, or sequence_parallel=false."
        )


def token_blocks_admit_tp(layout: Layout, batch: Batch, numerics: Numerics, model: ModelSpec) -> Iterator[str]:
    """With sequence parallelism and exact numerics every tp rank owns at least one whole block of tokens."""
    if numerics.mode != "exact" or not layout.sequence_parallel:
        return
    blocks = {name: getattr(numerics, name) for name in ("gradient_token_block", "reduction_token_block")}
    sequence = batch.sequence // layout.cp
    leaves = leaf_sizes(model, batch.sequence, **blocks).tokens(sequence)
    if leaves.num_leaves < layout.tp:
        finer = f"reduction_token_block <= {sequence // layout.tp}, " if sequence >= layout.tp else ""
        longer = "" if layout.cp > 1 else f"sequence >= {leaves.block * (layout.tp - 1) + 1}, "
        part = f"the part of {sequence} tokens that cp={layout.cp} leaves" if layout.cp > 1 else f"sequence={sequence}"
        yield (
            "sequence_parallel=true with exact numerics gives every rank whole blocks of "
            f"reduction_token_block={leaves.block} tokens, but "
            f"{part} has {leaves.num_leaves} of them for tp={layout.tp}. Use {finer}{longer}or sequence_parallel=false."
        )


def token_blocks_admit_cp(layout: Layout, batch: Batch, numerics: Numerics, model: ModelSpec) -> Iterator[str]:
    """With context parallelism and exact numerics chunks are made of whole blocks of tokens."""
    chunk, rest = divmod(batch.sequence, 2 * layout.cp)
    if numerics.mode != "exact" or layout.cp == 1 or rest:
        return
    blocks = {name: getattr(numerics, name) for name in ("gradient_token_block", "reduction_token_block")}
    sizes = leaf_sizes(model, batch.sequence, **blocks)
    for name in blocks:
        if chunk % (block := getattr(sizes, name)):
            legal = [each for each in divisors(chunk) if each <= max(block, MAX_NAMED_DEGREE)]
            yield (
                f"cp={layout.cp} cuts sequence={batch.sequence} into chunks of {chunk} tokens, inside a block of "
                f"{name}={block}, "
                f"whose sums exact numerics keep whole. Use {name} among {legal}."
            )


def heads_admit_cp_inner(layout: Layout, model: ModelSpec) -> Iterator[str]:
    """Ranks that exchange heads for tokens each get equally many whole groups of query, key and value heads."""
    inner = layout.cp_inner
    if inner == 1:
        return
    heads = leaf_sizes(model, 1).heads
    counts = [hi - lo for lo, hi in (heads.owned_items(layout.tp, rank) for rank in range(layout.tp))]
    if any(count % inner or not count for count in counts):
        common = math.gcd(layout.cp, *counts)
        legal = [size for size in divisors(common) if common]
        yield (
            f"cp_inner={inner} exchanges heads for tokens, but num_kv_heads={model.num_kv_heads} leave a "
            f"tensor-parallel rank (tp={layout.tp}) {counts[0]} of them, which {inner} ranks cannot share evenly. "
            f"Use cp_inner among {', '.join(map(str, legal))}; the rest of cp then exchanges keys and values."
        )


def torch_shards_by_itself(data_parallel: DataParallel, layout: Layout, numerics: Numerics) -> Iterator[str]:
    """Torch's fully_shard keeps parameters in parts, in fast numerics, and has its own buckets."""
    if data_parallel.library != "torch":
        return
    if layout.zero < 2:
        yield (
            f'library="torch" keeps parameters in parts by fully_shard, but zero={layout.zero} keeps them whole on '
            "every rank. "
            "Set layout.zero = 3, or 2 to gather them once in a step, or leave library out."
        )
    if numerics.mode == "exact":
        yield (
            'library="torch" adds gradients in the order of its collectives, which depends on the number of ranks, '
            "and not in that of "
            'numerics.mode="exact". Set numerics.mode = "fast", or leave library out.'
        )
    names = ("overlap_grad_reduce", "overlap_param_gather", "bucket_bytes", "shard")
    if given := [
        f"{name}={getattr(data_parallel, name)}" for name in names if getattr(data_parallel, name) is not None
    ]:
        yield (
            'library="torch" gathers and reduces every transformer layer by itself, overlapped in its own way, and '
            "has no use for "
            f"{', '.join(given)}. Leave one of the two out."
        )


def shards_divide(data_parallel: DataParallel, layout: Layout, model: ModelSpec) -> Iterator[str]:
    """ZeRO shards over a divisor of the data-parallel ranks, and of those that have copies of an expert."""
    shard, ranks = data_parallel.shard, layout.dp * layout.cp
    if shard is not None and ranks % shard:
        yield (
            f"shard={shard} does not divide the dp*cp={ranks} ranks that it shards over. Use shard among "
            f"{divisors(ranks)}."
        )
    elif shard is not None and model.is_moe and not layout.tp * ranks % (layout.expert_tp * layout.ep):
        admitted = [each for each in divisors(ranks) if layout.expert_dp % layout.expert_shard(each) == 0]
        if shard not in admitted:
            yield (
                f"shard={shard} leaves experts groups of {layout.expert_shard(shard)} ranks, which do not divide "
                f"the {layout.expert_dp} that have copies of an expert. Use shard among {admitted}."
            )
    if shard is not None and layout.zero == 0:
        yield (
            f"shard={shard} says how many ranks ZeRO shards over, but zero=0 shards nothing. Set layout.zero, or "
            "leave shard out."
        )
    if data_parallel.overlap_param_gather and layout.zero == 0:
        yield (
            "overlap_param_gather=true hides the gathers of sharded parameters, but zero=0 shards nothing. "
            "Set layout.zero, or leave overlap_param_gather out."
        )
