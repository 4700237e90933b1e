"""Software stacks: how each one communicates, overlaps and fuses. One entry per stack, each field with its source.

`runtime.profile` names the stack; plan keys that a stack lets its users choose (overlap switches, the attention kernel,
CUDA graphs, the bucket size) override its defaults in `profile_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel, Precision, Runtime
from .casts import TORCHAO_CASTS
from .profile import Profile

FP16_OPTIMIZER_BYTES = 58.0
"""The same for Megatron's fp16 optimizer with dynamic loss scale (megatron/optimizer/optimizer.py, v2.5): gradients
copied to fp32 (2 + 4), unscaled while looked through for overflow (8), read for the norm (4), clipped (8), Adam (28),
weights copied back (4)."""

DEEPSPEED_FP16_OPTIMIZER_BYTES = 82.0
"""The same for DeepSpeed's without ZeRO, and how it prepares gradients for their reduction: the overflow check casts
and sums (2 + 4, 4), gradients are copied to fp32 (2 + 4) and into a flat tensor (4 + 4), read for the norm (4),
unscaled and clipped (8), Adam (28), weights copied back (4 + 2) (deepspeed/runtime/fp16/fused_optimizer.py and
runtime/utils.py, _has_inf_or_nan, v0.6.0); 16-bit gradients are put into a flat bucket (2 + 2), divided (2 + 2) and
copied back (2 + 2) (runtime/engine.py, allreduce_bucket and allreduce_and_copy)."""

MEGATRON_HOST_CALLS = 10.0
"""Fitted: the calibration half of vTrain's single-node rows, 16 of the 32 times of a layer that they are put
together from: 9.4 to 10.5,
+- 1, by how many rows of each are drawn (`--refit`). A layer takes at least 3.0 ms forward and backward, whatever its
size, for 39 to 43 counted kernels: 80 us a kernel."""

TRANSFORMER_ENGINE_HOST_CALLS = 14.0
"""The same for Megatron-Core with Transformer Engine, whose modules do more in Python (recipes, workspaces, the choice
of an attention backend). Fitted: calibration halves of dgxc-benchmarking, MLPerf and SimuMax, where 13 to 17 do as well
(`--refit`: 17.2 +- 1.3, with errors of 2.8% instead of 2.9%)."""

MEGATRON_2021_SHARE = 0.04
"""What Megatron-LM of early 2021 takes longer than that of 2022. Fitted: the mean over the four families of the
calibration half of SC21, give or take 0.01 (`--refit`: 0.05 does as well). Without any fit the same model in the same
cut says so: 530B with 280 microbatches takes 54.1 s in SC21, table 1, and 49.1 s in Korthikanti et al. 2022, table 5,
of which all-reduces during weight gradients explain 1.1 s and data parallelism 0.3 s. Between the two, norms became
persistent kernels (Megatron-LM a2fdcdf06, 2021-10) and cuBLAS and NCCL moved on."""

_MEGATRON_2021 = Profile(
    # Megatron-LM v2.x and its forks: p2p_communication.py waits for every message; the "local" data parallelism
    # reduces one flat buffer after the pipeline has drained; scores pass through memory with a fused
    # scale-mask-softmax; dropout 0.1. `tp_comm_overlap` stands for async-tensor-model-parallel-allreduce of v3
    # (Korthikanti et al. 2022, section 6.1).
    name="megatron-2021",
    recv_buffers=1,
    p2p_overlap=False,
    reduces_last=True,
    scatter_gather=True,
    tensor_overlap_asked="backward",
    fused_attention=False,
    fused_elementwise=True,
    dropout=True,
    gradient_dtype="fp32-of-bf16",
    optimizer_bytes=FP16_OPTIMIZER_BYTES,
    host_calls=MEGATRON_HOST_CALLS,
    engine_share=MEGATRON_2021_SHARE,
)

_MEGATRON_2022 = replace(_MEGATRON_2021, name="megatron-2022", engine_share=0.0)
"""Megatron-LM of 2022 (v3.0) and forks of that time."""

DEEPSPEED_ENGINE_SHARE = 0.20
"""What DeepSpeed's pipeline engine takes longer than Megatron-LM's own, whatever the microbatch. Fitted: the mean over
the calibration half of the BLOOM chronicles with a published layout (29 rows of seven families), +- 0.02. Without any
fit the same model on the same machine says so: 530B on Selene takes 0.214 s a microbatch in MT-NLG (arXiv 2201.11990)
and 0.181 s in SC21, table 1."""

_DEEPSPEED_ZERO3 = replace(
    # DeepSpeed of 2021 (runtime/zero/partition_parameters.py, _allgather_params and
    # _reduce_scatter_gradient): blocking, no prefetch.
    _MEGATRON_2021,
    name="deepspeed-zero3",
    gathers_by_tensor=True,
    gather_copy_bytes=4.0,
    reduce_copy_bytes=4.0,
)

_MEGATRON_DEEPSPEED = replace(_MEGATRON_2021, name="megatron-deepspeed", engine_share=DEEPSPEED_ENGINE_SHARE)

_MEGATRON_DEEPSPEED_2023 = replace(
    _MEGATRON_2022, name="megatron-deepspeed-2023", optimizer_bytes=DEEPSPEED_FP16_OPTIMIZER_BYTES
)
"""Megatron-DeepSpeed of 2023, whose stages send to each other directly: those of 2021 broadcast in groups of two."""

_MEGATRON_TE = Profile(
    # Megatron-Core with Transformer Engine: LinearWithGradAccumulationAndAsyncCommunication overlaps backward
    # collectives; tp_comm_overlap adds userbuffers; distributed optimizer, buckets of max(40e6, 1e6 * dp) parameters
    # (megatron/core/distributed/distributed_data_parallel_config.py); overlap_p2p_comm is for interleaved schedules
    # only; gradient_accumulation_fusion and cross_entropy_loss_fusion; TE's ring attention posts the next keys and
    # values before it works on the present ones (attention/dot_product_attention/context_parallel.py).
    name="megatron-te",
    gradient_dtype="fp32-of-bf16",
    tensor_overlap="backward",
    tensor_overlap_asked="all",
    reduces_last=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    bucket_elements_per_copy=1e6,
    check_gradients=True,  # megatron/training/arguments.py: --no-check-for-nan-in-loss-and-grad turns it off
    optimizer_by_tensor=True,  # core/optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads
    # transformer/transformer_block.py: fp8_autocast around a chunk, tp_only_amax_red is False
    amax_reduction="replicas",
    fp8_tables_last=True,  # core/distributed/param_and_grad_buffer.py, partition_buckets, since 0.8
    host_calls=TRANSFORMER_ENGINE_HOST_CALLS,
    fused_elementwise=True,
    scaled_rotation_in_steps=True,  # its kernel takes no factor (megatron/core/models/common/embeddings/rope_utils.py)
    expert_bias_in_steps=True,
    fused_loss=True,
    fused_gradients=True,
    context_overlap=True,
    # transformer/moe/router.py: bf16 by default; with --moe-router-dtype fp32 16-bit operands, fp32 result
    router_dtype="weights",
)

FSDP_UNIT_ELEMENTS = 400e6
"""`suggested_communication_unit_size` of Megatron-Core's own FSDP as it came (d165a8548, 2025-02;
distributed_data_parallel_config.py)."""

_MEGATRON_FSDP = replace(
    # Megatron-Core's own FSDP as it came in February 2025 (d165a8548, core/distributed/custom_fsdp): gathers go ahead
    # by its unit size (AllGatherPipeline.queue_bucket_to_all_gather), parameters of experts that are cut over ranks
    # have buckets of their own (_get_parameter_groups), every microbatch copies its gradients to fp32 buckets
    # (_make_param_hook; gradient_accumulation_fusion is refused), and a stream adds what is reduced to the rank's part
    # (GradReducePipeline.mark_item_ready). With sequence parallelism Megatron runs under CUDA_DEVICE_MAX_CONNECTIONS=1
    # (arguments.py, up to v0.11.0 refused without it), of which docs/source/api-guide/custom_fsdp.md warns.
    _MEGATRON_TE,
    name="megatron-fsdp",
    fused_gradients=False,
    gather_ahead_elements=FSDP_UNIT_ELEMENTS,
    one_queue=True,
    reduce_copy_bytes=4.0,
    reduce_cast_bytes=2.0,
)

NEMO_2405_SHARE = 0.06
"""What Megatron-Core and Transformer Engine took longer in NVIDIA's container 24.05 than in those of 24.12 and later.
Not fitted: GPT-3 175B in bf16 on 128 H100 takes 8.91 s in the tables of dgxc-benchmarking v24.11.1 (container 24.05)
and 8.31 s in those of v25.04 (24.12), 7.2% more, of which FlashAttention 2 explains 1.2%."""

_NEMO_2405 = replace(_MEGATRON_TE, name="nemo-24.05", engine_share=NEMO_2405_SHARE)

_NEMO_2502 = replace(_MEGATRON_TE, name="nemo-25.02", fused_squared_relu=False)
"""NeMo 2 in NVIDIA's containers 25.02 to 25.04: its squared ReLU is two calls of PyTorch that nothing compiles
(nemo/collections/llm/fn/activation.py at d2b2155 and 7a8f1cc), and Megatron-Core fuses gelu and swiglu only
(transformer/mlp.py)."""

ZERO_BUBBLE_SHARE = 0.06
"""What the zero-bubble fork of Megatron-LM takes besides what is counted. Fitted: the mean over the four families of
the calibration half of its tables (25 rows), +- 0.012. By stages (its table 6) the forward takes longer than counted,
the weight gradient less."""

ZERO_BUBBLE_TE_SHARE = 0.115
"""The same of its fork with Transformer Engine. Fitted: the mean over the calibration half of Vocabulary
Parallelism's 1F1B rows (16 rows of one family), +- 0.02. Heads take what is counted, by the growth with the
vocabulary; layers take longer."""

_MEGATRON_2023 = replace(_MEGATRON_2022, name="megatron-2023", fused_gradients=True, gradient_dtype="fp32-of-bf16")
"""Megatron-LM of 2023 without flash attention: as before, with gradient_accumulation_fusion on
(megatron/arguments.py)."""

_ZERO_BUBBLE = replace(_MEGATRON_2023, name="zero-bubble", engine_share=ZERO_BUBBLE_SHARE)
"""sail-sg/zero-bubble-pipeline-parallelism at its first version."""

_ZERO_BUBBLE_TE = replace(
    # sail-sg/VocabularyParallelism, a fork of 2024 (pretrain_gpt.sh): Transformer Engine, without
    # --cross-entropy-loss-fusion.
    _MEGATRON_TE,
    name="zero-bubble-te",
    fused_loss=False,
    optimizer_bytes=FP16_OPTIMIZER_BYTES,
    engine_share=ZERO_BUBBLE_TE_SHARE,
)

_ZERO_BUBBLE_FLASH = replace(_ZERO_BUBBLE_TE, name="zero-bubble-flash", engine_share=0.0)
"""Its V-shaped schedules, which run without Transformer Engine (--use-legacy-models --transformer-impl
local --use-flash-attn)."""

_NANOTRON = replace(
    # nanotron (src/nanotron/nn/layer_norm.py: norms in Triton; models/llama.py: gates in steps;
    # parallel/pipeline_parallel/p2p.py waits).
    _MEGATRON_TE,
    name="nanotron",
    check_gradients=False,
    optimizer_by_tensor=False,
    fp8_tables_last=False,
    amax_reduction="none",
    fused_loss=False,
    fused_gradients=False,
)

FSDP2_GATHER_COPY_BYTES, FSDP2_REDUCE_COPY_BYTES, FSDP2_REDUCE_CAST_BYTES = 4.0, 4.0, 2.0
"""FSDP2 copies 16-bit weights out of the buffer of an all-gather (2 + 2) and packs 16-bit gradients for the
reduce-scatter (2 + 2, or 4 for fp32), on the computing stream
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: split_with_sizes_copy, chunk_cat)."""

FSDP1_REDUCE_COPY_BYTES, FSDP1_REDUCE_CAST_BYTES = 8.0, 10.0
"""FSDP1 gathers into one flat weight, of which layers have views; autograd puts the gradients of the views together (2
+ 2), which are divided (2 + 2), for fp32 after a cast (2 + 4, and 4 more for the division)
(torch/distributed/fsdp/_flat_param.py, _use_unsharded_views; _runtime_utils.py, _reduce_grad)."""

FOREACH_ADAMW_BYTES = 92.0
"""Traffic per parameter of an AdamW whose steps are kernels of their own, in fp32 (torch/optim/adamw.py,
_multi_tensor_adamw): decay (8), first moment (12), second (8 + 12), root (8), two corrections (8 + 8), update (16), and
norm and scaling of the gradient (4 + 8)."""

TORCHTITAN_SHARE = 0.10
"""What torchtitan takes besides what is counted. Fitted: the mean over the four families of the calibration half of its
A100 and H100 tables (7 rows), +- 0.015. Three readings of torchao that it was not fitted to agree: Llama 3 8B on 8 H100
in bf16, fp8 with a scale per tensor, and per row trains 6,150, 7,690 and 6,768 tokens a second and device
(torchao/float8/README.md at 6243040), predicted 6,172, 7,870 and 6,897."""

FSDP_SHARE = 0.07
"""What FSDP with Composer takes besides what is counted. Fitted: the mean over llm-foundry's calibration half on three
devices (56 rows of two families), +- 0.004 (`--refit`)."""

_FSDP2 = Profile(
    # FSDP2 gathers and reduces per transformer block on its own streams
    # (torchtitan/models/llama3/infra/parallelize.py); async TP is asked for; batched p2p of
    # torch.distributed.pipelining waits where its list says so; scaled_dot_product_attention takes FlashAttention-2
    # (torch/nn/functional.py); the loss is F.cross_entropy of fp32 logits, compiled since 2025.
    name="fsdp2",
    tensor_overlap_asked="forward",
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    attention_kernel="flash-2",
    context_overlap=True,
    tables_in_one_gather=True,
    gather_copy_bytes=FSDP2_GATHER_COPY_BYTES,
    reduce_copy_bytes=FSDP2_REDUCE_COPY_BYTES,
    reduce_cast_bytes=FSDP2_REDUCE_CAST_BYTES,
    engine_share=TORCHTITAN_SHARE,
)

_TORCHTITAN = replace(
    # torchtitan/models/llama3/model.py: wq, wk, wv, w1, w3; distributed/activation_checkpoint.py; a checkpoint of
    # torch's stops early (torch/utils/checkpoint.py, set_checkpoint_early_stop, as compiled code does); DTensor's
    # autograd keeps what it gathered.
    _FSDP2,
    name="torchtitan",
    separate_projections=True,
    selective_operators=True,
    recomputation_stops_early=True,
    keeps_gathered=True,
    casts=TORCHAO_CASTS["tensor"],
)

_FSDP = replace(
    _FSDP2,
    name="fsdp",
    tensor_overlap_asked="none",
    gather_copy_bytes=0.0,
    reduce_copy_bytes=FSDP1_REDUCE_COPY_BYTES,
    reduce_cast_bytes=FSDP1_REDUCE_CAST_BYTES,
    optimizer_bytes=FOREACH_ADAMW_BYTES,
    engine_share=FSDP_SHARE,
    recomputation_stops_early=True,  # torch/utils/checkpoint.py, set_checkpoint_early_stop, since torch 2.1
)
"""PyTorch's FullyShardedDataParallel since torch 2.1 under Composer or a plain training loop."""

_FSDP_1_13 = replace(_FSDP, name="fsdp-1.13", recomputation_stops_early=False)

_XLA = replace(
    _FSDP2,
    name="xla",
    tensor_overlap_asked="all",
    fused_elementwise=True,
    fused_loss=True,
    # jax.checkpoint: dead code is taken out of what a backward computes again (jax/_src/ad_checkpoint.py)
    recomputation_stops_early=True,
    tables_in_one_gather=False,
    gather_copy_bytes=0.0,
    reduce_copy_bytes=0.0,
    reduce_cast_bytes=0.0,
    engine_share=0.0,
)
"""JAX: a compiled step that gathers and scatters weights cut over data-parallel ranks (MaxText, PaxML)."""

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        # backend/tensor_parallel/linear.py
        Profile(name="shardproof", tensor_overlap_asked="backward", overlaps_in_pairs="asked"),
        _MEGATRON_TE,
        _MEGATRON_FSDP,
        _NEMO_2405,
        _NEMO_2502,
        _TORCHTITAN,
        _FSDP,
        _FSDP_1_13,
        _XLA,
        _NANOTRON,
        _MEGATRON_2023,
        _ZERO_BUBBLE,
        _ZERO_BUBBLE_TE,
        _ZERO_BUBBLE_FLASH,
        _MEGATRON_2021,
        _MEGATRON_2022,
        _MEGATRON_DEEPSPEED,
        _MEGATRON_DEEPSPEED_2023,
        _DEEPSPEED_ZERO3,
    )
}
"""`runtime.profile` -> behaviour. `shardproof` is our own backend (`backend.pipeline.messages`,
`backend.data_parallel`)."""


OVERLAPS_INTERLEAVED = ("megatron-te", "megatron-fsdp", "nemo-24.05", "nemo-25.02", "nanotron", "zero-bubble-te")
"""Stacks whose messages overlap with compute in interleaved schedules only, unless a plan says otherwise."""


def profile_of(plan: Plan) -> Profile:
    """The stack that a plan runs on, with the plan's own switches in place of the stack's defaults."""
    profile, model = _resolved(plan.runtime, plan.data_parallel, plan.precision, plan.layout.vpp), plan.model
    if not (model.hidden_dropout or model.attention_dropout):
        return profile
    unfused = profile.name == "shardproof" and model.attention_dropout > 0  # backend.tensor_parallel.dropout
    return replace(profile, dropout=True, fused_attention=profile.fused_attention and not unfused)


def forget() -> None:
    """Lets go of the stacks that plans were resolved to, for whoever changes `PROFILES`."""
    _resolved.cache_clear()


@lru_cache(maxsize=256)
def _resolved(runtime: Runtime, data_parallel: DataParallel, precision: Precision, vpp: int) -> Profile:
    profile = PROFILES[runtime.profile]
    switches = {
        "p2p_overlap": runtime.p2p_overlap,
        "cuda_graphs": runtime.cuda_graphs,
        "scatter_gather": runtime.scatter_gather,
        "expert_overlap": runtime.ep_comm_overlap,
        "dispatch_once": runtime.dispatch_once,
        "amax_reduction": runtime.amax_reduction,
        "launch_blocking": runtime.launch_blocking,
        "fused_loss": runtime.fused_loss,
        "dropout": runtime.dropout,
        "fused_elementwise": runtime.compile,
        "overlap_grad_reduce": data_parallel.overlap_grad_reduce,
        "overlap_param_gather": data_parallel.overlap_param_gather,
        "check_gradients": data_parallel.check_gradients,
    }
    given: dict[str, Any] = {name: value for name, value in switches.items() if value is not None}
    if runtime.attention is not None:
        given["fused_attention"] = runtime.attention != "unfused"
        if runtime.attention != "unfused":
            given["attention_kernel"] = "best" if runtime.attention == "fused" else runtime.attention
    if runtime.tp_comm_overlap is not None:
        given["tensor_overlap"] = profile.tensor_overlap_asked if runtime.tp_comm_overlap else profile.tensor_overlap
    if data_parallel.bucket_bytes is not None:
        given |= {"bucket_elements": data_parallel.bucket_bytes / 4, "bucket_elements_per_copy": 0.0}
    if precision.gradient_dtype is not None:
        given["gradient_dtype"] = precision.gradient_dtype
    if precision.scaling is not None:
        given["casts"] = TORCHAO_CASTS[precision.scaling]
    if profile.name in OVERLAPS_INTERLEAVED and vpp == 1 and "p2p_overlap" not in given:
        given["p2p_overlap"] = False
    return replace(profile, **given)
