"""Megatron-LM before Transformer Engine, and its forks: those of DeepSpeed and of the zero-bubble schedules."""

from __future__ import annotations

from dataclasses import replace

from .memory_profile import ALLOCATOR_FACTOR, MemoryProfile
from .profile import Profile

FP16_OPTIMIZER_BYTES = 58.0
"""`profile.ADAMW_BYTES` for Megatron's fp16 optimizer with dynamic loss scale (megatron/optimizer/optimizer.py, v2.5):
gradients copied to fp32 (2 + 4), unscaled while looked through for overflow (8), read for the norm (4), clipped (8),
Adam (28), weights copied back (4)."""

DEEPSPEED_FP16_OPTIMIZER_BYTES = 82.0
"""The same for DeepSpeed's fp16 optimizer without ZeRO, and how it prepares gradients for their reduction: the overflow
check casts and sums (2 + 4, 4), gradients are copied to fp32 (2 + 4) and into a flat tensor (4 + 4), read for the norm
(4), unscaled and clipped (8), Adam (28), weights copied back (4 + 2) (deepspeed/runtime/fp16/fused_optimizer.py and
runtime/utils.py, _has_inf_or_nan, v0.6.0); 16-bit gradients are put into a flat bucket (2 + 2), divided (2 + 2) and
copied back (2 + 2) (runtime/engine.py, allreduce_bucket and allreduce_and_copy)."""

MEGATRON_HOST_CALLS = 10.0
"""Fitted: the calibration half of vTrain's single-node rows, 16 of the 32 times of a layer that they are put together
from: 9.4 to 10.5, +- 1, by how many rows of each are drawn (`--refit`). A layer takes at least 3.0 ms forward and
backward, whatever its size, for 39 to 43 counted kernels: 80 us a kernel."""

MEGATRON_2021_SHARE = 0.04
"""What Megatron-LM of early 2021 takes longer than that of 2022. Fitted: the mean over the four families of the
calibration half of SC21, give or take 0.01 (`--refit`: 0.05 does as well). Without any fit the same model in the same
cut says so: 530B with 280 microbatches takes 54.1 s in SC21, table 1, and 49.1 s in Korthikanti et al. 2022, table 5,
of which all-reduces during weight gradients explain 1.1 s and data parallelism 0.3 s. Between the two, norms became
persistent kernels (Megatron-LM a2fdcdf06, 2021-10) and cuBLAS and NCCL moved on."""

DEEPSPEED_ENGINE_SHARE = 0.20
"""What DeepSpeed's pipeline engine takes longer than Megatron-LM's own, whatever the microbatch. Fitted: the mean over
the calibration half of the BLOOM chronicles with a published layout (29 rows of seven families), +- 0.02. Without any
fit the same model on the same machine says so: 530B on Selene takes 0.214 s a microbatch in MT-NLG (arXiv 2201.11990)
and 0.181 s in SC21, table 1."""

DEEPSPEED_CONTEXT_BYTES = 11_800_000_000
"""Device memory besides the allocator under DeepSpeed of 2022: communicators of the world, of each axis, of each pair
of stages and of ZeRO, ZeRO's buckets of 5e8 elements, and what the allocator keeps of other phases. Fitted: the mean
over the ten families of the calibration half of the BLOOM chronicles (34 rows), +- 1e9; it does not depend on model,
layout or microbatch. Without ZeRO it is as elsewhere: 2 to 4 GB remain of what Sailor's runs take (docs/validation.md).
What the allocator keeps it gives back when it must, so `capacity` does not count this but `reserved.reserved_bytes`."""

ZERO_BUBBLE_SHARE = 0.06
"""What the zero-bubble fork of Megatron-LM takes besides what is counted. Fitted: the mean over the four families of
the calibration half of its tables (25 rows), +- 0.012. By stages (its table 6) the forward takes longer than counted,
the weight gradient less."""

_HOLDS = MemoryProfile(
    vocabulary_multiple=128,
    dense_embedding_gradient=True,
    previous_gradient=True,
    defers_products=True,  # the zero-bubble forks
    allocator_factor=ALLOCATOR_FACTOR,
)

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
    # GPipe until PipeDream-flush replaced it (Narayanan et al. 2021, section 2.2)
    schedules=("GPipe", "1F1B", "Interleaved1F1B"),
    memory=_HOLDS,
)

_MEGATRON_2022 = replace(_MEGATRON_2021, name="megatron-2022", engine_share=0.0)

_MEGATRON_2023 = replace(_MEGATRON_2022, name="megatron-2023", fused_gradients=True, gradient_dtype="fp32-of-bf16")
"""As before, with gradient_accumulation_fusion on (megatron/arguments.py)."""

_DEEPSPEED_HOLDS = replace(_HOLDS, zero_context_bytes=DEEPSPEED_CONTEXT_BYTES)

_MEGATRON_DEEPSPEED = replace(
    _MEGATRON_2021,
    name="megatron-deepspeed",
    engine_share=DEEPSPEED_ENGINE_SHARE,
    schedules=("1F1B",),
    memory=_DEEPSPEED_HOLDS,
)

_MEGATRON_DEEPSPEED_2023 = replace(
    _MEGATRON_2022,
    name="megatron-deepspeed-2023",
    optimizer_bytes=DEEPSPEED_FP16_OPTIMIZER_BYTES,
    schedules=("1F1B",),
    memory=_DEEPSPEED_HOLDS,
)
"""Those of 2021 broadcast in groups of two."""

_DEEPSPEED_ZERO3 = replace(
    # DeepSpeed of 2021 (runtime/zero/partition_parameters.py, _allgather_params and
    # _reduce_scatter_gradient): blocking, no prefetch.
    _MEGATRON_2021,
    name="deepspeed-zero3",
    gathers_by_tensor=True,
    gather_copy_bytes=4.0,
    reduce_copy_bytes=4.0,
    schedules=("1F1B",),
    memory=_DEEPSPEED_HOLDS,
)

ZERO_BUBBLE_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBH1", "ZBH2", "ZBVZeroBubble", "VHalf", "VMin")

_ZERO_BUBBLE = replace(
    _MEGATRON_2023, name="zero-bubble", engine_share=ZERO_BUBBLE_SHARE, schedules=ZERO_BUBBLE_SCHEDULES
)

MEGATRON = (
    _MEGATRON_2021,
    _MEGATRON_2022,
    _MEGATRON_2023,
    _MEGATRON_DEEPSPEED,
    _MEGATRON_DEEPSPEED_2023,
    _DEEPSPEED_ZERO3,
    _ZERO_BUBBLE,
)
