"""`MemoryProfile`: which tensors a software stack holds, field by field."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20

TORCH_WORKSPACE_BYTES = 32 * MIB
"""aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 KiB x 8 on compute capability 9 and 10."""

ALLOCATOR_FACTOR = 1.04
"""Reserved over allocated bytes of PyTorch's caching allocator: fitted, the median of the SimuMax B200 rows
(they span 1.03 to 1.07)."""


@dataclass(frozen=True)
class MemoryProfile:
    """Memory behaviour of a stack. Sizes in bytes."""

    # What follows from the rest of the profile and from the plan (`simulator.stack.profiles.profile_of`).

    fused_attention: bool = True

    dropout: bool = False
    """Masks of dropouts are kept."""

    fp32_gradients: bool = True

    # Activations.

    counted_masks: bool = False
    """Dropout masks are made again from a counter instead of kept, and attention with dropout keeps fp32
    probabilities."""

    eager: bool = False
    """Operations are not fused, so that rotation, attention and a gated activation keep copies."""

    stores_tables: bool = False
    """Angles of rotary positions are made once per stage, not by every layer for every microbatch."""

    keeps_fp8_operands: bool = False
    """With fp8, kept inputs of products are fp8."""

    selective_operators: bool = False
    """Selective recomputation keeps the outputs of the attention core and of every other product instead of leaving out
    modules."""

    defers_products: bool = False
    """After an input gradient only the operands of the weight gradients stay, not all that the forward kept."""

    pairs_in_turn: bool = False
    """The forward of an overlapped pair ends before its backward starts."""

    previous_gradient: bool = False
    """The gradient last sent to the stage before is held until the next one."""

    # Head and loss.

    vocabulary_multiple: int = 1
    """Tables are padded to so many rows times tp."""

    cross_entropy_in_place: bool = False
    """The loss writes its gradient over the logits."""

    eager_loss: bool = False
    """Logits are cast to fp32, and softmax and loss are operations of their own."""

    loss_copies: int = 0
    """Of them, so many more fp32 tensors where logits are cut over tp."""

    head_gather_buffer: bool = False
    """The output layer gathers its input into a buffer that stays."""

    # Weights and gradients.

    fp32_weights: bool = False
    """Weights rest in fp32 and are cast when they are gathered."""

    growing_gradients: bool = False
    """Sums of gradients exist from the first backward to the optimizer step only."""

    separate_gradients: bool = False
    """Weight gradients are tensors of their own before they are added to those sums (`simulator.memory.own`)."""

    weight_gradients: bool = False
    """Besides fp32 sums gradients also exist in the format of the weights."""

    dense_embedding_gradient: bool = False
    """The lookup's gradient is a table of its own before it is added."""

    placeholder_gradients: bool = False
    """One tensor per shape of weight stands for the gradients that were added in place."""

    # Libraries and the allocator.

    workspace_bytes: int = 0
    """Scratch of the product library."""

    grouped_workspaces: int = 0
    """So many more for products over experts."""

    head_workspace_bytes: int = 0
    """Scratch of the library that makes the logits, where that is another."""

    allocator_factor: float = 1.0
    """Reserved over allocated bytes of the caching allocator, which CPUs have not."""

    zero_context_bytes: int = 0
    """What the device shows besides it where a ZeRO stage is on, if not `reserved.reserved_bytes`."""

    def gradient_bytes(self, dtype: str) -> int:
        """Bytes of one accumulated gradient element."""
        return (6 if self.weight_gradients else 4) if self.fp32_gradients or dtype == "fp32" else 2
