"""The small transformer in torch.distributed.pipelining's 1F1B: the bits of one device that
takes the same microbatches.

torchrun --nproc-per-node 3 examples/foreign/pipelining.py run.ledger
python examples/foreign/tiny.py right.ledger --microbatches 4
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import sys

import tiny
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardproof import Recorder

MICROBATCHES = 4


def stage_of(rank: int, size: int) -> tiny.Tiny:
    """The layers of one rank, under their names in the whole model."""
    net = tiny.model()
    held = range(rank * tiny.LAYERS // size, (rank + 1) * tiny.LAYERS // size)
    for layer in range(tiny.LAYERS):
        if layer not in held:
            del net.layers[str(layer)]
    if rank:
        net.embedding = None
    if rank < size - 1:
        net.norm = net.head = None
    return net


def main(folder: str, *, exact: bool = False) -> None:
    """Trains on the ranks of the default group and records it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = stage_of(rank, size)
    optimizer = tiny.adamw(net.parameters())
    stage = PipelineStage(net, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=tiny.loss_of)
    with Recorder(folder, stage, optimizer, loss_scale=MICROBATCHES, exact=exact) as recorder:
        for step in range(tiny.STEPS):
            tokens, targets = tiny.batch(step)
            losses: list[torch.Tensor] = []
            schedule.step(*(() if rank else (tokens,)), target=targets, losses=losses)
            if losses:
                recorder.scalar("loss", sum(each / MICROBATCHES for each in losses))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
