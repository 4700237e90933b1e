"""A plan -> a script of Megatron-LM's arguments, by the same table that reads them.

What the script cannot say is found by reading it again.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from ..model.model import ModelSpec
from ..plan.keys import key_named, keys_of
from ..plan.plan import Plan, build_plan
from .account import Request
from .differences import lost_keys
from .exported import Exported
from .megatron_attention import attention_lines
from .megatron_data import data_lines
from .megatron_flags import UNDER, Direct
from .megatron_meaning import imported_from
from .megatron_optimizer import optimizer_lines
from .megatron_positions import yarn_lines
from .megatron_rates import rate_lines

FILE = "pretrain.sh"

_AS_PROFILE = {
    "data_parallel.overlap_grad_reduce": True,
    "data_parallel.overlap_param_gather": True,
    "data_parallel.check_gradients": True,
    "runtime.fused_loss": True,
}
"""What the profile of Megatron-Core has where a plan leaves it open and Megatron's arguments would not."""

_WHY = {
    "cluster": "Megatron's arguments do not name hardware",
    "variation": "Megatron's arguments do not say how devices differ",
    "checkpoint": "its checkpoints are written otherwise",
    "log": "what a run shows of its steps changes none of them",
    "experimental": "it is about what our own backend has not yet proved in use",
    "numerics": "its sums have no fixed order",
    "communicators": "it takes them from a file",
    "train": "its training does not have it, or takes it otherwise",
    "schedule": "Megatron runs 1F1B and Interleaved1F1B",
    "runtime": "what Megatron does here is not an argument of it",
    "runtime.profile": "the script is for Megatron-Core with Transformer Engine",
    "model.router_bias": "its routers have a bias where other products have one, since core 0.15",
    "model.name": "its arguments do not name the model",
}


def write(plan: Plan) -> Exported:
    """The script, and the keys that it cannot say. Raises `PlanError` where what it says is no plan at all."""
    text = script(plan)
    again = build_plan(imported_from(Request(text, FILE)).values, FILE)
    lost = [*lost_keys(plan, again, _WHY, "Megatron-LM has no argument for it"), *_of_a_fork(plan.model)]
    return Exported("megatron", ((FILE, text),), tuple(each for each in lost if not _is_left_open(plan, each[0])))


def _of_a_fork(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """The keys whose arguments bigscience's fork has, and Megatron-LM has not."""
    if model.position == "alibi":
        yield "model.position", "--position-embedding-type alibi is of bigscience's Megatron-DeepSpeed"
    if model.embedding_norm:
        yield "model.embedding_norm", "--embed-layernorm is of bigscience's Megatron-DeepSpeed"


def _is_left_open(plan: Plan, dotted: str) -> bool:
    """True for a key that the plan leaves to its profile, as a script does that says nothing of it."""
    section, _, name = dotted.partition(".")
    attribute = keys_of(section)[name].attribute
    return attribute is not None and getattr(getattr(plan, section), attribute) is None


def script(plan: Plan) -> str:
    """The launcher's command with all arguments, one on a line."""
    per_node = min(plan.cluster.devices_per_node, plan.cluster.num_devices)
    nodes = plan.cluster.num_devices // per_node
    lines = [f"torchrun --nnodes {nodes} --nproc-per-node {per_node} pretrain_gpt.py", *arguments(plan)]
    return "#!/bin/bash\n" + " \\\n    ".join(lines) + "\n"


def arguments(plan: Plan) -> list[str]:
    """Argument lines, each a flag with its values."""
    found = [
        *_rows(plan, UNDER[""]),
        *_model(plan.model),
        *_positions(plan, plan.model),
        *_experts(plan, plan.model),
        *_layout(plan),
        *_context(plan),
        *_batch(plan),
        *_precision(plan),
        *_recompute(plan),
        *_runtime(plan),
        *data_lines(plan),
    ]
    return [" ".join([flag, *(shlex.quote(_shown(value)) for value in values)]) for flag, *values in found]


Line = tuple[Any, ...]


def _shown(value: Any) -> str:
    if isinstance(value, float):  # some of Megatron's numbers, such as --rotary-base, have to be whole
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return str(value)


def _rows(plan: Plan, rows: tuple[Direct, ...]) -> Iterator[Line]:
    """The flags of one key each."""
    for row in rows:
        section, _, name = row.key.partition(".")
        if row.key in ("layout.ep", "layout.etp") and not plan.model.is_moe:
            continue
        key = key_named(row.key)
        value = getattr(getattr(plan, section), key.attribute or name)
        if value is None and (row.key != "data_parallel.overlap_param_gather" or plan.layout.zero):
            value = _AS_PROFILE.get(row.key)
        if value is None:
            continue
        if row.key == "model.bias":
            value = _has_biases(plan.model)
        if row.kind in ("on", "off"):
            if value == (row.kind == "on"):
                yield (row.flag,)
        elif key.required or row.flag == "--lr" or value != (key.default if row.default is None else row.default):
            yield row.flag, value


def _has_biases(model: ModelSpec) -> bool:
    """Whether Megatron's layers have the biases of the model: of latent attention only its output product has one."""
    return model.bias or (model.is_mla and model.attention_output_bias and model.mlp_bias)


def _model(model: ModelSpec) -> Iterator[Line]:
    has_biases = _has_biases(model)
    yield "--ffn-hidden-size", model.ffn_hidden_size
    yield "--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"
    if model.activation == "swiglu":
        yield ("--swiglu",)
    elif model.activation == "relu_squared":
        yield ("--squared-relu",)
    elif model.activation == "quick_geglu":
        yield ("--quick-geglu",)
        if model.gate_limit is not None:
            yield "--activation-func-clamp-value", model.gate_limit
    elif model.activation == "gelu" and has_biases:
        yield ("--no-bias-gelu-fusion",)
    elif model.activation == "gelu_tanh" and not has_biases:
        yield ("--openai-gelu",)
    if model.gate_offset:
        yield "--glu-linear-offset", model.gate_offset
    if model.norm_offset == 1:
        yield ("--apply-layernorm-1p",)
    if model.is_mla:
        yield ("--multi-latent-attention",)
        for row in UNDER["--multi-latent-attention"]:
            value = getattr(model, row.key.partition(".")[2])
            if value:
                yield row.flag, value
        yield ("--qk-layernorm",)
    else:
        yield "--kv-channels", model.head_dim
        if model.num_kv_heads != model.num_heads:
            yield ("--group-query-attention",)
            yield "--num-query-groups", model.num_kv_heads
    if model.qkv_bias and not model.bias:
        yield ("--add-qkv-bias",)
    yield from attention_lines(model)


def _positions(plan: Plan, model: ModelSpec) -> Iterator[Line]:
    stretched = model.rope_scaling == "yarn" and not model.is_mla
    kind = "learned_absolute" if model.position == "learned" else "yarn" if stretched else model.position
    yield "--position-embedding-type", kind
    if model.embedding_norm:
        yield ("--embed-layernorm",)
    if model.position == "rope":
        yield from _rows(plan, UNDER["rotary positions"])
    factor = int(model.rope_factor) if model.rope_factor.is_integer() else model.rope_factor
    if model.rope_scaling == "yarn":
        yield from yarn_lines(model)
    elif model.is_mla:
        yield "--rope-type", "rope"
    elif model.rope_scaling == "linear" and isinstance(factor, int):
        yield "--rotary-seq-len-interpolation-factor", factor
    elif model.rope_scaling == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", factor


def _experts(plan: Plan, model: ModelSpec) -> Iterator[Line]:
    if model.num_mtp_layers:
        yield "--mtp-num-layers", model.num_mtp_layers
        yield from _rows(plan, UNDER["--mtp-num-layers"])
    if not model.is_moe:
        return
    yield "--num-experts", model.num_experts
    yield from _rows(plan, UNDER["--num-experts"])
    dense = model.first_dense_layers
    if model.expert_layer_step > 1:
        yield "--moe-layer-freq", str([int(model.layer_is_moe(layer)) for layer in range(model.num_layers)])
    elif dense:
        yield "--moe-layer-freq", f"([0]*{dense}+[1]*{model.num_layers - dense})"
    if model.num_shared_experts:
        yield "--moe-shared-expert-intermediate-size", model.shared_expert_width
    if model.shared_expert_gate:
        yield ("--moe-shared-expert-gate",)
    yield "--moe-router-score-function", model.router_scores
    if model.router_scores == "softmax" and not model.normalized_router_weights:
        yield ("--moe-router-pre-softmax",)
    loss = plan.train.router_aux_loss
    yield "--moe-router-load-balancing-type", "seq_aux_loss" if loss else "none"
    if loss:
        yield "--moe-aux-loss-coeff", loss
    if plan.runtime.dispatch_once:
        yield "--moe-token-dispatcher-type", "flex"
        yield ("--moe-enable-deepep",)
    else:
        yield "--moe-token-dispatcher-type", "alltoall"


def _layout(plan: Plan) -> Iterator[Line]:
    layout = plan.layout
    if layout.sequence_parallel and layout.tp > 1:
        yield ("--sequence-parallel",)
    if layout.stages is not None:
        yield "--pipeline-model-parallel-layout", layout.stages
    elif layout.vpp > 1:
        yield "--num-virtual-stages-per-pipeline-rank", layout.vpp
    if layout.order == "tp-cp-ep-pp-dp":
        yield ("--use-tp-pp-dp-mapping",)
    if layout.zero == 1 and plan.runtime.profile != "megatron-fsdp":
        yield ("--use-distributed-optimizer",)
        if plan.data_parallel.shard is not None:
            yield "--num-distributed-optimizer-instances", layout.dp * layout.cp // plan.data_parallel.shard
    elif layout.zero or plan.runtime.profile == "megatron-fsdp":
        names = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", names[layout.zero]
    if plan.runtime.p2p_overlap is False and layout.vpp > 1:
        yield ("--no-overlap-p2p-communication",)


def _context(plan: Plan) -> Iterator[Line]:
    layout, exchanged = plan.layout, plan.runtime.context_parallel
    if layout.cp > 1 and layout.cp_inner == layout.cp:
        yield "--cp-comm-type", "a2a"
    elif layout.cp_inner > 1:
        yield "--cp-comm-type", "a2a+p2p"
        yield "--hierarchical-context-parallel-sizes", layout.cp_inner, layout.cp_outer
    elif exchanged is not None:
        yield "--cp-comm-type", "p2p" if exchanged == "ring" else "all_gather"


def _batch(plan: Plan) -> Iterator[Line]:
    yield "--global-batch-size", plan.batch.global_size
    yield from rate_lines(plan)
    yield from optimizer_lines(plan)
    rows, tp = plan.model.vocab_size, plan.layout.tp
    yield "--tokenizer-type", "NullTokenizer"
    yield "--vocab-size", rows
    yield "--make-vocab-size-divisible-by", math.gcd(rows // tp if rows % tp == 0 else 1, 128)


def _precision(plan: Plan) -> Iterator[Line]:
    precision = plan.precision
    if precision.dtype in ("bf16", "fp8"):
        yield ("--bf16",)
    if precision.dtype == "fp8":
        yield "--fp8-format", "hybrid"
        recipe = {"replicas": "delayed", "none": "tensorwise"}.get(plan.runtime.amax_reduction or "")
        if recipe is not None:
            yield "--fp8-recipe", recipe
    if precision.dtype == "fp16":
        yield ("--fp16",)
        adapts = precision.loss_scale is None
        yield from _rows(plan, tuple(row for row in UNDER["--fp16"] if adapts or row.flag == "--loss-scale"))
    if precision.gradient_dtype == "bf16":
        yield ("--grad-reduce-in-bf16",)
    elif precision.gradient_dtype == "fp32":
        yield ("--accumulate-allreduce-grads-in-fp32",)


def _recompute(plan: Plan) -> Iterator[Line]:
    recompute = plan.recompute
    if recompute.mode == "none" or recompute.layers is not None:
        return
    yield "--recompute-granularity", recompute.mode
    if recompute.mode == "selective":
        yield "--recompute-modules", *("layernorm" if name == "norm" else name for name in recompute.modules)
        return
    if recompute.num_layers is None:
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", 1
    else:
        yield "--recompute-method", "block"
        yield "--recompute-num-layers", recompute.num_layers
    if recompute.distribute:
        yield ("--distribute-saved-activations",)


def _runtime(plan: Plan) -> Iterator[Line]:
    runtime = plan.runtime
    if runtime.attention is not None:
        yield "--attention-backend", "unfused" if runtime.attention == "unfused" else "fused"
    if runtime.cuda_graphs is not None:
        yield "--cuda-graph-impl", "local" if runtime.cuda_graphs else "none"
    if (bucket := plan.data_parallel.bucket_bytes) is not None and bucket % 4 == 0:
        yield "--ddp-bucket-size", bucket // 4
    if plan.communicators.high_priority:
        names = {"etp": "expt_tp", "edp": "expt_dp"}
        yield "--high-priority-stream-groups", *(names.get(axis, axis) for axis in plan.communicators.high_priority)
