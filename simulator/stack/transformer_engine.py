"""Megatron-Core with Transformer Engine, NeMo, and what was built after them."""

from __future__ import annotations

from dataclasses import replace

from .megatron import FP16_OPTIMIZER_BYTES, ZERO_BUBBLE_SCHEDULES
from .memory_profile import ALLOCATOR_FACTOR, MIB, TORCH_WORKSPACE_BYTES, MemoryProfile
from .profile import Profile

TRANSFORMER_ENGINE_HOST_CALLS = 14.0
"""`megatron.MEGATRON_HOST_CALLS` for modules that do more in Python (recipes, workspaces, the choice of an attention
backend). Fitted: calibration halves of dgxc-benchmarking, MLPerf and SimuMax, where 13 to 17 do as well
(`--refit`: 17.2 +- 1.3, with errors of 2.8% instead of 2.9%)."""

TE_WORKSPACE_BYTES = 32 * MIB + 1024
"""transformer_engine/pytorch/cpp_extensions/gemm.py (2.11), get_cublas_workspace_size_bytes on compute
capability 9 and above."""

_HOLDS = MemoryProfile(
    vocabulary_multiple=128,  # --make-vocab-size-divisible-by
    cross_entropy_in_place=True,
    dense_embedding_gradient=True,
    placeholder_gradients=True,  # transformer_engine/pytorch/module/base.py, get_dummy_wgrad
    workspace_bytes=TE_WORKSPACE_BYTES,
    grouped_workspaces=4,  # transformer_engine/common/util/multi_stream.cpp, one per stream
    head_workspace_bytes=TORCH_WORKSPACE_BYTES,
    head_gather_buffer=True,  # megatron/core/tensor_parallel/layers.py, get_global_memory_buffer
    previous_gradient=True,  # megatron/core/pipeline_parallel/schedules.py, input_tensor_grad
    keeps_fp8_operands=True,
    defers_products=True,
    allocator_factor=ALLOCATOR_FACTOR,
)

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
    # get_forward_backward_func (pipeline_parallel/schedules.py) and --overlap-moe-expert-parallel-comm
    schedules=("1F1B", "Interleaved1F1B", "Combined1F1B"),
    p2p_overlap_interleaved_only=True,
    memory=_HOLDS,
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
    schedules=("1F1B",),
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

ZERO_BUBBLE_TE_SHARE = 0.115
"""What the zero-bubble fork with Transformer Engine takes besides what is counted. Fitted: the mean over the
calibration half of Vocabulary Parallelism's 1F1B rows (16 rows of one family), +- 0.02. Heads take what is counted, by
the growth with the vocabulary; layers take longer."""

_ZERO_BUBBLE_TE = replace(
    # sail-sg/VocabularyParallelism, a fork of 2024 (pretrain_gpt.sh): Transformer Engine, without
    # --cross-entropy-loss-fusion.
    _MEGATRON_TE,
    name="zero-bubble-te",
    fused_loss=False,
    optimizer_bytes=FP16_OPTIMIZER_BYTES,
    engine_share=ZERO_BUBBLE_TE_SHARE,
    schedules=ZERO_BUBBLE_SCHEDULES,
)

_ZERO_BUBBLE_FLASH = replace(
    _ZERO_BUBBLE_TE, name="zero-bubble-flash", engine_share=0.0, p2p_overlap_interleaved_only=False
)
"""Its V-shaped schedules, which run without Transformer Engine (--use-legacy-models --transformer-impl local
--use-flash-attn)."""

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
    schedules=("GPipe", "1F1B"),
    memory=MemoryProfile(
        eager=True,  # nanotron/models/llama.py: GLUActivation, keys and values of every query head
        eager_loss=True,  # nanotron/parallel/tensor_parallel/functional.py, sharded_cross_entropy of fp32 logits
        dense_embedding_gradient=True,
        # nanotron/optim/gradient_accumulator.py: bf16 gradients besides the fp32 sums, in DDP's buckets
        weight_gradients=True,
        head_workspace_bytes=TORCH_WORKSPACE_BYTES,
        allocator_factor=ALLOCATOR_FACTOR,
    ),
)

TRANSFORMER_ENGINE = (
    _MEGATRON_TE,
    _MEGATRON_FSDP,
    _NEMO_2405,
    _NEMO_2502,
    _ZERO_BUBBLE_TE,
    _ZERO_BUBBLE_FLASH,
    _NANOTRON,
)
