"""The rules that tie keys of a plan together, as one table. Every rule that a plan breaks is
reported, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from .communicators import axes_are_known, ctas_are_whole, most_ctas_are_no_fewer, windows_are_registered
from .experts import (
    expert_leaves_admit_etp,
    experts_divide,
    experts_see_equal_microbatches,
    experts_see_whole_blocks,
    routers_exist,
)
from .layout import (
    cluster_is_filled,
    heads_admit_cp_inner,
    heads_admit_tp,
    leaves_admit_tp,
    nodes_are_whole,
    positions_suffice,
    sequence_divides,
    shards_divide,
    token_blocks_admit_cp,
    token_blocks_admit_tp,
    torch_shards_by_itself,
)
from .modules import (
    modules_cover_ranks,
    modules_fit_together,
    modules_form_a_tree,
    modules_have_a_schedule,
    modules_have_names,
    modules_recompute_equally,
)
from .optimizer import groups_are_of_one_model, groups_have_parameters, offloaded_moments_exist
from .rates import OF_DECAYING, OF_WEIGHT_DECAY, OF_WSD, batches_are_listed, rates_are_ordered
from .recompute import (
    distributed_inputs_are_whole,
    offloaded_layers_exist,
    offloaded_masters_exist,
    recompute_is_chosen_once,
    recomputed_layers_exist,
    recomputed_modules_exist,
)
from .schedule import (
    actions_are_bounded,
    batches_are_waited_for,
    interleaving_matches,
    microbatches_divide,
    name_or_file,
    sizes_are_built,
    stages_are_sharded,
    stages_hold_all_layers,
)
from .training import (
    ADAPTING,
    checkpoints_have_a_folder,
    data_are_split_once,
    dtype_has_peak,
    loss_scales_are_powers_of_two,
    padding_is_distinguished,
    products_are_named_once,
    scalings_are_modelled,
    weights_are_positive,
)
from .variation import (
    checkpoints_need_failures,
    classes_are_known,
    hiccups_have_a_length,
    imbalance_needs_experts,
    links_exist,
    stragglers_exist,
)


@dataclass(frozen=True)
class Rule:
    """`check` takes the nouns of the sections that `keys` names, in order of first mention, and yields one
    sentence per problem."""

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
    known = rules_about(frozenset(nouns))
    return [
        BrokenRule(rule, sentence) for rule in known for sentence in rule.check(*map(nouns.__getitem__, rule.sections))
    ]


@cache
def rules_about(sections: frozenset[str]) -> tuple[Rule, ...]:
    """The rules that need no other sections, in table order."""
    return tuple(rule for rule in RULES if sections.issuperset(rule.sections))


RULES: tuple[Rule, ...] = (
    Rule(
        "heads-admit-tp",
        ("layout.tp", "model.num_kv_heads"),
        "every tp rank holds key/value heads, with their query heads",
        heads_admit_tp,
    ),
    Rule(
        "leaves-admit-tp",
        (
            "layout.tp",
            "model.ffn_hidden_size",
            "model.vocab_size",
            "batch.sequence",
            "numerics.head_block",
            "numerics.ffn_block",
            "numerics.vocab_block",
        ),
        "every tp rank owns at least one whole leaf of each feature axis",
        leaves_admit_tp,
    ),
    Rule(
        "microbatches-divide",
        ("batch.global", "batch.micro", "layout.dp"),
        "the global batch is whole microbatches, at least one for every data-parallel rank",
        microbatches_divide,
    ),
    Rule(
        "batches-are-listed",
        ("batch.rampup", "batch.schedule", "batch.schedule_unit", "batch.global", "batch.sequence"),
        "batches that change begin with the first step and come to the global one",
        batches_are_listed,
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
        stages_hold_all_layers,
    ),
    Rule(
        "interleaving-matches",
        ("schedule.name", "layout.vpp"),
        "vpp above 1 and interleaved schedules go together",
        interleaving_matches,
    ),
    Rule(
        "schedule-can-be-built",
        ("schedule.name", "layout.pp", "batch.global", "batch.micro", "layout.dp"),
        "the schedule exists for this number of ranks and microbatches",
        sizes_are_built,
    ),
    Rule(
        "actions-are-bounded",
        ("batch.global", "batch.micro", "layout.pp", "layout.vpp", "layout.dp", "schedule.file"),
        "a step has no more actions than its verbs can go through",
        actions_are_bounded,
    ),
    Rule(
        "stages-are-sharded",
        ("schedule.max_active_stages", "layout.zero"),
        "only ZeRO-3 gathers the parameters of stages",
        stages_are_sharded,
    ),
    Rule(
        "batches-are-waited-for",
        ("runtime.p2p_batched", "runtime.p2p_overlap"),
        "messages are batched where products wait for them",
        batches_are_waited_for,
    ),
    Rule("name-or-file", ("schedule.name", "schedule.file"), "a schedule has a name or a file, not both", name_or_file),
    Rule(
        "positions-suffice",
        ("batch.sequence", "model.max_positions"),
        ("learned positions cover the sequence"),
        positions_suffice,
    ),
    Rule(
        "cluster-is-filled",
        ("cluster.num_devices", "layout.dp", "layout.tp", "layout.pp", "layout.cp"),
        "the ranks of the layout are the devices of the cluster",
        cluster_is_filled,
    ),
    Rule(
        "nodes-are-whole",
        ("cluster.num_devices", "cluster.devices_per_node"),
        ("several nodes are whole nodes"),
        nodes_are_whole,
    ),
    Rule(
        "sequence-divides",
        ("layout.sequence_parallel", "batch.sequence", "layout.tp", "layout.cp", "numerics.mode"),
        "2*cp chunks make up the sequence, and with sequence parallelism tp divides a rank's part, where numerics "
        "are fast",
        sequence_divides,
    ),
    Rule(
        "token-blocks-admit-tp",
        (
            "layout.sequence_parallel",
            "batch.sequence",
            "layout.tp",
            "numerics.reduction_token_block",
            "model.num_kv_heads",
        ),
        "with sequence parallelism and exact numerics every tp rank owns at least one whole block of tokens",
        token_blocks_admit_tp,
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
        token_blocks_admit_cp,
    ),
    Rule(
        "heads-admit-cp-inner",
        ("layout.cp_inner", "layout.cp", "layout.tp", "model.num_kv_heads"),
        "ranks that exchange heads for tokens each get equally many whole groups of query, key and value heads",
        heads_admit_cp_inner,
    ),
    Rule(
        "experts-divide",
        ("layout.ep", "layout.etp", "model.num_experts", "model.expert_ffn_hidden_size"),
        "ep divides the experts, and etp the width of one",
        experts_divide,
    ),
    Rule(
        "experts-see-whole-blocks",
        (
            "numerics.gradient_token_block",
            "layout.etp",
            "layout.ep",
            "layout.tp",
            "model.num_experts",
            "batch.sequence",
        ),
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
        recompute_is_chosen_once,
    ),
    Rule(
        "distributed-inputs-are-whole",
        ("recompute.distribute", "layout.sequence_parallel"),
        "inputs that are spread over tensor-parallel ranks are not cut already",
        distributed_inputs_are_whole,
    ),
    Rule(
        "recomputed-layers-exist",
        ("recompute.layers", "model.num_layers"),
        "the model has the layers that are recomputed",
        recomputed_layers_exist,
    ),
    Rule(
        "recomputed-modules-exist",
        ("recompute.modules", "model.num_experts", "model.kv_lora_rank"),
        "a layer of the model has the modules that are recomputed",
        recomputed_modules_exist,
    ),
    Rule(
        "offloaded-layers-exist",
        ("offload.activations", "model.num_layers"),
        "the model has the layers that each stage offloads",
        offloaded_layers_exist,
    ),
    Rule(
        "offloaded-masters-exist",
        ("offload.masters", "offload.optimizer", "precision.dtype"),
        "fp32 weights go to host memory with their moments, and where layers compute with others",
        offloaded_masters_exist,
    ),
    Rule(
        "offloaded-moments-exist",
        ("offload.optimizer", "optimizer.momentum", "optimizer.name"),
        "the optimizer keeps the moments that go to host memory",
        offloaded_moments_exist,
    ),
    Rule(
        "groups-have-parameters",
        ("optimizer.groups", "model.num_layers"),
        "every group of parameters has some that no group before it has",
        groups_have_parameters,
    ),
    Rule(
        "shards-divide",
        (
            *("data_parallel.shard", "data_parallel.overlap_param_gather", "layout.zero", "layout.dp", "layout.cp"),
            *("layout.ep", "layout.etp", "model.num_experts"),
        ),
        "ZeRO shards over a divisor of the data-parallel ranks, and of those with copies of an expert",
        shards_divide,
    ),
    Rule(
        "torch-shards-by-itself",
        ("data_parallel.library", "layout.zero", "numerics.mode"),
        "torch's fully_shard keeps parameters in parts, in fast numerics, and has its own buckets",
        torch_shards_by_itself,
    ),
    Rule(
        "checkpoints-have-a-folder",
        ("checkpoint.folder", "checkpoint.every", "checkpoint.keep"),
        "what is saved is saved somewhere",
        checkpoints_have_a_folder,
    ),
    Rule(
        "axes-are-known",
        ("communicators.min_ctas", "communicators.max_ctas", "communicators.cga_cluster_size"),
        "options of communicators are by axis",
        axes_are_known,
    ),
    Rule(
        "ctas-are-whole",
        ("communicators.min_ctas", "communicators.max_ctas", "communicators.cga_cluster_size"),
        "thread blocks are counted",
        ctas_are_whole,
    ),
    Rule(
        "most-ctas-are-no-fewer",
        ("communicators.min_ctas", "communicators.max_ctas"),
        "a call has at most max_ctas thread blocks, and at least min_ctas",
        most_ctas_are_no_fewer,
    ),
    Rule(
        "windows-are-registered",
        ("communicators.symmetric", "communicators.registered"),
        "windows are registered buffers",
        windows_are_registered,
    ),
    Rule(
        "loss-scales-are-powers-of-two",
        tuple(f"precision.{name}" for name in ("loss_scale", *ADAPTING, "dtype")),
        "fp16 scales losses by powers of two, which change no bits",
        loss_scales_are_powers_of_two,
    ),
    Rule(
        "scalings-are-modelled",
        ("precision.scaling", "precision.dtype", "runtime.profile"),
        "only operands of 8 bits have scales, and only some stacks' are modelled by how far they reach",
        scalings_are_modelled,
    ),
    Rule(
        "padding-is-distinguished",
        ("train.padded", "train.packed", "train.ignore_token", "runtime.trim_padding"),
        "padded documents have a token that counts for nothing, and only they are trimmed",
        padding_is_distinguished,
    ),
    Rule(
        "rates-are-ordered",
        (
            *(f"optimizer.{name}" for name in ("schedule", "warmup_steps", "warmup_fraction", "initial_learning_rate")),
            *(f"optimizer.{name}" for name in (*OF_DECAYING, *OF_WSD, "weight_decay_schedule", *OF_WEIGHT_DECAY)),
            *("optimizer.weight_decay", "optimizer.counted_in", "train.learning_rate", "train.steps", "batch.global"),
        ),
        "learning rates rise to the peak and fall to the least, and weight decay rises, each in its time",
        rates_are_ordered,
    ),
    Rule(
        "data-are-split-once",
        ("train.split", "train.validation_data"),
        "validation data are a share of the documents, or data of their own",
        data_are_split_once,
    ),
    Rule(
        "weights-are-positive",
        ("train.data", "train.validation_data"),
        "every source of a blend has a positive weight",
        weights_are_positive,
    ),
    Rule(
        "dtype-has-peak",
        ("precision.dtype", "cluster.peak_flops_per_s"),
        ("the cluster has a rate for it"),
        dtype_has_peak,
    ),
    Rule(
        "stragglers-exist",
        ("variation.stragglers", "cluster.num_devices"),
        ("stragglers are slow devices of the cluster"),
        stragglers_exist,
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
        "hiccups-have-a-length",
        ("variation.hiccups_per_s", "variation.hiccup_s"),
        ("pauses have a rate and a length"),
        hiccups_have_a_length,
    ),
    Rule(
        "imbalance-needs-experts",
        ("variation.expert_imbalance", "variation.expert_capacity", "model.num_experts"),
        "only experts can be unequally busy",
        imbalance_needs_experts,
    ),
    Rule(
        "products-are-named-once",
        ("numerics.triton_products", "numerics.mode"),
        "kernels make all products of exact numerics, none, or those that are named",
        products_are_named_once,
    ),
    Rule(
        "checkpoints-need-failures",
        ("variation.device_mtbf_s", "variation.checkpoint_s", "variation.checkpoint_every_s", "variation.restart_s"),
        "checkpoints count where devices fail",
        checkpoints_need_failures,
    ),
    Rule(
        "modules-have-names",
        ("modules.name",),
        ("modules are there, and their names differ"),
        modules_have_names,
    ),
    Rule(
        "modules-cover-ranks",
        ("modules.ranks", "cluster.num_devices"),
        "the modules' ranks follow each other, as many as each layout has",
        modules_cover_ranks,
    ),
    Rule(
        "modules-form-a-tree",
        ("modules.inputs",),
        ("every module but the last feeds one later module"),
        modules_form_a_tree,
    ),
    Rule(
        "modules-fit-together",
        ("modules.name",),
        "hidden states keep their width, and nothing ties one end of the whole to the other",
        modules_fit_together,
    ),
    Rule(
        "modules-have-a-schedule",
        ("modules.name", "schedule.name", "schedule.file"),
        "one schedule runs the stages of all modules",
        modules_have_a_schedule,
    ),
    Rule(
        "modules-recompute-equally",
        ("modules.name", "recompute.layers"),
        ("layers are not named by numbers"),
        modules_recompute_equally,
    ),
    Rule(
        "groups-are-of-one-model",
        ("modules.name", "optimizer.groups"),
        "parameters are chosen by names where there is one model",
        groups_are_of_one_model,
    ),
)
"""Every cross-key rule. The first key of a rule that the file gives is the line that its problems point at."""
