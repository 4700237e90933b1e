"""The layer that this project trains: attention and MLP side by side on one norm (Wang & Komatsuzaki 2021, GPT-J)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.backend.model.block import BlockContext


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + down(gelu(up(norm(x))))."""

    def __init__(self, context: BlockContext, layer: int):
        super().__init__()
        self.context = context
        self.norm = context.norm(f"layers.{layer}.attention.norm")
        self.attention = context.attention(layer)
        self.up = context.column_linear(f"layers.{layer}.mlp.up")
        self.down = context.row_linear(f"layers.{layer}.mlp.down")

    def forward(self, x_BSH: Tensor) -> Tensor:
        normed = self.norm(x_BSH)
        return x_BSH + self.attention(normed) + self.down(self.context.elementwise(F.gelu, self.up(normed)))
