"""Finding 2: logits that were gathered go into the cross entropy of a vocabulary that is cut: the loss is
too large by log(ranks).

torchrun --nproc-per-node 1 examples/foreign/megatron_7452/gathered_logits.py right.ledger
torchrun --nproc-per-node 2 examples/foreign/megatron_7452/gathered_logits.py run.ledger
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tp_regions import Gather, cut, run
from vocabulary import HIDDEN, VOCAB, Head, Loss, batch

from shardproof import Recorder


class Model(nn.Module):
    """Token ids to losses."""

    def __init__(self, gather: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head, self.loss = nn.Embedding(VOCAB, HIDDEN), Head(), Loss()
        self.gather = gather

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        logits = self.head(self.embedding(tokens))
        return self.loss(Gather.apply(logits) if self.gather else logits, targets, 0.0, False).mean()


def main(folder: str, fixed: bool) -> None:
    """Two steps on the ranks of the default group."""
    model = Model(gather=not fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cuts = {"head.weight": cut(0, VOCAB), "head": cut(2, VOCAB)}
    with Recorder(folder, model, optimizer, cuts=cuts) as recorder:
        for _ in range(2):
            loss = model(*batch())
            loss.backward()
            recorder.scalar("loss", loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(main)
