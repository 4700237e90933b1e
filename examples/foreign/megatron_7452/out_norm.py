"""Finding 11: a norm that all heads share has a part of its gradient on each rank, and the sum is taken with
sequence parallelism only.

torchrun --nproc-per-node 1 examples/foreign/megatron_7452/out_norm.py right.ledger
torchrun --nproc-per-node 2 examples/foreign/megatron_7452/out_norm.py run.ledger
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from heads import Attention, batch, cuts
from tp_regions import run

from shardproof import Recorder


def main(folder: str, fixed: bool) -> None:
    """Two steps on the ranks of the default group."""
    model = Attention(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, wanted = batch()
    with Recorder(folder, model, optimizer, cuts=cuts()):
        for _ in range(2):
            (model(x) - wanted).square().mean().backward()
            if fixed:
                dist.all_reduce(model.norm.weight.grad)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(main)
