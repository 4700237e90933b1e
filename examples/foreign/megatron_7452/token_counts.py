"""Finding 3: the loss of a second head is normalised by the tokens of each rank instead of those of all.

torchrun --nproc-per-node 1 examples/foreign/megatron_7452/token_counts.py right.ledger
torchrun --nproc-per-node 4 examples/foreign/megatron_7452/token_counts.py run.ledger
shardproof verify run.ledger --against right.ledger
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from tp_regions import own_part, run

from shardproof import Recorder

VOCAB, HIDDEN, SAMPLES, TOKENS = 24, 8, 12, 6


class Model(nn.Module):
    """Logits of the next token and of the one after it, each [samples, tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.head, self.second_head = nn.Linear(HIDDEN, VOCAB), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        x = self.embedding(tokens)
        return self.head(x), self.second_head(x)


def sum_of_losses(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """The sum of the cross entropies of the tokens that count."""
    return (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * mask.flatten()).sum()


def over_all_ranks(count: Tensor) -> Tensor:
    """A sum over the ranks."""
    total = count.clone()
    dist.all_reduce(total)
    return total


def main(folder: str, fixed: bool) -> None:
    """Two steps on the ranks of the default group, each with its part of the samples."""
    model, own = Model(), own_part(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.randint(VOCAB, (3, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(TOKENS)[None] < 2 + torch.arange(SAMPLES)[:, None] % 4  # documents of 2 to 5 tokens
    second_mask = mask.roll(-1, 1) & mask  # whose last has no token after the next
    tokens, targets, second_targets = (each[own] for each in drawn)
    counts, second_counts = mask[own].sum(), second_mask[own].sum()
    with Recorder(folder, model, optimizer, first_sample=own.start):
        for _ in range(2):
            logits, second_logits = model(tokens)
            ratio = over_all_ranks(counts) / over_all_ranks(second_counts) if fixed else counts / second_counts
            loss = sum_of_losses(logits, targets, mask[own])
            loss = loss + 0.5 * ratio * sum_of_losses(second_logits, second_targets, second_mask[own])
            loss = loss / over_all_ranks(counts)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(main)
