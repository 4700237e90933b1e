"""FSDP and tensor parallelism of PyTorch, as torchtitan and Composer run them, and compiled steps of JAX."""

from __future__ import annotations

from dataclasses import replace

from .casts import TORCHAO_CASTS
from .memory_profile import ALLOCATOR_FACTOR, TORCH_WORKSPACE_BYTES, MemoryProfile
from .profile import Profile

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

_HOLDS = MemoryProfile(
    eager=True,
    eager_loss=True,  # torchtitan/components/loss.py, cross_entropy_loss
    # torch/distributed/tensor/parallel/loss.py: exponentials and their product with the sum of gradients
    loss_copies=2,
    selective_operators=True,  # torchtitan/distributed/activation_checkpoint.py, selective_ac_option = "op"
    dense_embedding_gradient=True,
    fp32_weights=True,  # FSDP2 keeps fp32 shards and casts them as it gathers (MixedPrecisionPolicy)
    head_workspace_bytes=TORCH_WORKSPACE_BYTES,
    allocator_factor=ALLOCATOR_FACTOR,
)

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
    memory=_HOLDS,
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
    # torch.distributed.pipelining, get_schedule_class (schedules.py)
    schedules=("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
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

PYTORCH = (_TORCHTITAN, _FSDP, _FSDP_1_13, _XLA)
