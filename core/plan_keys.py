"""The keys of a plan file, as one table: section, name, type, legal values, meaning, and the module that reads the value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .cluster import ClusterSpec
from .layout import Layout
from .model import ModelSpec
from .plan import Batch, Numerics, Optimizer, Precision, Recompute, Runtime, ScheduleChoice, Train
from .schedules import CATALOG

KeyType = Literal["int", "float", "bool", "str", "path", "two floats", "table of rates", "table of texts"]

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
    "train": Train,
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
            return " | ".join(self.choices)
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
    here, parameters = "core.plan_build", "core.parameters"
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
        Key("model", "activation", "str", "MLP activation", "backend.model.mlp", choices=("gelu", "gelu_tanh", "swiglu", "relu_squared")),
        Key("model", "norm", "str", "normalisation before attention and MLP", parameters, choices=("layernorm", "rmsnorm")),
        Key("model", "norm_eps", "float", "added to the variance", "backend.tensor_parallel.norm", above=0),
        Key("model", "position", "str", "how positions enter", parameters, choices=("learned", "rope")),
        Key("model", "rope_theta", "float", "base of the rotary frequencies", "backend.model.attention", above=0),
        Key("model", "tied_embeddings", "bool", "output table is the token table", parameters),
        Key("model", "bias", "bool", "bias on every linear layer but the output head", parameters),
    )


def _cluster() -> tuple[Key, ...]:
    rate: dict[str, Any] = {"section": "cluster", "type": "float", "above": 0, "read_by": "simulator.network"}
    share: dict[str, Any] = {"section": "cluster", "type": "float", "above": 0, "maximum": 1}
    delay: dict[str, Any] = {"section": "cluster", "type": "float", "minimum": 0}
    here, compute, network = "core.plan_build", "simulator.compute", "simulator.network"
    return (
        Key("cluster", "preset", "str", "name of a known cluster (this-host if nothing else is said)", here, attribute=None),
        Key("cluster", "file", "path", "a TOML file with a [cluster] section", here, attribute=None),
        Key("cluster", "name", "str", "what reports call the cluster", "simulator.simulate", default_note="custom"),
        Key("cluster", "num_devices", "int", "devices of the run", network, minimum=1, default_note="tp*cp*dp*pp"),
        Key("cluster", "devices_per_node", "int", "devices behind one node's links", network, minimum=1),
        Key("cluster", "device_memory_bytes", "float", "memory of one device", "simulator.fit", above=0),
        Key("cluster", "device_memory_bytes_per_s", "float", "memory bandwidth of one device", compute, above=0),
        Key("cluster", "peak_flops_per_s", "table of rates", "dense peak per dtype: fp32 tf32 bf16 fp16 fp8", compute),
        Key(name="matmul_efficiency", doc="share of the peak that large products reach", read_by=compute, **share),
        Key(name="memory_efficiency", doc="share of the memory bandwidth that large transfers reach", read_by=compute, **share),
        Key(name="kernel_launch_s", doc="least time of one kernel", read_by=compute, **delay),
        Key(name="node_link_bytes_per_s", doc="links inside a node, per device and direction", **rate),
        Key(name="node_link_latency_s", doc="latency inside a node", read_by=network, **delay),
        Key(name="node_network_bytes_per_s", doc="injection bandwidth of one node, one direction", **rate),
        Key(name="network_latency_s", doc="latency between nodes", read_by=network, **delay),
        Key(name="link_efficiency", doc="share of a link's bandwidth that large messages reach", read_by=network, **share),
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
        Key("layout", "sequence_parallel", "bool", "shard norms and residuals along the sequence inside tp groups", "core.program"),
        Key("layout", "zero", "int", "ZeRO stage 0..3: what data parallelism shards", "core.program", minimum=0, maximum=3),
        Key("layout", "order", "str", "order of ranks; the leftmost axis varies fastest", "core.layout"),
        Key("layout", "stages", "str", 'uneven stages, e.g. "Et*11|(t*12|)*6t*13L"', "core.stages", default_note="an even cut"),
    )


def _choices() -> tuple[Key, ...]:
    block: dict[str, Any] = {"section": "numerics", "type": "int", "minimum": 1, "read_by": "core.plan"}
    return (
        Key("runtime", "profile", "str", "whose memory and overlap behaviour is modelled", "simulator.simulate", choices=("shardproof",)),
        Key("batch", "global", "int", "sequences per optimizer step", "core.plan", minimum=1, attribute="global_size"),
        Key("batch", "micro", "int", "sequences per microbatch", "core.plan", minimum=1, attribute="micro_size", default_note="1"),
        Key("batch", "sequence", "int", "tokens per sequence", "core.program", minimum=1),
        Key("precision", "dtype", "str", "number format of products", "core.program", choices=("fp32", "bf16", "fp16", "fp8")),
        Key("recompute", "mode", "str", "what the backward pass computes again", "core.program", choices=("none", "selective", "full")),
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
    adamw, rank = "backend.optimizer", "backend.training_rank"
    return (
        Key("optimizer", "name", "str", "the optimizer", adamw, choices=("adamw",)),
        Key("optimizer", "betas", "two floats", "decay of the moment estimates", adamw, minimum=0, below=1),
        Key("optimizer", "eps", "float", "added to the root of the second moment", adamw, above=0),
        Key("optimizer", "weight_decay", "float", "decoupled weight decay", adamw, minimum=0),
        Key("optimizer", "clip_grad_norm", "float", "largest global gradient norm; 0 turns clipping off", rank, minimum=0),
        Key("train", "steps", "int", "optimizer steps", "backend.trainer", minimum=0),
        Key("train", "data", "path", "a text file, a folder, or python-stdlib", rank),
        Key("train", "seed", "int", "seed of weights and data order", rank, minimum=0),
        Key("train", "learning_rate", "float", "constant learning rate", rank, minimum=0),
    )


KEYS: tuple[Key, ...] = _model() + _cluster() + _layout() + _choices() + _training()
"""Every key of a plan file."""


def keys_of(section: str) -> dict[str, Key]:
    """The keys of one section by name."""
    return {key.name: key for key in KEYS if key.section == section}


def key_named(dotted: str) -> Key:
    """The key `section.name`. Raises KeyError."""
    section, _, name = dotted.partition(".")
    return keys_of(section)[name]
