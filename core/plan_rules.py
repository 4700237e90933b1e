"""The rules that tie keys of a plan together, as one table. Every rule that a plan breaks is reported, not only the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .cluster import ClusterSpec
from .divisors import divisors
from .errors import LayoutError, did_you_mean
from .expert_rules import (
    MAX_NAMED_DEGREE,
    expert_leaves_admit_etp,
    experts_divide,
    experts_see_equal_microbatches,
    experts_see_whole_blocks,
    routers_exist,
)
from .layout import Layout
from .leaves import degree_to_admit, leaf_sizes
from .microbatches import microbatch_counts
from .model import ModelSpec
from .plan import RECOMPUTE_MODULES, Batch, Checkpoint, DataParallel, Numerics, Precision, Recompute, ScheduleChoice
from .schedules import CATALOG, default_name
from .stages import assign_layers, num_mtp_written
from .variation_rules import (
    checkpoints_need_failures,
    classes_are_known,
    hiccups_have_a_length,
    imbalance_needs_experts,
    links_exist,
    stragglers_exist,
)


@dataclass(frozen=True)
class Rule:
    """`check` takes the nouns of the sections that `keys` names, in order of first mention, and yields one sentence per problem."""

    name: str
    keys: tuple[str, ...]
    doc: str
    check: Callable[..., Iterator[str]]

    @cached_property
    def sections(self) -> tuple[str, ...]:
        """The sections whose nouns `check` takes."""
        return tuple(dict.fromkeys(key.partition(".")[0] for key in self.keys))


@dataclass(frozen=True)
class BrokenRule:
    """A rule and one sentence about how it is broken."""

    rule: Rule
    sentence: str


def broken_rules(nouns: Mapping[str, Any]) -> list[BrokenRule]:
    """Every problem of the rules whose sections are all in `nouns` (section name -> noun), in table order."""
    found = []
    for rule in RULES:
        if all(section in nouns for section in rule.sections):
            found += [BrokenRule(rule, sentence) for sentence in rule.check(*(nouns[section] for section in rule.sections))]
    return found


def _heads_admit_tp(layout: Layout, model: ModelSpec) -> Iterator[str]:
    if layout.tp > model.num_kv_heads:
        yield (
            f"tp={layout.tp} leaves some ranks without any of num_kv_heads={model.num_kv_heads} (model {model.name}). "
            f"Use tp <= {model.num_kv_heads}; divisors, {divisors(model.num_kv_heads)}, give all ranks the same work."
        )


def _leaves_admit_tp(layout: Layout, model: ModelSpec, batch: Batch, numerics: Numerics) -> Iterator[str]:
    sizes = leaf_sizes(
        model,
        batch.sequence,
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


def _microbatches_divide(batch: Batch, layout: Layout) -> Iterator[str]:
    num_microbatches, rest = divmod(batch.global_size, batch.micro_size)
    if rest:
        nearest = [number * batch.micro_size for number in (num_microbatches, num_microbatches + 1) if number >= layout.dp]
        named = " or ".join(map(str, nearest)) or str(batch.micro_size * layout.dp)
        yield f"global={batch.global_size} is no multiple of micro={batch.micro_size}. Use global = {named}, or another micro."
    elif num_microbatches < layout.dp:
        yield (
            f"global={batch.global_size} has {num_microbatches} microbatches of micro={batch.micro_size} for dp={layout.dp} ranks. "
            f"Use global >= {batch.micro_size * layout.dp}, or dp <= {num_microbatches}."
        )


def _stages_hold_all_layers(layout: Layout, model: ModelSpec) -> Iterator[str]:
    try:
        assign_layers(model.num_layers, layout)
    except LayoutError as error:
        yield from error.problems
        return
    written = 0 if layout.stages is None else num_mtp_written(layout.stages)
    if written not in (0, model.num_mtp_layers):
        yield (
            f"stages={layout.stages!r} names {written} modules of multi-token prediction (m), but model {model.name} "
            f"has num_mtp_layers={model.num_mtp_layers}. Write as many, or none."
        )


def _interleaving_matches(schedule: ScheduleChoice, layout: Layout) -> Iterator[str]:
    if schedule.file is not None:
        return
    if schedule.name not in CATALOG:
        yield f'schedule.name="{schedule.name}" is not in the catalog{did_you_mean(schedule.name, CATALOG)}'
        return
    entry, suggested = CATALOG[schedule.name], default_name(layout.pp, layout.vpp)
    nearest = entry.nearest_vpp(layout.vpp)
    if nearest == layout.vpp:
        return
    if not entry.chunks:
        yield (
            f'vpp={layout.vpp} needs an interleaved schedule, but schedule.name="{schedule.name}" runs one stage per rank. '
            f'Set schedule.name = "{suggested}" or layout.vpp = 1.'
        )
    else:
        needed = f"{'at least ' if entry.fixed_vpp is None else ''}{nearest}"
        yield (
            f'schedule.name="{schedule.name}" needs vpp of {needed}, but vpp={layout.vpp}. '
            f'Set layout.vpp = {nearest} or schedule.name = "{suggested}".'
        )


def _sizes_are_built(schedule: ScheduleChoice, layout: Layout, batch: Batch) -> Iterator[str]:
    counts = microbatch_counts(batch.global_size, batch.micro_size, layout.dp)
    if schedule.file is None and schedule.name in CATALOG:
        yield from filter(None, (CATALOG[schedule.name].condition(layout.pp, count) for count in counts))
    elif schedule.file is not None and len(counts) > 1:
        per_round = batch.micro_size * layout.dp
        yield (
            f"schedule.file={schedule.file!r} has one number of microbatches, but global={batch.global_size} gives some of the "
            f"dp={layout.dp} ranks {counts[0]} and others {counts[1]}. Use global = {counts[1] * per_round} or {counts[0] * per_round}."
        )


def _name_or_file(schedule: ScheduleChoice) -> Iterator[str]:
    if schedule.file is not None and schedule.name != ScheduleChoice().name:
        yield f'schedule.name="{schedule.name}" and schedule.file="{schedule.file}" both choose a schedule. Give one of them.'


def _stages_are_sharded(schedule: ScheduleChoice, layout: Layout) -> Iterator[str]:
    if schedule.max_active_stages is not None and layout.zero != 3:
        yield (
            f"max_active_stages={schedule.max_active_stages} says how many stages' parameters ZeRO-3 gathers at a time, "
            f"but zero={layout.zero} keeps them all. Set layout.zero = 3, or leave max_active_stages out."
        )


def _positions_suffice(batch: Batch, model: ModelSpec) -> Iterator[str]:
    if model.position == "learned" and batch.sequence > model.max_positions:
        yield (
            f"sequence={batch.sequence} is longer than the learned position table, max_positions={model.max_positions} "
            f"(model {model.name}). Use sequence <= {model.max_positions}, or model.max_positions = {batch.sequence}."
        )


def _cluster_is_filled(cluster: ClusterSpec, layout: Layout) -> Iterator[str]:
    if cluster.num_devices != layout.world_size:
        model_size = layout.tp * layout.cp * layout.pp
        dp, rest = divmod(cluster.num_devices, model_size)
        remedy = f"dp={dp}" if dp and not rest else f"num_devices={layout.world_size}"
        yield (
            f"tp*cp*dp*pp = {layout.tp}*{layout.cp}*{layout.dp}*{layout.pp} = {layout.world_size} ranks, "
            f"but num_devices={cluster.num_devices}. Use {remedy}."
        )


def _nodes_are_whole(cluster: ClusterSpec) -> Iterator[str]:
    if cluster.num_devices > cluster.devices_per_node and cluster.num_devices % cluster.devices_per_node:
        per_node = cluster.devices_per_node
        below = cluster.num_devices // per_node * per_node
        yield f"num_devices={cluster.num_devices} does not fill nodes of devices_per_node={per_node}. Use {below} or {below + per_node}."


def _sequence_divides(layout: Layout, batch: Batch, numerics: Numerics) -> Iterator[str]:
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if batch.sequence % chunks:
        yield (
            f"cp={layout.cp} gives every rank an early and a late chunk of the sequence, 2*cp={chunks} chunks in all, which do not "
            f"divide sequence={batch.sequence}. Use sequence={batch.sequence // chunks * chunks or chunks}."
        )
    elif layout.sequence_parallel and numerics.mode == "fast" and batch.sequence // layout.cp % layout.tp:
        unit = math.lcm(chunks, layout.cp * layout.tp)
        part = f"the {batch.sequence // layout.cp} tokens that cp={layout.cp} leaves" if layout.cp > 1 else f"sequence={batch.sequence}"
        yield (
            f"sequence_parallel=true cuts {part} over tp={layout.tp}, which does not divide it. "
            f"Use sequence={batch.sequence // unit * unit or unit}, or sequence_parallel=false."
        )


def _token_blocks_admit_tp(layout: Layout, batch: Batch, numerics: Numerics, model: ModelSpec) -> Iterator[str]:
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
            f"sequence_parallel=true with exact numerics gives every rank whole blocks of reduction_token_block={leaves.block} tokens, but "
            f"{part} has {leaves.num_leaves} of them for tp={layout.tp}. Use {finer}{longer}or sequence_parallel=false."
        )


def _token_blocks_admit_cp(layout: Layout, batch: Batch, numerics: Numerics, model: ModelSpec) -> Iterator[str]:
    chunk, rest = divmod(batch.sequence, 2 * layout.cp)
    if numerics.mode != "exact" or layout.cp == 1 or rest:
        return
    blocks = {name: getattr(numerics, name) for name in ("gradient_token_block", "reduction_token_block")}
    sizes = leaf_sizes(model, batch.sequence, **blocks)
    for name in blocks:
        if chunk % (block := getattr(sizes, name)):
            legal = [each for each in divisors(chunk) if each <= max(block, MAX_NAMED_DEGREE)]
            yield (
                f"cp={layout.cp} cuts sequence={batch.sequence} into chunks of {chunk} tokens, inside a block of {name}={block}, "
                f"whose sums exact numerics keep whole. Use {name} among {legal}."
            )


def _recompute_is_chosen_once(recompute: Recompute) -> Iterator[str]:
    if recompute.num_layers is not None and recompute.mode != "full":
        yield (
            f"num_layers={recompute.num_layers} limits full recomputation to so many layers of each stage, "
            f'but recompute.mode="{recompute.mode}". Set recompute.mode = "full", or leave num_layers out.'
        )
    if recompute.layers is not None and (recompute.mode != "full" or recompute.num_layers is not None):
        other = f'recompute.mode="{recompute.mode}"' if recompute.mode != "full" else f"num_layers={recompute.num_layers}"
        yield (
            f"layers={list(recompute.layers)} are the only ones that full recomputation repeats, but {other} says otherwise. "
            'Set recompute.mode = "full" without num_layers, or leave layers out.'
        )
    if recompute.distribute and recompute.mode != "full":
        yield (
            "distribute=true spreads the inputs that full recomputation keeps over tensor-parallel ranks, "
            f'but recompute.mode="{recompute.mode}". Set recompute.mode = "full", or leave distribute out.'
        )
    if recompute.modules != Recompute().modules and recompute.mode != "selective":
        yield (
            f"modules={list(recompute.modules)} chooses what selective recomputation repeats, "
            f'but recompute.mode="{recompute.mode}". Set recompute.mode = "selective", or leave modules out.'
        )


def _distributed_inputs_are_whole(recompute: Recompute, layout: Layout) -> Iterator[str]:
    if recompute.distribute and layout.sequence_parallel:
        yield (
            "recompute.distribute=true spreads inputs of layers that all tensor-parallel ranks hold, but with "
            "layout.sequence_parallel=true each holds its own tokens only. Leave one of the two out."
        )


def _recomputed_layers_exist(recompute: Recompute, model: ModelSpec) -> Iterator[str]:
    layers = list(recompute.layers or ())
    if wrong := [layer for layer in layers if not 0 <= layer < model.num_layers]:
        yield f"layers={layers}: model {model.name} has the layers 0 to {model.num_layers - 1}, and no layer {wrong[0]}."
    elif layers != sorted(set(layers)):
        yield f"layers={layers} must name every layer once, in order. Use {sorted(set(layers))}."


def _recomputed_modules_exist(recompute: Recompute, model: ModelSpec) -> Iterator[str]:
    for name in recompute.modules:
        if name not in RECOMPUTE_MODULES:
            yield f"modules={list(recompute.modules)}: {name!r} is no part of a layer{did_you_mean(name, RECOMPUTE_MODULES)}"
        elif name in ("moe", "moe_act") and not model.is_moe:
            yield f"modules={list(recompute.modules)}: model {model.name} has no experts, so there is no {name!r}. Leave it out."
        elif name == "shared_experts" and not model.num_shared_experts:
            yield f"modules={list(recompute.modules)}: model {model.name} has no shared experts. Leave {name!r} out."
        elif name == "mla_up_proj" and not model.is_mla:
            yield f"modules={list(recompute.modules)}: model {model.name} has no latent attention. Leave {name!r} out."


ADAPTING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_hysteresis")
"""How a loss scale adapts itself."""


def _loss_scales_are_powers_of_two(precision: Precision) -> Iterator[str]:
    plain = Precision(precision.dtype)
    given = [name for name in ("loss_scale", *ADAPTING) if getattr(precision, name) != getattr(plain, name)]
    if given and precision.dtype != "fp16":
        yield f'{given[0]}={getattr(precision, given[0])} scales losses for fp16, but dtype="{precision.dtype}". Leave it out, or use fp16.'
        return
    if precision.loss_scale is not None and (other := next((name for name in given if name in ADAPTING[:3]), None)):
        yield (
            f"loss_scale={precision.loss_scale:g} is a constant, so {other}={getattr(precision, other):g} is about nothing. "
            "Leave one of the two out."
        )
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(precision, name)
        if value is not None and math.frexp(value)[0] != 0.5:
            yield f"{name}={value:g} is no power of two. Use {2.0 ** round(math.log2(value)):g}."
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"min_loss_scale={precision.min_loss_scale:g} is above initial_loss_scale={precision.initial_loss_scale:g}. "
            f"Use min_loss_scale <= {precision.initial_loss_scale:g}."
        )


def _shards_divide(data_parallel: DataParallel, layout: Layout) -> Iterator[str]:
    shard, ranks = data_parallel.shard, layout.dp * layout.cp
    if shard is not None and ranks % shard:
        yield f"shard={shard} does not divide the dp*cp={ranks} ranks that it shards over. Use shard among {divisors(ranks)}."
    if shard is not None and layout.zero == 0:
        yield f"shard={shard} says how many ranks ZeRO shards over, but zero=0 shards nothing. Set layout.zero, or leave shard out."
    if data_parallel.overlap_param_gather and layout.zero == 0:
        yield (
            "overlap_param_gather=true hides the gathers of sharded parameters, but zero=0 shards nothing. "
            "Set layout.zero, or leave overlap_param_gather out."
        )


def _checkpoints_have_a_folder(checkpoint: Checkpoint) -> Iterator[str]:
    for name in ("every", "keep"):
        if checkpoint.folder is None and (value := getattr(checkpoint, name)) is not None:
            yield f"{name}={value} is about checkpoints, but there is no folder for them. Set checkpoint.folder, or leave {name} out."


def _dtype_has_peak(precision: Precision, cluster: ClusterSpec) -> Iterator[str]:
    if precision.dtype not in cluster.peak_flops_per_s:
        known = sorted(cluster.peak_flops_per_s)
        yield f'dtype="{precision.dtype}" has no peak rate on cluster {cluster.name}. Use one of {", ".join(known)}.'


RULES: tuple[Rule, ...] = (
    Rule(
        "heads-admit-tp",
        ("layout.tp", "model.num_kv_heads"),
        "every tp rank holds key/value heads, with their query heads",
        _heads_admit_tp,
    ),
    Rule(
        "leaves-admit-tp",
        ("layout.tp", "model.ffn_hidden_size", "model.vocab_size", "batch.sequence", "numerics.ffn_block", "numerics.vocab_block"),
        "every tp rank owns at least one whole leaf of each feature axis",
        _leaves_admit_tp,
    ),
    Rule(
        "microbatches-divide",
        ("batch.global", "batch.micro", "layout.dp"),
        "the global batch is whole microbatches, at least one for every data-parallel rank",
        _microbatches_divide,
    ),
    Rule(
        "experts-see-equal-microbatches",
        ("layout.ep", "layout.etp", "batch.global", "batch.micro", "layout.dp", "model.num_experts"),
        "ranks that send tokens to each other's experts have equally many microbatches",
        experts_see_equal_microbatches,
    ),
    Rule(
        "stages-hold-all-layers",
        ("layout.stages", "layout.pp", "layout.vpp", "model.num_layers", "model.num_mtp_layers"),
        "pp*vpp divides the layers, or the stage string holds them all",
        _stages_hold_all_layers,
    ),
    Rule(
        "interleaving-matches",
        ("schedule.name", "layout.vpp"),
        "vpp above 1 and interleaved schedules go together",
        _interleaving_matches,
    ),
    Rule(
        "schedule-can-be-built",
        ("schedule.name", "layout.pp", "batch.global", "batch.micro", "layout.dp"),
        "the schedule exists for this number of ranks and microbatches",
        _sizes_are_built,
    ),
    Rule(
        "stages-are-sharded",
        ("schedule.max_active_stages", "layout.zero"),
        "only ZeRO-3 gathers the parameters of stages",
        _stages_are_sharded,
    ),
    Rule("name-or-file", ("schedule.name", "schedule.file"), "a schedule has a name or a file, not both", _name_or_file),
    Rule("positions-suffice", ("batch.sequence", "model.max_positions"), "learned positions cover the sequence", _positions_suffice),
    Rule(
        "cluster-is-filled",
        ("cluster.num_devices", "layout.dp", "layout.tp", "layout.pp", "layout.cp"),
        "the ranks of the layout are the devices of the cluster",
        _cluster_is_filled,
    ),
    Rule("nodes-are-whole", ("cluster.num_devices", "cluster.devices_per_node"), "several nodes are whole nodes", _nodes_are_whole),
    Rule(
        "sequence-divides",
        ("layout.sequence_parallel", "batch.sequence", "layout.tp", "layout.cp", "numerics.mode"),
        "2*cp chunks make up the sequence, and with sequence parallelism tp divides a rank's part, where numerics are fast",
        _sequence_divides,
    ),
    Rule(
        "token-blocks-admit-tp",
        ("layout.sequence_parallel", "batch.sequence", "layout.tp", "numerics.reduction_token_block", "model.num_kv_heads"),
        "with sequence parallelism and exact numerics every tp rank owns at least one whole block of tokens",
        _token_blocks_admit_tp,
    ),
    Rule(
        "token-blocks-admit-cp",
        (
            "layout.cp",
            "batch.sequence",
            "numerics.gradient_token_block",
            "numerics.reduction_token_block",
            "model.num_kv_heads",
        ),
        "with context parallelism and exact numerics chunks are made of whole blocks of tokens",
        _token_blocks_admit_cp,
    ),
    Rule(
        "experts-divide",
        ("layout.ep", "layout.etp", "model.num_experts", "model.expert_ffn_hidden_size"),
        "ep divides the experts, and etp the width of one",
        experts_divide,
    ),
    Rule(
        "experts-see-whole-blocks",
        ("numerics.gradient_token_block", "layout.etp", "layout.ep", "layout.tp", "model.num_experts", "batch.sequence"),
        "in exact numerics no block of tokens goes to several copies of the experts",
        experts_see_whole_blocks,
    ),
    Rule(
        "expert-leaves-admit-etp",
        ("numerics.mode", "layout.etp", "model.expert_ffn_hidden_size"),
        "in exact numerics every etp rank owns at least one whole leaf of an expert",
        expert_leaves_admit_etp,
    ),
    Rule(
        "routers-exist",
        (
            "train.router_aux_loss",
            "train.router_z_loss",
            "train.router_jitter",
            "train.expert_bias_rate",
            "model.num_experts",
            "model.expert_bias",
        ),
        "losses, noise and bias of routers need routers",
        routers_exist,
    ),
    Rule(
        "recompute-is-chosen-once",
        ("recompute.num_layers", "recompute.layers", "recompute.distribute", "recompute.modules", "recompute.mode"),
        "num_layers, layers and distribute belong to full, modules to selective recomputation",
        _recompute_is_chosen_once,
    ),
    Rule(
        "distributed-inputs-are-whole",
        ("recompute.distribute", "layout.sequence_parallel"),
        "inputs that are spread over tensor-parallel ranks are not cut already",
        _distributed_inputs_are_whole,
    ),
    Rule(
        "recomputed-layers-exist",
        ("recompute.layers", "model.num_layers"),
        "the model has the layers that are recomputed",
        _recomputed_layers_exist,
    ),
    Rule(
        "recomputed-modules-exist",
        ("recompute.modules", "model.num_experts", "model.kv_lora_rank"),
        "a layer of the model has the modules that are recomputed",
        _recomputed_modules_exist,
    ),
    Rule(
        "shards-divide",
        ("data_parallel.shard", "data_parallel.overlap_param_gather", "layout.zero", "layout.dp", "layout.cp"),
        "ZeRO shards over a divisor of the data-parallel ranks",
        _shards_divide,
    ),
    Rule(
        "checkpoints-have-a-folder",
        ("checkpoint.folder", "checkpoint.every", "checkpoint.keep"),
        "what is saved is saved somewhere",
        _checkpoints_have_a_folder,
    ),
    Rule(
        "loss-scales-are-powers-of-two",
        tuple(f"precision.{name}" for name in ("loss_scale", *ADAPTING, "dtype")),
        "fp16 scales losses by powers of two, which change no bits",
        _loss_scales_are_powers_of_two,
    ),
    Rule("dtype-has-peak", ("precision.dtype", "cluster.peak_flops_per_s"), "the cluster has a rate for it", _dtype_has_peak),
    Rule(
        "stragglers-exist", ("variation.stragglers", "cluster.num_devices"), "stragglers are slow devices of the cluster", stragglers_exist
    ),
    Rule(
        "classes-are-known",
        ("variation.device_classes", "cluster.num_devices", "precision.dtype"),
        "every device is of one class, which is a preset's",
        classes_are_known,
    ),
    Rule(
        "links-exist",
        ("variation.slow_links", "variation.failed_links", "cluster.num_devices"),
        "slow and failed links are links of the cluster, and leave every device a way to the others",
        links_exist,
    ),
    Rule(
        "hiccups-have-a-length", ("variation.hiccups_per_s", "variation.hiccup_s"), "pauses have a rate and a length", hiccups_have_a_length
    ),
    Rule(
        "imbalance-needs-experts",
        ("variation.expert_imbalance", "variation.expert_capacity", "model.num_experts"),
        "only experts can be unequally busy",
        imbalance_needs_experts,
    ),
    Rule(
        "checkpoints-need-failures",
        ("variation.device_mtbf_s", "variation.checkpoint_s", "variation.checkpoint_every_s", "variation.restart_s"),
        "checkpoints count where devices fail",
        checkpoints_need_failures,
    ),
)
"""Every cross-key rule. The first key of a rule that the file gives is the line that its problems point at."""
