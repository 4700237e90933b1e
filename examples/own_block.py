"""A transformer layer of your own, trained over tp2 x pp2 and on one device: the losses are the same numbers,
and so is everything else.

    python examples/own_block.py

The layer runs attention and MLP side by side on one norm (Wang & Komatsuzaki 2021, GPT-J); the MLP is written out here.
Cut layers and norms come from the `BlockContext`; between them any elementwise operation is fine.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof import Plan, Trainer
from shardproof.backend.model.block import BlockContext
from shardproof.backend.tensor_parallel import split_fused
from shardproof.verify.dynamic.proof import prove

PLAN = """
[model]
preset = "tiny-llama"

[layout]
tp = {degree}
pp = {degree}

[batch]
global = 4
micro = 1
sequence = 32

[precision]
dtype = "fp32"

[numerics]
mode = "exact"

[train]
steps = 5
"""


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, context: BlockContext, layer: int):
        super().__init__()
        self.context = context
        self.norm = context.norm(f"layers.{layer}.attention.norm")
        self.attention = context.attention(layer)
        self.gate_and_up = context.column_linear(f"layers.{layer}.mlp.up")
        self.down = context.row_linear(f"layers.{layer}.mlp.down")

    def forward(self, x_BSH: Tensor) -> Tensor:
        normed = self.norm(x_BSH)
        gate, up = split_fused(self.gate_and_up(normed), (1, 1))
        return x_BSH + self.attention(normed) + self.down(self.context.elementwise(F.silu, gate) * up)


def main() -> None:
    """Prints the losses of both runs, and what a proof of the sharded one finds."""
    for degree in (1, 2):
        plan = Plan.from_toml(PLAN.format(degree=degree), "own_block.py")
        result = Trainer(plan, model=ParallelBlock).fit()
        print(f"{plan.layout.degrees:>10}: {' '.join(loss.hex() for loss in result.losses)}")
    print(prove(plan, block=ParallelBlock).text())


if __name__ == "__main__":
    main()
