"""Finding 8: the sinks of attention are cut by heads and not marked so, and the norm that clips
counts those of rank 0 alone.

torchrun --nproc-per-node 1 examples/foreign/megatron_7452/sink_norm.py right.ledger
torchrun --nproc-per-node 2 examples/foreign/megatron_7452/sink_norm.py run.ledger
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from heads import Attention, batch, cuts
from torch import Tensor, nn
from tp_regions import run

from shardproof import Recorder

CLIP = 0.1


def norm_of(model: nn.Module, cut_over_ranks: set[str]) -> Tensor:
    """The norm of all gradients: of parameters that are cut every rank's, of others that of rank 0."""
    held = [each.grad for name, each in model.named_parameters() if name in cut_over_ranks or dist.get_rank() == 0]
    square = torch.stack([torch.zeros(()), *(each.square().sum() for each in held if each is not None)]).sum()
    dist.all_reduce(square)
    return square.sqrt()


def main(folder: str, fixed: bool) -> None:
    """Two steps on the ranks of the default group."""
    model = Attention(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut_over_ranks = {"inputs", "output", "sink"} if fixed else {"inputs", "output"}
    x, wanted = batch()
    with Recorder(folder, model, optimizer, cuts=cuts()) as recorder:
        for _ in range(2):
            (model(x) - wanted).square().mean().backward()
            recorder.gradients()
            norm = norm_of(model, cut_over_ranks)
            recorder.scalar("grad_norm", norm)
            for parameter in model.parameters():
                parameter.grad *= min(1.0, CLIP / float(norm))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(main)
