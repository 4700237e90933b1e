"""The arguments of Megatron-LM that mean something in a plan, as data: what each is called, takes, means, defaults to.

`DIRECT` are those that are one key each; reading and writing both go by them. `COMBINED` are those of which several
make one key, or one makes several; `megatron_meaning` and `megatron_write` say how. All others are in
`megatron_other_flags`. Sources: the argument files of NVIDIA/Megatron-LM from v1.0 to core 0.20 (d98e8a64),
microsoft/Megatron-DeepSpeed and alibaba/Pai-Megatron-Patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from .account import Status

RELEASES = (
    *("1.0", "2.0", "2.5", "2.6", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.10", "0.11", "0.12", "0.13"),
    *("0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20"),
)
"""In order: those of Megatron-LM until 2021, then those of its core."""

Kind = Literal["int", "float", "on", "off"]
"""`on` and `off` take no value: given, they are true or false."""


@dataclass(frozen=True)
class Direct:
    """One flag that is one key. `default` is Megatron's where the flag is not given; None is that of the plan."""

    flag: str
    key: str
    kind: Kind
    default: Any = None


DIRECT = (
    Direct("--num-layers", "model.num_layers", "int"),
    Direct("--hidden-size", "model.hidden_size", "int"),
    Direct("--num-attention-heads", "model.num_heads", "int"),
    Direct("--max-position-embeddings", "model.max_positions", "int"),
    Direct("--untie-embeddings-and-output-weights", "model.tied_embeddings", "off", True),
    Direct("--disable-bias-linear", "model.bias", "off", True),
    Direct("--qk-layernorm", "model.qk_norm", "on", False),
    Direct("--norm-epsilon", "model.norm_eps", "float", 1e-5),
    Direct("--attention-dropout", "model.attention_dropout", "float", 0.1),
    Direct("--hidden-dropout", "model.hidden_dropout", "float", 0.1),
    Direct("--tensor-model-parallel-size", "layout.tp", "int", 1),
    Direct("--pipeline-model-parallel-size", "layout.pp", "int", 1),
    Direct("--context-parallel-size", "layout.cp", "int", 1),
    Direct("--expert-model-parallel-size", "layout.ep", "int", 1),
    Direct("--expert-tensor-parallel-size", "layout.etp", "int"),
    Direct("--micro-batch-size", "batch.micro", "int"),
    Direct("--seq-length", "batch.sequence", "int"),
    Direct("--adam-eps", "optimizer.eps", "float", 1e-8),
    Direct("--weight-decay", "optimizer.weight_decay", "float", 0.01),
    Direct("--clip-grad", "optimizer.clip_grad_norm", "float", 1.0),
    Direct("--seed", "train.seed", "int", 1234),
    Direct("--lr", "train.learning_rate", "float"),
    Direct("--overlap-grad-reduce", "data_parallel.overlap_grad_reduce", "on", False),
    Direct("--overlap-param-gather", "data_parallel.overlap_param_gather", "on", False),
    Direct("--no-check-for-nan-in-loss-and-grad", "data_parallel.check_gradients", "off", True),
    Direct("--tp-comm-overlap", "runtime.tp_comm_overlap", "on", False),
    Direct("--cross-entropy-loss-fusion", "runtime.fused_loss", "on", False),
    Direct("--cpu-offloading-num-layers", "offload.activations", "int"),
)

_MOE = (
    Direct("--moe-router-topk", "model.experts_per_token", "int", 2),
    Direct("--moe-ffn-hidden-size", "model.expert_ffn_hidden_size", "int"),
    Direct("--moe-router-topk-scaling-factor", "model.router_scaling", "float"),
    Direct("--moe-router-num-groups", "model.num_router_groups", "int"),
    Direct("--moe-router-group-topk", "model.router_groups_per_token", "int"),
    Direct("--moe-router-enable-expert-bias", "model.expert_bias", "on"),
    Direct("--moe-router-bias-update-rate", "train.expert_bias_rate", "float"),
    Direct("--moe-z-loss-coeff", "train.router_z_loss", "float"),
    Direct("--moe-input-jitter-eps", "train.router_jitter", "float"),
    Direct("--moe-expert-capacity-factor", "model.expert_capacity_factor", "float"),
    Direct("--overlap-moe-expert-parallel-comm", "runtime.ep_comm_overlap", "on"),
)
_LATENT = (
    Direct("--q-lora-rank", "model.q_lora_rank", "int"),
    Direct("--kv-lora-rank", "model.kv_lora_rank", "int", 32),
    Direct("--qk-head-dim", "model.qk_nope_head_dim", "int", 128),
    Direct("--qk-pos-emb-head-dim", "model.qk_rope_head_dim", "int", 64),
    Direct("--v-head-dim", "model.v_head_dim", "int", 128),
)
_FP16 = (
    Direct("--loss-scale", "precision.loss_scale", "float"),
    Direct("--initial-loss-scale", "precision.initial_loss_scale", "float", 2.0**32),
    Direct("--min-loss-scale", "precision.min_loss_scale", "float", 1.0),
    Direct("--loss-scale-window", "precision.loss_scale_window", "int", 1000),
    Direct("--hysteresis", "precision.loss_scale_hysteresis", "int", 2),
)
_ROTARY = (Direct("--rotary-base", "model.rope_theta", "float", 10000.0),)
_MTP = (Direct("--mtp-loss-scaling-factor", "train.mtp_loss_weight", "float", 0.1),)

UNDER: Mapping[str, tuple[Direct, ...]] = {
    "": DIRECT,
    "--num-experts": _MOE,
    "--multi-latent-attention": _LATENT,
    "--fp16": _FP16,
    "rotary positions": _ROTARY,
    "--mtp-num-layers": _MTP,
}
"""What the rows count under; without it they have no effect."""

COMBINED = """
ffn-hidden-size= kv-channels= group-query-attention num-query-groups= swiglu squared-relu openai-gelu@-0.20 onnx-safe=
no-bias-gelu-fusion glu-activation= quick-geglu@0.15 activation-func-clamp-value=@0.15 glu-linear-offset=:0.0@0.15
apply-layernorm-1p normalization= position-embedding-type= embed-layernorm
use-rotary-position-embeddings no-position-embedding add-qkv-bias@0.5 vocab-size= padded-vocab-size=@0.15
make-vocab-size-divisible-by= tokenizer-type= pad-vocab-size-to= vocab-extra-ids= extra-vocab-size= num-experts=+
moe-layer-freq=@0.9 moe-shared-expert-intermediate-size=@0.9 moe-shared-expert-gate@0.16
moe-router-load-balancing-type=+@0.5
moe-aux-loss-coeff=+@0.5 moe-router-pre-softmax@0.9 moe-router-score-function=@0.10 moe-token-dispatcher-type=@0.6
moe-enable-deepep@0.11 moe-flex-dispatcher-backend=@0.16 multi-latent-attention@0.10 rope-type=@0.15
rotary-scaling-factor=@0.10 mscale=@0.11 mscale-all-dim=@0.11
yarn-original-max-position-embeddings=@0.19 yarn-beta-fast=@0.19 yarn-beta-slow=@0.19
yarn-correction-range-round-to-int@0.19 no-yarn-correction-range-round-to-int@0.19 rotary-seq-len-interpolation-factor=
use-rope-scaling@0.9 rope-scaling-factor=@0.11 mtp-num-layers=@0.12 window-size=@0.15
window-attn-skip-freq=@0.15 softmax-type=@0.15 rotary-percent= no-rope-freq=@0.13
num-layers-per-virtual-pipeline-stage= num-virtual-stages-per-pipeline-rank=@0.11
virtual-pipeline-model-parallel-size= pipeline-model-parallel-layout=@0.14 decoder-first-pipeline-num-layers=@0.9
decoder-last-pipeline-num-layers=@0.9 pp-partition-method= account-for-embedding-in-pipeline-split@0.11
account-for-loss-in-pipeline-split@0.11 sequence-parallel use-tp-pp-dp-mapping@0.7 use-distributed-optimizer
zero-stage= use-megatron-fsdp@0.14 use-custom-fsdp@0.11-0.13 data-parallel-sharding-strategy=@0.11
num-distributed-optimizer-instances=@0.10 cp-comm-type=+@0.10 hierarchical-context-parallel-sizes=+@0.10
ds-sequence-parallel-size= global-batch-size= bf16@2.5 fp16 fp8-format= fp8-hybrid fp8-recipe=@0.12
accumulate-allreduce-grads-in-fp32@2.5 grad-reduce-in-bf16@0.11 recompute-activations recompute-granularity=
recompute-method= recompute-num-layers= recompute-modules=+@0.12 moe-layer-recompute@0.7 checkpoint-activations
checkpoint-num-layers=@-2.5 activations-checkpoint-method=@2.6-2.6 activations-checkpoint-num-layers=@2.6-2.6
distribute-saved-activations distribute-checkpointed-activations@2.0-2.6 optimizer=@2.5 adam-beta1=@2.0
adam-beta2=@2.0 train-iters= train-samples= ddp-bucket-size=@0.7 no-overlap-p2p-communication
no-scatter-gather-tensors-in-pipeline@2.5-0.17 use-flash-attn use-flash-attn-v2 attention-backend=@0.11
transformer-impl= enable-cuda-graph@0.10 external-cuda-graph@0.12 cuda-graph-impl=@0.15
high-priority-stream-groups=+@0.13 enable-zero-bubble zero-bubble-v-schedule zero-bubble-v-schedule-mem-setup=
enable-zbh1-pipeline deepspeed
lr-decay-style= lr-decay-iters= lr-decay-samples= min-lr= lr-warmup-fraction= lr-warmup-iters= lr-warmup-samples=
lr-warmup-init= start-weight-decay= end-weight-decay= weight-decay-incr-style= lr-wsd-decay-samples=@0.8
lr-wsd-decay-iters=@0.8 lr-wsd-decay-style=@0.8 rampup-batch-size=3 decrease-batch-size-if-needed@0.9
step-batch-size-schedule=+@0.18
"""
"""Flags without their dashes, with `=` and how many values they take, `@` and the releases that have them."""

ALIASES: Mapping[str, str] = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--layernorm-epsilon": "--norm-epsilon",
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
    "--batch-size": "--micro-batch-size",
    "--moe-expert-parallel-size": "--expert-model-parallel-size",
    "--num-key-value-heads": "--num-query-groups",
    "--n-head-kv": "--num-query-groups",
    "--rotary-position-embeddings-theta": "--rotary-base",
    "--rope-theta": "--rotary-base",
    "--topk": "--moe-router-topk",
    "--moe-loss-coeff": "--moe-aux-loss-coeff",
    "--min-scale": "--min-loss-scale",
    "--qk-nope-head-dim": "--qk-head-dim",
    "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    "--shared-moe-ffn-hidden-size": "--moe-shared-expert-intermediate-size",
    "--multi-query-attention": "--group-query-attention",
}
"""Older or a fork's name -> the name that means the same."""


@dataclass(frozen=True)
class Flag:
    """One argument: how many values it takes (`0`, `1`, a number, `?`, `+` or `*`), the releases that have it, and for
    those of no key what becomes of it and why. `default` is a value that changes nothing."""

    name: str
    arity: str
    first: str = "1.0"
    last: str = RELEASES[-1]
    status: Status = "mapped"
    why: str = ""
    default: str | None = None


def read_flags(text: str, status: Status = "mapped", why: str = "") -> dict[str, Flag]:
    """Flags as `COMBINED` writes them: `name`, `name=` (one value), `name=+`, `name=:default`, `name=@first-last`."""
    found = {}
    for entry in text.split():
        entry, _, releases = entry.partition("@")
        entry, _, default = entry.partition(":")
        name, takes, arity = entry.partition("=")
        first, dash, last = releases.partition("-")
        flag = f"--{name}"
        found[flag] = Flag(
            flag,
            (arity or "1") if takes else "0",
            first or "1.0",
            (last if dash else "") or RELEASES[-1],
            status,
            why,
            default or None,
        )
    return found


@lru_cache(maxsize=1)
def all_flags() -> Mapping[str, Flag]:
    """Every argument by its name."""
    from .megatron_other_flags import OTHERS

    rows = [row for group in UNDER.values() for row in group]
    flags = {
        row.flag: Flag(row.flag, "0" if row.kind in ("on", "off") else "1", _SINCE.get(row.flag, RELEASES[0]))
        for row in rows
    }
    flags |= read_flags(COMBINED)
    for status, why, text in OTHERS:
        flags |= {name: flag for name, flag in read_flags(text, status, why).items() if name not in flags}
    for alias, name in ALIASES.items():
        flags[alias] = Flag(alias, flags[name].arity if alias != "--multi-query-attention" else "0")
    return flags


_SINCE: Mapping[str, str] = {
    "--context-parallel-size": "0.4",
    "--expert-tensor-parallel-size": "0.10",
    "--cross-entropy-loss-fusion": "0.8",
    "--moe-router-topk": "0.5",
    "--moe-z-loss-coeff": "0.5",
    "--moe-ffn-hidden-size": "0.9",
    "--moe-router-topk-scaling-factor": "0.9",
    "--moe-router-num-groups": "0.10",
    "--moe-router-group-topk": "0.10",
    "--moe-router-enable-expert-bias": "0.11",
    "--q-lora-rank": "0.10",
    "--kv-lora-rank": "0.10",
    "--rotary-base": "0.8",
    "--overlap-moe-expert-parallel-comm": "0.14",
    "--cpu-offloading-num-layers": "0.16",
    "--mtp-loss-scaling-factor": "0.12",
}
"""First release of the rows that are one key each, where it tells releases apart."""
