"""The small transformer under FSDP2, each rank with its share of the batch and of every weight.
DTensors say what a rank holds.

torchrun --nproc-per-node 3 examples/foreign/fsdp2.py run.ledger
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import sys

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardproof import Recorder


def main(folder: str) -> None:
    """Trains on the ranks of the default group and records it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = tiny.model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = tiny.adamw(net.parameters())
    share = tiny.SAMPLES // size
    with Recorder(folder, net, optimizer, first_sample=rank * share, loss_scale=size) as recorder:
        for step in range(tiny.STEPS):
            tokens, targets = (each[rank * share : (rank + 1) * share] for each in tiny.batch(step))
            loss = tiny.loss_of(net(tokens), targets)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            recorder.scalar("loss", mean / size)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
