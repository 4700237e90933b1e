"""The keys that choose how a step is computed: layout, batch, precision, recomputation, schedule,
numerics, data parallelism."""

from __future__ import annotations

from typing import Any

from ...schedule import CATALOG
from ..sections import RECOMPUTE_MODULES
from .key import Key


def layout_keys() -> tuple[Key, ...]:
    """Of `[layout]`."""
    degree: dict[str, Any] = {"section": "layout", "type": "int", "minimum": 1, "read_by": "core.layout.layout"}
    return (
        Key(name="tp", doc="tensor parallelism", **degree),
        Key(name="pp", doc="pipeline parallelism", **degree),
        Key(name="vpp", doc="stages per pipeline rank (interleaving)", **degree),
        Key(name="dp", doc="data parallelism of the dense part", default_note="num_devices / (tp*cp*pp)", **degree),
        Key(name="cp", doc="context parallelism", **degree),
        Key(name="ep", doc="expert parallelism", **degree),
        Key(name="etp", doc="tensor parallelism of experts", default_note="tp", **degree),
        Key(
            "layout",
            "sequence_parallel",
            "bool",
            ("shard norms and residuals along the sequence inside tp groups"),
            "core.program.tensors",
        ),
        Key(
            "layout",
            "zero",
            "int",
            "ZeRO stage 0..3: what data parallelism shards",
            "core.program.gradients",
            minimum=0,
            maximum=3,
        ),
        Key("layout", "order", "str", "order of ranks; the leftmost axis varies fastest", "core.layout.layout"),
        Key(
            "layout",
            "stages",
            "str",
            'uneven stages, e.g. "Et*11|(t*12|)*6t*13L"',
            "core.layout.stages",
            default_note="an even cut",
        ),
    )


def choices_keys() -> tuple[Key, ...]:
    """Of batch, precision, recomputation, schedule and numerics."""
    block: dict[str, Any] = {"section": "numerics", "type": "int", "minimum": 1, "read_by": "core.plan.plan"}
    profiles, profile, scale = "simulator.stack.profiles", "as the profile", "backend.base.loss_scale"
    return (
        Key(
            "batch",
            "global",
            "int",
            "sequences per optimizer step",
            "core.plan.plan",
            minimum=1,
            attribute="global_size",
        ),
        Key(
            "batch",
            "micro",
            "int",
            "sequences per microbatch",
            "core.plan.plan",
            minimum=1,
            attribute="micro_size",
            default_note="1",
        ),
        Key("batch", "sequence", "int", "tokens per sequence", "core.program.tensors", minimum=1),
        Key(
            "precision",
            "dtype",
            "str",
            "number format of products",
            "core.program.tensors",
            choices=("fp32", "bf16", "fp16", "fp8"),
        ),
        Key(
            "precision",
            "gradient_dtype",
            "str",
            "format of reduced gradients",
            profiles,
            choices=("fp32", "bf16"),
            default_note=profile,
        ),
        Key(
            "precision",
            "loss_scale",
            "float",
            "with fp16: factor of the loss",
            scale,
            above=0,
            default_note="adapts itself",
        ),
        Key(
            "precision",
            "initial_loss_scale",
            "float",
            ("with fp16: the factor that adapting begins with"),
            scale,
            above=0,
        ),
        Key("precision", "min_loss_scale", "float", "with fp16: the smallest factor", scale, above=0),
        Key(
            "precision",
            "loss_scale_window",
            "int",
            ("with fp16: steps without an overflow until the factor doubles"),
            scale,
            minimum=1,
        ),
        Key(
            "precision",
            "loss_scale_hysteresis",
            "int",
            ("with fp16: overflows until the factor halves"),
            scale,
            minimum=1,
        ),
        Key(
            "precision",
            "scaling",
            "str",
            "with fp8 in torchtitan: how far a scale reaches",
            "simulator.stack.profiles",
            choices=("tensor", "row", "block"),
            default_note="tensor",
        ),
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
        Key(
            "recompute",
            "layers",
            "list of ints",
            "with full: only these layers",
            "core.program.recompute",
            default_note="all",
        ),
        Key(
            "recompute",
            "distribute",
            "bool",
            ("with full: tensor-parallel ranks keep a part of each input"),
            "core.program.recompute",
        ),
        Key(
            "recompute",
            "modules",
            "list of texts",
            "with selective: parts of a layer",
            "core.program.recompute",
            choices=RECOMPUTE_MODULES,
        ),
        Key("schedule", "name", "str", "pipeline schedule", "core.plan.schedule_choice", choices=tuple(CATALOG)),
        Key("schedule", "file", "path", "a schedule CSV instead of a name", "core.plan.schedule_choice"),
        Key(
            "schedule",
            "max_active_stages",
            "int",
            "zero=3 gathers whole stages, so many at a time",
            "core.plan.schedule_choice",
            minimum=1,
            default_note="layer by layer",
        ),
        Key(
            "numerics",
            "mode",
            "str",
            "exact: bits independent of the layout",
            "backend.numerics",
            choices=("fast", "exact"),
        ),
        Key(
            name="gradient_token_block",
            doc="tokens per leaf of weight gradients",
            default_note=("128, at most the sequence"),
            **block,
        ),
        Key(
            name="reduction_token_block",
            doc="tokens per leaf of norm and bias gradients",
            default_note="32, at most the former",
            **block,
        ),
        Key(name="ffn_block", doc="MLP units per leaf", default_note="fine enough for every tp up to 8", **block),
        Key(
            name="vocab_block",
            doc="vocabulary rows per leaf",
            default_note=("fine enough for every tp up to 8"),
            **block,
        ),
    )


def data_parallel_keys() -> tuple[Key, ...]:
    """Of `[data_parallel]`."""
    more: dict[str, Any] = {
        "section": "data_parallel",
        "read_by": "simulator.stack.profiles",
        "default_note": "as the profile",
    }
    return (
        Key(
            name="overlap_grad_reduce",
            type="bool",
            doc=("gradients are reduced under the last backward passes"),
            **more,
        ),
        Key(
            name="overlap_param_gather",
            type="bool",
            doc=("parameters are gathered under the first forward passes"),
            **more,
        ),
        Key(name="bucket_bytes", type="int", minimum=1, doc="gradients that are reduced at a time", **more),
        Key(
            name="check_gradients",
            type="bool",
            doc=("the host waits for each bucket to be looked through for NaN"),
            **more,
        ),
        Key(
            name="shard",
            type="int",
            minimum=1,
            doc="ranks that ZeRO shards over (hybrid sharding)",
            **{**more, "read_by": "core.program.holdings", "default_note": "all data-parallel ranks"},
        ),
        Key(
            "data_parallel",
            "library",
            "str",
            "with zero=2 or 3: whose code keeps parameters in parts (torch: its fully_shard, FSDP2)",
            "backend.ranks.training_rank",
            choices=("shardproof", "torch"),
        ),
    )
