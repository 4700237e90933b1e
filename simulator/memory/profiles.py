"""Which tensors a software stack holds: one entry per `runtime.profile`, each fact with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...core.plan.plan import Plan
from ..stack.profiles import profile_of

MIB = 2**20


@dataclass(frozen=True)
class MemoryProfile:
    """Memory behaviour of a stack. `fused_attention`, `dropout` and `fp32_gradients` are the plan's choices
    (`simulator.stack.profiles`).

    `counted_masks`: dropout masks are made again from a counter instead of kept, and attention with dropout keeps fp32
    probabilities. `eager`: operations are not fused, so that rotation, attention and a gated activation keep copies.
    `stores_tables`: angles of rotary positions are made once per stage, not by every layer for every microbatch.
    `growing_gradients`: sums of gradients exist from the first backward to the optimizer step only.
    `separate_gradients`: weight gradients are tensors of their own before they are added to those sums
    (`simulator.memory.own`). `pairs_in_turn`: the forward of an overlapped pair ends before its backward starts.
    `weight_gradients`: besides fp32 sums gradients also exist in the format of the weights. `fp16_gradients`: gradients
    of fp16 weights are fp16. `vocabulary_multiple`: tables are padded to so many rows times tp.
    `cross_entropy_in_place`: the loss writes its gradient over the logits; `eager_loss`: logits are cast to fp32, and
    softmax and loss are operations of their own; where logits are cut over tp, with `loss_copies` more fp32 tensors.
    `selective_operators`: selective recomputation keeps the outputs of the attention core and of every other product
    instead of leaving out modules. `dense_embedding_gradient`: the lookup's gradient is a table of its own before it is
    added. `placeholder_gradients`: one tensor per shape of weight stands for the gradients that were added in place.
    `workspace_bytes`: scratch of the product library; `grouped_workspaces` more for products over experts,
    `head_workspace_bytes` where another library makes the logits. `head_gather_buffer`: the output layer gathers its
    input into a buffer that stays. `previous_gradient`: the gradient last sent to the stage before is held until the
    next one. `keeps_fp8_operands`: with fp8, kept inputs of products are fp8. `fp32_weights`: weights rest in fp32 and
    are cast when they are gathered. `defers_products`: after an input gradient only the operands of the weight
    gradients stay, not all that the forward kept. `allocator_factor`: reserved over allocated bytes of the caching
    allocator, which CPUs have not; `zero_context_bytes`: what the device shows besides it where a ZeRO stage is on, if
    not `reserved.reserved_bytes`.
    """

    name: str
    fused_attention: bool = True
    counted_masks: bool = False
    dropout: bool = False
    fp32_gradients: bool = True
    eager: bool = False
    stores_tables: bool = False
    growing_gradients: bool = False
    separate_gradients: bool = False
    pairs_in_turn: bool = False
    fp16_gradients: bool = False
    weight_gradients: bool = False
    vocabulary_multiple: int = 1
    cross_entropy_in_place: bool = False
    eager_loss: bool = False
    loss_copies: int = 0
    selective_operators: bool = False
    dense_embedding_gradient: bool = False
    placeholder_gradients: bool = False
    workspace_bytes: int = 0
    grouped_workspaces: int = 0
    head_workspace_bytes: int = 0
    head_gather_buffer: bool = False
    previous_gradient: bool = False
    keeps_fp8_operands: bool = False
    fp32_weights: bool = False
    defers_products: bool = False
    allocator_factor: float = 1.0
    zero_context_bytes: int = 0

    def gradient_bytes(self, dtype: str) -> int:
        """Bytes of one accumulated gradient element."""
        return (6 if self.weight_gradients else 4) if self.fp32_gradients or dtype == "fp32" else 2


TE_WORKSPACE_BYTES = 32 * MIB + 1024
"""transformer_engine/pytorch/cpp_extensions/gemm.py (2.11), get_cublas_workspace_size_bytes on compute
capability 9 and above."""

TORCH_WORKSPACE_BYTES = 32 * MIB
"""aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 KiB x 8 on compute capability 9 and 10."""

ALLOCATOR_FACTOR = 1.04
"""Reserved over allocated bytes of PyTorch's caching allocator: fitted, the median of the SimuMax B200 rows
(they span 1.03 to 1.07)."""

DEEPSPEED_CONTEXT_BYTES = 11_800_000_000
"""Device memory besides the allocator under DeepSpeed of 2022: communicators of the world, of each axis, of each pair
of stages and of ZeRO, ZeRO's buckets of 5e8 elements, and what the allocator keeps of other phases. Fitted: the mean
over the ten families of the calibration half of the BLOOM chronicles (34 rows), +- 1e9; it does not depend on model,
layout or microbatch. Without ZeRO it is as elsewhere: 2 to 4 GB remain of what Sailor's runs take (docs/validation.md).
What the allocator keeps it gives back when it must, so `capacity` does not count this but `reserved.reserved_bytes`."""

_MEGATRON_2021 = MemoryProfile(
    "megatron-2021",
    fp16_gradients=True,
    vocabulary_multiple=128,
    dense_embedding_gradient=True,
    previous_gradient=True,
    defers_products=True,  # the zero-bubble forks
    allocator_factor=ALLOCATOR_FACTOR,
)

_PROFILES: Mapping[str, MemoryProfile] = {
    profile.name: profile
    for profile in (
        MemoryProfile(  # backend.model, backend.tensor_parallel
            "shardproof",
            eager=True,
            stores_tables=True,
            growing_gradients=True,
            separate_gradients=True,
            defers_products=True,
            pairs_in_turn=True,
            counted_masks=True,
            allocator_factor=ALLOCATOR_FACTOR,
        ),
        MemoryProfile(
            "megatron-te",
            fp16_gradients=True,
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
        ),
        MemoryProfile(
            "torchtitan",
            eager=True,
            eager_loss=True,  # torchtitan/components/loss.py, cross_entropy_loss
            # torch/distributed/tensor/parallel/loss.py: exponentials and their product with the sum of gradients
            loss_copies=2,
            selective_operators=True,  # torchtitan/distributed/activation_checkpoint.py, selective_ac_option = "op"
            dense_embedding_gradient=True,
            fp32_weights=True,  # FSDP2 keeps fp32 shards and casts them as it gathers (MixedPrecisionPolicy)
            head_workspace_bytes=TORCH_WORKSPACE_BYTES,
            allocator_factor=ALLOCATOR_FACTOR,
        ),
        MemoryProfile(
            "nanotron",
            eager=True,  # nanotron/models/llama.py: GLUActivation, keys and values of every query head
            eager_loss=True,  # nanotron/parallel/tensor_parallel/functional.py, sharded_cross_entropy of fp32 logits
            dense_embedding_gradient=True,
            # nanotron/optim/gradient_accumulator.py: bf16 gradients besides the fp32 sums, in DDP's buckets
            weight_gradients=True,
            head_workspace_bytes=TORCH_WORKSPACE_BYTES,
            allocator_factor=ALLOCATOR_FACTOR,
        ),
        _MEGATRON_2021,
        replace(_MEGATRON_2021, name="megatron-deepspeed", zero_context_bytes=DEEPSPEED_CONTEXT_BYTES),
    )
}


_SAME_MEMORY: Mapping[str, str] = {
    "megatron-2022": "megatron-2021",
    "fsdp": "torchtitan",
    "fsdp-1.13": "torchtitan",
    "xla": "torchtitan",
    "megatron-2023": "megatron-2021",
    "megatron-deepspeed-2023": "megatron-deepspeed",
    "deepspeed-zero3": "megatron-deepspeed",
    "zero-bubble": "megatron-2021",
    "zero-bubble-te": "megatron-te",
    "zero-bubble-flash": "megatron-te",
    "megatron-fsdp": "megatron-te",
    "nemo-24.05": "megatron-te",
    "nemo-25.02": "megatron-te",
}
"""Profiles whose memory is that of another."""


def memory_profile(plan: Plan) -> MemoryProfile:
    """The memory behaviour of the stack that a plan runs on.

    Unless the plan says otherwise, Megatron accumulates bf16 gradients in fp32 and fp16 gradients in fp16
    (megatron/training/arguments.py, accumulate_allreduce_grads_in_fp32).
    """
    name = plan.runtime.profile
    profile, runtime = _PROFILES[_SAME_MEMORY.get(name, name)], profile_of(plan)
    if (asked := plan.precision.gradient_dtype) is not None:
        fp32_gradients = asked == "fp32"
    elif profile.fp16_gradients:
        fp32_gradients = plan.precision.dtype != "fp16"
    else:
        fp32_gradients = runtime.gradient_bytes(plan.precision.dtype) == 4
    if (fused_loss := plan.runtime.fused_loss) is not None:
        profile = replace(profile, cross_entropy_in_place=fused_loss, eager_loss=profile.eager_loss and not fused_loss)
    if plan.cluster.collective_library == "gloo":
        profile = replace(profile, allocator_factor=1.0)
    dropout = runtime.dropout and not profile.counted_masks
    return replace(profile, fused_attention=runtime.fused_attention, dropout=dropout, fp32_gradients=fp32_gradients)
