"""A transformer layer of your own, trained over tp2 x pp2 and on one device: the losses are the same numbers.

    python examples/own_block.py

The layer runs attention and MLP side by side on one norm (Wang & Komatsuzaki 2021, GPT-J). Cut layers and norms come from the
`BlockContext`; between them any elementwise operation is fine.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardproof import Plan, Trainer
from shardproof.backend.model.block import BlockContext

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
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, context: BlockContext, layer: int):
        super().__init__()
        self.norm = context.norm(f"layers.{layer}.attention.norm")
        self.attention, self.mlp = context.attention(layer), context.mlp(layer)

    def forward(self, x_BSH: Tensor) -> Tensor:
        normed = self.norm(x_BSH)
        return x_BSH + self.attention(normed) + self.mlp(normed)


def main() -> None:
    """Prints the losses of both runs."""
    for degree in (1, 2):
        plan = Plan.from_toml(PLAN.format(degree=degree), "own_block.py")
        result = Trainer(plan, model=ParallelBlock).fit()
        print(f"{plan.layout.degrees:>10}: {' '.join(loss.hex() for loss in result.losses)}")


if __name__ == "__main__":
    main()
