"""The keys of a plan file, as one table: section, name, type, legal values, meaning, and the module that reads the value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .cluster import COLLECTIVE_LIBRARIES, ClusterSpec
from .layout import Layout
from .model import ACTIVATIONS, GROUP_SCORES, ROPE_SCALINGS, ROUTER_SCORES, ModelSpec
from .plan import (
    PROFILES,
    RECOMPUTE_MODULES,
    Batch,
    Checkpoint,
    DataParallel,
    Numerics,
    Optimizer,
    Precision,
    Recompute,
    Runtime,
    ScheduleChoice,
    Train,
)
from .schedules import CATALOG
from .variation import DISTRIBUTIONS, Variation

KeyType = Literal["int", "float", "bool", "str", "path", "two floats", "list of ints", "list of texts", "table of rates", "table of texts"]

NOUNS: Mapping[str, type] = {
    "model": ModelSpec,
    "cluster": ClusterSpec,
    "runtime": Runtime,
    "layout": Layout,
    "batch": Batch,
    "precision": Precision,
    "recompute": Recompute,
    "schedule": ScheduleChoice,
    "numerics": Numerics,
    "optimizer": Optimizer,
    "data_parallel": DataParallel,
    "train": Train,
    "checkpoint": Checkpoint,
    "variation": Variation,
}
"""Section -> the noun it fills, in the order in which a plan file is written."""


@dataclass(frozen=True)
class Key:
    """One key. `choices`, `minimum` and `maximum` limit its value; `above` and `below` are exclusive bounds.

    `attribute` is the field of the section's noun that holds the value; None for keys that only choose where the other values
    come from. `read_by` names the module (below `shardproof`) whose behaviour the value changes; a test holds that it reads it.
    `default_note` describes a default that depends on other keys; plain defaults are those of the noun.
    """

    section: str
    name: str
    type: KeyType
    doc: str
    read_by: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    attribute: str | None = ""
    default_note: str = ""

    def __post_init__(self) -> None:
        if self.attribute == "":
            object.__setattr__(self, "attribute", self.name)

    @property
    def dotted(self) -> str:
        """`section.key`, as `--set` spells it."""
        return f"{self.section}.{self.name}"

    @property
    def required(self) -> bool:
        """True when a value must be given (or come from a preset or a file)."""
        return self.attribute is not None and not self.default_note and self._field_default is dataclasses.MISSING

    @property
    def default(self) -> Any:
        """The value when the key is absent; None where there is none or where `default_note` describes it."""
        default = self._field_default
        return None if self.default_note or default is dataclasses.MISSING else default

    @property
    def legal(self) -> str:
        """Type and limits in words, for help texts and documentation."""
        if self.choices:
            return " | ".join(self.choices) if self.type == "str" else f"{self.type} among {', '.join(self.choices)}"
        bounds = [
            f"at least {self.minimum:g}" if self.minimum is not None else "",
            f"at most {self.maximum:g}" if self.maximum is not None else "",
            f"above {self.above:g}" if self.above is not None else "",
            f"below {self.below:g}" if self.below is not None else "",
        ]
        return ", ".join([self.type, *filter(None, bounds)])

    @property
    def _field_default(self) -> Any:
        for field in dataclasses.fields(NOUNS[self.section]):
            if field.name == self.attribute:
                return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        return None


def _model() -> tuple[Key, ...]:
    count: dict[str, Any] = {"section": "model", "type": "int", "minimum": 1}
    number: dict[str, Any] = {"section": "model", "type": "int", "minimum": 0}
    share: dict[str, Any] = {"section": "model", "type": "float", "minimum": 0, "below": 1, "read_by": "backend.tensor_parallel.dropout"}
    here, parameters, rotary, loss = "core.plan_build", "core.parameters", "core.rotary", "backend.tensor_parallel.cross_entropy"
    router: dict[str, Any] = {"section": "model", "read_by": "backend.model.router"}
    return (
        Key("model", "preset", "str", "name of a known model; other keys override its fields", here, attribute=None),
        Key("model", "config", "path", "path of a Hugging Face config.json", here, attribute=None),
        Key("model", "name", "str", "what reports call the model", "simulator.simulate", default_note="custom"),
        Key(name="num_layers", doc="transformer layers", read_by=parameters, **count),
        Key(name="hidden_size", doc="width of the residual stream", read_by=parameters, **count),
        Key(name="ffn_hidden_size", doc="MLP width after the activation", read_by=parameters, **count),
        Key(name="num_heads", doc="query heads", read_by="simulator.flops", **count),
        Key(name="num_kv_heads", doc="key/value heads", read_by=parameters, default_note="num_heads", **count),
        Key(name="head_dim", doc="width of one head", read_by=parameters, default_note="hidden_size / num_heads", **count),
        Key(name="vocab_size", doc="rows of the token table", read_by=parameters, **count),
        Key(name="max_positions", doc="rows of a learned position table", read_by=parameters, default_note="batch.sequence", **count),
        Key("model", "activation", "str", "MLP activation", "backend.model.mlp", choices=ACTIVATIONS),
        Key("model", "norm", "str", "normalisation before attention and MLP", parameters, choices=("layernorm", "rmsnorm")),
        Key("model", "norm_eps", "float", "added to the variance", "backend.tensor_parallel.norm", above=0),
        Key("model", "position", "str", "how positions enter", parameters, choices=("learned", "rope")),
        Key("model", "rope_theta", "float", "base of the rotary frequencies", rotary, above=0),
        Key("model", "rope_scaling", "str", "how rotary positions are stretched for longer sequences", rotary, choices=ROPE_SCALINGS),
        Key("model", "rope_factor", "float", "times longer than the original sequences", rotary, above=0),
        Key(
            name="rope_original_positions",
            doc="length of the original sequences; 0 is max_positions",
            **{**number, "read_by": "core.model"},
        ),
        Key("model", "rope_low_freq_factor", "float", "llama3: original sequences hold so many turns of a pair that slows down", rotary),
        Key("model", "rope_high_freq_factor", "float", "llama3: and so many of one that does not", rotary, above=0),
        Key("model", "rope_beta_fast", "float", "yarn: turns in an original sequence from which pairs keep their speed", rotary, above=0),
        Key("model", "rope_beta_slow", "float", "yarn: turns up to which they slow down by the factor", rotary, above=0),
        Key("model", "rope_mscale", "float", "yarn: growth of turned queries and keys", rotary, minimum=0),
        Key("model", "rope_mscale_all_dim", "float", "yarn: growth of whole queries and keys", rotary, minimum=0),
        Key("model", "rope_attention_factor", "float", "yarn: the growth itself", rotary, above=0, default_note="from the factor"),
        Key("model", "tied_embeddings", "bool", "output table is the token table", parameters),
        Key("model", "bias", "bool", "bias on every linear layer but router and output head", parameters),
        Key("model", "qkv_bias", "bool", "bias on query, key and value", parameters),
        Key("model", "qk_norm", "bool", "norm of every query and key head", parameters),
        Key(name="num_experts", doc="experts of a MoE layer; 0 is a dense model", read_by=parameters, **number),
        Key(name="experts_per_token", doc="experts that each token takes", read_by="core.program.mlp", **number),
        Key(name="num_shared_experts", doc="experts that every token takes, beside its own", read_by="core.model", **number),
        Key(name="expert_ffn_hidden_size", doc="width of one expert", read_by="core.model", default_note="ffn_hidden_size", **count),
        Key(name="first_dense_layers", doc="layers before the first with experts", read_by="core.model", **number),
        Key(name="router_scores", type="str", doc="what a router makes of its logits", choices=ROUTER_SCORES, **router),
        Key(name="normalized_router_weights", type="bool", doc="a token's chosen scores are divided by their sum", **router),
        Key(name="router_scaling", type="float", doc="times that the experts' results are weighed", above=0, **router),
        Key(name="num_router_groups", type="int", doc="groups of experts that a router chooses first; 0 is none", minimum=0, **router),
        Key(name="router_groups_per_token", type="int", doc="groups whose experts a token may take", minimum=0, **router),
        Key(name="router_group_scores", type="str", doc="score of a group: best, or sum of two best", choices=GROUP_SCORES, **router),
        Key(name="expert_bias", type="bool", doc="a bias per expert, in the choice only, balances them", **router),
        Key(
            name="expert_capacity_factor",
            type="float",
            doc="most of a sequence's choices that an expert takes, over its even share; the others are dropped",
            above=0,
            default_note="no limit",
            **router,
        ),
        Key(name="q_lora_rank", doc="latent attention: rank of the queries; 0 is full rank", read_by=parameters, **number),
        Key(name="kv_lora_rank", doc="latent attention: rank of keys and values; 0 is ordinary attention", read_by=parameters, **number),
        Key(name="qk_nope_head_dim", doc="latent attention: width of a head without positions", read_by=parameters, **number),
        Key(name="qk_rope_head_dim", doc="latent attention: width of a head with rotary positions", read_by=parameters, **number),
        Key(name="v_head_dim", doc="latent attention: width of a value head", read_by="core.model", **number),
        Key(name="sliding_window", doc="tokens that a token attends to, itself the last; 0 is all", read_by="core.model", **number),
        Key(name="padding_rows", doc="last rows of the token table that are no ids and get no probability", read_by=loss, **number),
        Key(name="num_mtp_layers", doc="multi-token-prediction modules after the last layer", read_by=parameters, **number),
        Key(name="hidden_dropout", doc="share of hidden-state elements dropped in training", **share),
        Key(
            name="attention_dropout",
            doc="share of attention probabilities dropped in training",
            **{**share, "read_by": "backend.model.attention_core"},
        ),
    )


def _cluster() -> tuple[Key, ...]:
    rate: dict[str, Any] = {"section": "cluster", "type": "float", "above": 0, "read_by": "simulator.topology"}
    share: dict[str, Any] = {"section": "cluster", "type": "float", "above": 0, "maximum": 1}
    delay: dict[str, Any] = {"section": "cluster", "type": "float", "minimum": 0}
    here, compute, network = "core.plan_build", "simulator.compute", "simulator.network"
    topology, nccl = "simulator.topology", "simulator.nccl"
    return (
        Key("cluster", "preset", "str", "name of a known cluster (this-host if nothing else is said)", here, attribute=None),
        Key("cluster", "file", "path", "a TOML file with a [cluster] section", here, attribute=None),
        Key("cluster", "name", "str", "what reports call the cluster", "simulator.simulate", default_note="custom"),
        Key("cluster", "num_devices", "int", "devices of the run", topology, minimum=1, default_note="tp*cp*dp*pp"),
        Key("cluster", "devices_per_node", "int", "devices behind one node's links", topology, minimum=1),
        Key("cluster", "device_memory_bytes", "float", "memory of one device", "simulator.columns", above=0),
        Key("cluster", "device_memory_bytes_per_s", "float", "memory bandwidth of one device", compute, above=0),
        Key("cluster", "peak_flops_per_s", "table of rates", "dense peak per dtype: fp32 tf32 bf16 fp16 fp8", compute),
        Key(name="matmul_efficiency", doc="share of the peak that large products reach", read_by=compute, **share),
        Key("cluster", "matmul_efficiency_by_dtype", "table of rates", "the same for single dtypes, where it differs", compute),
        Key(name="grouped_matmul_efficiency", doc="rate of grouped products as a share of plain ones", read_by=compute, **share),
        Key(name="attention_forward_efficiency", doc="share of the peak that fused attention reaches, forward", read_by=compute, **share),
        Key(name="attention_backward_efficiency", doc="share of the peak that fused attention reaches, backward", read_by=compute, **share),
        Key(name="memory_efficiency", doc="share of the memory bandwidth that large transfers reach", read_by=compute, **share),
        Key(name="kernel_launch_s", doc="launch and tail of one kernel, on top of its work", read_by=compute, **delay),
        Key(name="kernel_floor_s", doc="least time of the work of one kernel", read_by=compute, **delay),
        Key(name="host_dispatch_s", doc="time the host needs to dispatch one kernel", read_by=compute, **delay),
        Key("cluster", "num_compute_units", "int", "processors of one device that share a product's tiles", compute, minimum=1),
        Key("cluster", "sustained_share_by_dtype", "table of rates", "the same for single dtypes, where it differs", compute),
        Key(
            name="sustained_share",
            doc="share of the product rate that power and clocks leave under training load",
            read_by=compute,
            **share,
        ),
        Key(
            name="attention_half_head_dim",
            doc="head width at which fused attention reaches half the rate of endlessly wide heads",
            read_by=compute,
            **delay,
        ),
        Key("cluster", "product_curve", "table of rates", "measured FLOP/s by FLOPs of one product, for devices without tiles", compute),
        Key("cluster", "memory_curve", "table of rates", "measured bytes/s by bytes of one transfer", compute),
        Key(
            "cluster",
            "kernel_curve",
            "table of rates",
            "measured seconds of kernel-sizes, as calibrate writes them",
            "simulator.host_kernels",
        ),
        Key(name="busy_core_share", doc="share of its rate that a core keeps while all compute", read_by="simulator.host_blocks", **share),
        Key("cluster", "num_cores", "int", "cores that devices share for computing; 0 is one each", "simulator.host_cores", minimum=0),
        Key(
            name="flash_attention_2_share",
            doc="rate of FlashAttention-2 as a share of the best fused kernel",
            read_by="simulator.profiles",
            **share,
        ),
        Key(name="overlap_compute_share", doc="share of its rate that compute keeps while a collective runs", read_by=compute, **share),
        Key(name="node_link_bytes_per_s", doc="links inside a node, per device and direction", **rate),
        Key(name="node_link_latency_s", doc="latency inside a node", read_by=network, **delay),
        Key(name="node_network_bytes_per_s", doc="injection bandwidth of one node, one direction", **rate),
        Key(name="network_latency_s", doc="latency between nodes", read_by=network, **delay),
        Key(name="link_efficiency", doc="share of a link's bandwidth that large messages reach", read_by=topology, **share),
        Key(name="network_efficiency", doc="share of the injection bandwidth that large messages reach", read_by=topology, **share),
        Key("cluster", "nics_per_node", "int", "network cards of a node; 0 is one per device", topology, minimum=0),
        Key("cluster", "nodes_per_leaf", "int", "nodes behind the same leaf switches; 0 is all", topology, minimum=0),
        Key("cluster", "rails", "bool", "card i of every node leads to leaf switch i", topology),
        Key("cluster", "oversubscription", "float", "what enters a leaf switch over what leaves it", network, minimum=1),
        Key(name="leaf_latency_s", doc="what crossing leaf switches adds to the latency", read_by=network, **delay),
        Key("cluster", "collective_library", "str", "who moves the bytes", network, choices=COLLECTIVE_LIBRARIES),
        Key(name="collective_launch_s", doc="launch and tail of the smallest collective", read_by=network, **delay),
        Key(name="collective_ramp_bytes", doc="bytes a device must have under way in a long collective", read_by=nccl, **delay),
        Key("cluster", "ll128_ramp_share", "float", "share of the ramp that LL128 pays", nccl, minimum=0, maximum=1),
        Key(name="channel_bytes_per_s", doc="rate of one channel of a message; 0 is no limit", read_by=nccl, **delay),
        Key("cluster", "nvls_efficiency", "float", "share of the link's rate of sums in the node's switch", nccl, minimum=0, maximum=1),
        Key("cluster", "collective_curve", "table of rates", "measured seconds of operation-ranks-bytes in one node", "simulator.measured"),
        Key("cluster", "sharp", "bool", "sums in the network's switches", nccl),
        Key("cluster", "sources", "table of texts", "where each number comes from", "core.presets_command"),
    )


def _layout() -> tuple[Key, ...]:
    degree: dict[str, Any] = {"section": "layout", "type": "int", "minimum": 1, "read_by": "core.layout"}
    return (
        Key(name="tp", doc="tensor parallelism", **degree),
        Key(name="pp", doc="pipeline parallelism", **degree),
        Key(name="vpp", doc="stages per pipeline rank (interleaving)", **degree),
        Key(name="dp", doc="data parallelism of the dense part", default_note="num_devices / (tp*cp*pp)", **degree),
        Key(name="cp", doc="context parallelism", **degree),
        Key(name="ep", doc="expert parallelism", **degree),
        Key(name="etp", doc="tensor parallelism of experts", default_note="tp", **degree),
        Key("layout", "sequence_parallel", "bool", "shard norms and residuals along the sequence inside tp groups", "core.program.tensors"),
        Key("layout", "zero", "int", "ZeRO stage 0..3: what data parallelism shards", "core.program.gradients", minimum=0, maximum=3),
        Key("layout", "order", "str", "order of ranks; the leftmost axis varies fastest", "core.layout"),
        Key("layout", "stages", "str", 'uneven stages, e.g. "Et*11|(t*12|)*6t*13L"', "core.stages", default_note="an even cut"),
    )


def _runtime() -> tuple[Key, ...]:
    switch: dict[str, Any] = {"section": "runtime", "type": "bool", "read_by": "simulator.profiles", "default_note": "as the profile"}
    doc = "one kernel, or products with scores in memory"
    return (
        Key(
            "runtime",
            "profile",
            "str",
            "whose memory and overlap behaviour is modelled",
            "simulator.profiles",
            choices=PROFILES,
        ),
        Key(name="attention", doc=doc, choices=("fused", "flash-1", "flash-2", "triton", "unfused"), **{**switch, "type": "str"}),
        Key(name="compile", doc="a compiler fuses elementwise kernels", **switch),
        Key(name="tp_comm_overlap", doc="tensor-parallel collectives run beside products", **switch),
        Key(name="p2p_overlap", doc="messages between stages run beside products", **switch),
        Key(name="cuda_graphs", doc="the kernels of an action are launched as one", **switch),
        Key(name="ep_comm_overlap", doc="tokens travel between experts beside another microbatch's products", **switch),
        Key(
            name="context_parallel",
            doc="how keys and values reach the ranks that have other parts of a sequence",
            choices=("all_gather", "ring"),
            **{**switch, "type": "str", "read_by": "core.program.attention"},
        ),
        Key(name="dispatch_once", doc="a token goes once to each node (or device of a node), not to each of its experts", **switch),
        Key(name="scatter_gather", doc="messages that all tp ranks hold cross nodes in tp parts", **switch),
        Key(name="launch_blocking", doc="the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)", **switch),
        Key(name="fused_loss", doc="the loss keeps no fp32 softmax", **{**switch, "read_by": "simulator.memory_profiles"}),
    )


def _data_parallel() -> tuple[Key, ...]:
    more: dict[str, Any] = {"section": "data_parallel", "read_by": "simulator.profiles", "default_note": "as the profile"}
    return (
        Key(name="overlap_grad_reduce", type="bool", doc="gradients are reduced under the last backward passes", **more),
        Key(name="overlap_param_gather", type="bool", doc="parameters are gathered under the first forward passes", **more),
        Key(name="bucket_bytes", type="int", minimum=1, doc="gradients that are reduced at a time", **more),
        Key(
            name="shard",
            type="int",
            minimum=1,
            doc="ranks that ZeRO shards over (hybrid sharding)",
            **{**more, "read_by": "core.program.holdings", "default_note": "all data-parallel ranks"},
        ),
    )


def _choices() -> tuple[Key, ...]:
    block: dict[str, Any] = {"section": "numerics", "type": "int", "minimum": 1, "read_by": "core.plan"}
    profiles, profile, scale = "simulator.profiles", "as the profile", "backend.loss_scale"
    return (
        *_runtime(),
        Key("batch", "global", "int", "sequences per optimizer step", "core.plan", minimum=1, attribute="global_size"),
        Key("batch", "micro", "int", "sequences per microbatch", "core.plan", minimum=1, attribute="micro_size", default_note="1"),
        Key("batch", "sequence", "int", "tokens per sequence", "core.program.tensors", minimum=1),
        Key("precision", "dtype", "str", "number format of products", "core.program.tensors", choices=("fp32", "bf16", "fp16", "fp8")),
        Key("precision", "gradient_dtype", "str", "format of reduced gradients", profiles, choices=("fp32", "bf16"), default_note=profile),
        Key("precision", "loss_scale", "float", "with fp16: factor of the loss", scale, above=0, default_note="adapts itself"),
        Key("precision", "initial_loss_scale", "float", "with fp16: the factor that adapting begins with", scale, above=0),
        Key("precision", "min_loss_scale", "float", "with fp16: the smallest factor", scale, above=0),
        Key("precision", "loss_scale_window", "int", "with fp16: steps without an overflow until the factor doubles", scale, minimum=1),
        Key("precision", "loss_scale_hysteresis", "int", "with fp16: overflows until the factor halves", scale, minimum=1),
        Key(
            "recompute",
            "mode",
            "str",
            "what the backward pass computes again",
            "core.program.recompute",
            choices=("none", "selective", "full"),
        ),
        Key(
            "recompute",
            "num_layers",
            "int",
            "with full: so many layers of each stage",
            "core.program.recompute",
            minimum=0,
            default_note="all",
        ),
        Key("recompute", "layers", "list of ints", "with full: only these layers", "core.program.recompute", default_note="all"),
        Key("recompute", "distribute", "bool", "with full: tensor-parallel ranks keep a part of each input", "core.program.recompute"),
        Key(
            "recompute", "modules", "list of texts", "with selective: parts of a layer", "core.program.recompute", choices=RECOMPUTE_MODULES
        ),
        Key("schedule", "name", "str", "pipeline schedule", "core.schedules.catalog", choices=tuple(CATALOG)),
        Key("schedule", "file", "path", "a schedule CSV instead of a name", "core.schedules.catalog"),
        Key(
            "schedule",
            "max_active_stages",
            "int",
            "zero=3 gathers whole stages, so many at a time",
            "core.schedules.catalog",
            minimum=1,
            default_note="layer by layer",
        ),
        Key("numerics", "mode", "str", "exact: bits independent of the layout", "backend.numerics", choices=("fast", "exact")),
        Key(name="gradient_token_block", doc="tokens per leaf of weight gradients", default_note="128, at most the sequence", **block),
        Key(name="reduction_token_block", doc="tokens per leaf of norm and bias gradients", default_note="32, at most the former", **block),
        Key(name="ffn_block", doc="MLP units per leaf", default_note="fine enough for every tp up to 8", **block),
        Key(name="vocab_block", doc="vocabulary rows per leaf", default_note="fine enough for every tp up to 8", **block),
    )


def _training() -> tuple[Key, ...]:
    adamw, rank, loss = "backend.optimizer", "backend.training_rank", "backend.tensor_parallel.cross_entropy"
    router: dict[str, Any] = {"section": "train", "type": "float", "minimum": 0, "read_by": "backend.model.router"}
    return (
        Key("optimizer", "name", "str", "the optimizer", adamw, choices=("adamw",)),
        Key("optimizer", "betas", "two floats", "decay of the moment estimates", adamw, minimum=0, below=1),
        Key("optimizer", "eps", "float", "added to the root of the second moment", adamw, above=0),
        Key("optimizer", "weight_decay", "float", "decoupled weight decay", adamw, minimum=0),
        Key("optimizer", "clip_grad_norm", "float", "largest global gradient norm; 0 turns clipping off", rank, minimum=0),
        Key("train", "steps", "int", "optimizer steps", "backend.trainer", minimum=0),
        Key("train", "data", "path", "a text file, a folder, or python-stdlib", rank),
        Key("train", "load", "path", "a Hugging Face folder (config.json, safetensors): its weights", rank, default_note="drawn from seed"),
        Key("train", "seed", "int", "seed of weights and data order", rank, minimum=0),
        Key("train", "learning_rate", "float", "constant learning rate", rank, minimum=0),
        Key("train", "packed", "bool", "attention and positions begin again with every document", "backend.training_rank"),
        Key(
            "train",
            "ignore_token",
            "int",
            "an id that is not learned: tokens with this target count for nothing",
            loss,
            minimum=0,
            default_note="all count",
        ),
        Key("train", "mtp_loss_weight", "float", "weight of multi-token prediction's mean loss", "backend.model.multi_token", minimum=0),
        Key("train", "label_smoothing", "float", "share of the target spread over the whole vocabulary", loss, minimum=0, below=1),
        Key("train", "z_loss", "float", "factor of (log Z)^2 in every token's loss, Z the sum of exp(logits)", loss, minimum=0),
        Key(name="router_aux_loss", doc="factor of the loss for unequally busy experts, per sequence", **router),
        Key(name="router_z_loss", doc="factor of (log Z)^2 of every router's logits", **router),
        Key(name="router_jitter", doc="a router's inputs are scaled by up to 1 - and 1 + this", below=1, **router),
        Key(name="expert_bias_rate", doc="what a step adds to or takes from an expert's bias", **{**router, "read_by": rank}),
        Key("train", "timeout_s", "float", "without any rank ending an action, after which all are ended", "backend.trainer", above=0),
    )


def _checkpoint() -> tuple[Key, ...]:
    count: dict[str, Any] = {"section": "checkpoint", "type": "int", "minimum": 1, "read_by": "backend.checkpoint.saver"}
    return (
        Key(
            "checkpoint",
            "folder",
            "path",
            "where training saves what it can go on from",
            "backend.checkpoint.resume",
            default_note="nowhere",
        ),
        Key(name="every", doc="steps between two checkpoints", default_note="one after the last step", **count),
        Key(name="keep", doc="how many of the newest stay", default_note="all", **count),
    )


def _variation() -> tuple[Key, ...]:
    variation, columns, links, loads, goodput = (
        f"simulator.{name}" for name in ("variation", "columns", "link_shares", "expert_load", "goodput")
    )
    number: dict[str, Any] = {"section": "variation", "type": "float", "minimum": 0}
    spread: dict[str, Any] = {**number, "below": 1, "read_by": variation}
    return (
        Key("variation", "stragglers", "table of rates", "device-17, device-8-15 or node-2: times longer it computes", columns),
        Key("variation", "device_classes", "table of texts", "cluster preset: devices of that kind, as node-4-7, device-3", columns),
        Key("variation", "slow_links", "table of rates", "device-17, card-3-1, node-3 or leaf-0-1: share of its rate left", links),
        Key("variation", "failed_links", "str", "links of which nothing is left, as card-3-1, leaf-0-2", links),
        Key("variation", "seed", "int", "seed of everything that is drawn", variation, minimum=0),
        Key("variation", "samples", "int", "steps that are drawn", variation, minimum=0, maximum=100_000),
        Key(name="jitter", doc="relative standard deviation of one compute action on one device", **spread),
        Key(name="comm_jitter", doc="relative standard deviation of one message or reduction", **spread),
        Key(name="device_spread", doc="relative standard deviation of a device's speed for a whole step", **spread),
        Key("variation", "distribution", "str", "shape of jitter and spread, with mean 1", variation, choices=DISTRIBUTIONS),
        Key(name="hiccups_per_s", doc="long pauses of one device in a second of computing", read_by=variation, **number),
        Key(name="hiccup_s", doc="shortest pause", read_by=variation, **number),
        Key("variation", "hiccup_shape", "float", "exponent of the pauses' lengths (Pareto)", variation, above=1),
        Key(
            name="expert_imbalance",
            doc="relative standard deviation of the tokens that experts expect; 0 is the draw's chance alone",
            read_by=loads,
            default_note="all equally busy",
            **number,
        ),
        Key("variation", "expert_capacity", "float", "an expert's tokens over its fair share", loads, above=0, default_note="no limit"),
        Key("variation", "device_mtbf_s", "float", "time between failures of one device", goodput, above=0, default_note="no failures"),
        Key(name="checkpoint_s", doc="time that a checkpoint stops training", read_by=goodput, **number),
        Key(
            name="checkpoint_every_s",
            doc="work between checkpoints",
            read_by=goodput,
            default_note="the best (Daly 2006)",
            section="variation",
            type="float",
            above=0,
        ),
        Key(name="restart_s", doc="time from a failure until training goes on", read_by=goodput, **number),
    )


KEYS: tuple[Key, ...] = _model() + _cluster() + _layout() + _choices() + _training() + _checkpoint() + _data_parallel() + _variation()
"""Every key of a plan file."""


def keys_of(section: str) -> dict[str, Key]:
    """The keys of one section by name."""
    return {key.name: key for key in KEYS if key.section == section}


def key_named(dotted: str) -> Key:
    """The key `section.name`. Raises KeyError."""
    section, _, name = dotted.partition(".")
    return keys_of(section)[name]
