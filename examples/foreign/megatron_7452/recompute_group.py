"""Finding 4: activations that ranks keep in parts are gathered from the wrong group when a layer is recomputed.

    torchrun --nproc-per-node 1 examples/foreign/megatron_7452/recompute_group.py right.ledger
    torchrun --nproc-per-node 4 examples/foreign/megatron_7452/recompute_group.py run.ledger
    shardproof verify run.ledger --against right.ledger

Ranks 0 and 2 hold one half of the batch, 1 and 3 the other. Each of a pair keeps half of what went into the layer, and
gathers from its pair; the fault gathers from ranks 0 and 1, or 2 and 3, as the usual order of ranks would have it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from tp_regions import run

from shardproof import Recorder

HIDDEN, SAMPLES, TOKENS = 8, 4, 6


class Recomputed(Function):
    """A module's output, of which the input alone is kept: a part of its tokens on each rank of `group`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, keep: Any, gather: Any) -> Tensor:
        """Keeps this rank's part of the input, by its place in `keep`; backward gathers them from `gather`."""
        ctx.layer, ctx.gather = layer, gather
        ctx.save_for_backward(x.chunk(dist.get_world_size(keep), dim=1)[dist.get_rank(keep)].contiguous())
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Runs the module again, this time with a graph."""
        (part,) = ctx.saved_tensors
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(ctx.gather))]
        dist.all_gather(parts, part, group=ctx.gather)
        x = torch.cat(parts, dim=1).requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        torch.autograd.backward(output, gradient)
        return x.grad, None, None, None


class Model(nn.Module):
    """Two layers, of which the second is recomputed."""

    def __init__(self, keep: Any, gather: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.groups = keep, gather

    def forward(self, x: Tensor) -> Tensor:
        """[samples, tokens, hidden] -> the same."""
        return Recomputed.apply(self.first(x), self.second, *self.groups)


def main(folder: str, fixed: bool) -> None:
    """Two steps on the ranks of the default group: in pairs, or one alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replicas = max(1, size // 2)
    strided, _ = dist.new_subgroups_by_enumeration([list(range(first, size, replicas)) for first in range(replicas)])
    in_order, _ = dist.new_subgroups_by_enumeration(
        [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    )
    model = Model(strided, strided if fixed else in_order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = SAMPLES // replicas
    first = rank % replicas * share
    x, wanted = torch.randn(2, SAMPLES, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))[
        :, first : first + share
    ]
    with Recorder(folder, model, optimizer, first_sample=first):
        for _ in range(2):
            ((model(x) - wanted).square().sum() / SAMPLES).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= min(size, 2)  # both of a pair have the same
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(main)
