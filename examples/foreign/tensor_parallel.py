"""The small transformer cut by columns and rows with DTensor's parallel styles, norms with sequence parallelism.

torchrun --nproc-per-node 3 examples/foreign/tensor_parallel.py run.ledger
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import sys

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardproof import Recorder
from shardproof.verify.foreign import Slice

BLOCK = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def main(folder: str) -> None:
    """Trains on the ranks of the default group and records it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    net = tiny.model()
    parallelize_module(
        net,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in net.layers.values():
        parallelize_module(layer, mesh, BLOCK)
    optimizer = tiny.adamw(net.parameters())
    # between the styled modules, sums of plain tensors hold a part of the tokens, which only we know
    tokens_here = [Slice(dim=1, first=rank * tiny.TOKENS // size, size=tiny.TOKENS)]
    cuts = {f"layers.{layer}{part}": tokens_here for layer in range(tiny.LAYERS) for part in ("", ".attention")}
    with Recorder(folder, net, optimizer, cuts=cuts) as recorder:
        for step in range(tiny.STEPS):
            tokens, targets = tiny.batch(step)
            loss = tiny.loss_of(net(tokens), targets)
            loss.backward()
            recorder.scalar("loss", loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
