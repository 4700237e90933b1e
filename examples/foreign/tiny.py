"""A small transformer and its data in plain torch, which the runs next to this file train in their own ways.

    python examples/foreign/tiny.py right.ledger

trains it on one device and writes the ledger that the others are compared with.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof import Recorder

VOCAB, HIDDEN, HEADS, LAYERS = 50, 24, 6, 3
SAMPLES, TOKENS, STEPS = 12, 6, 2


class Attention(nn.Module):
    """Causal self-attention; products apart, so that each can be cut by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[samples, tokens, hidden] -> the same; heads are as many as there are columns for."""
        heads = (
            each(x_BSH).unflatten(2, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer with norms before both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[samples, tokens, hidden] -> the same."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH + self.down(F.gelu(self.up(self.mlp_norm(x_BSH))))


class Tiny(nn.Module):
    """Token ids [samples, tokens] -> logits [samples, tokens, vocabulary]. A stage of a pipeline leaves out
    what it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(layer): Block() for layer in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(HIDDEN)
        self.head: nn.Module | None = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of the parts that are here."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def model() -> Tiny:
    """The same weights whoever makes it."""
    torch.manual_seed(1)
    return Tiny()


def adamw(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of every run."""
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Token ids and those that follow them, each [samples, tokens], of the global batch of a step."""
    ids = torch.randint(VOCAB, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross entropy over the tokens."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def main(folder: str, microbatches: int = 1, *, exact: bool = False) -> None:
    """Trains on one device, a step in so many microbatches, and records it."""
    net = model()
    optimizer = adamw(net.parameters())
    with Recorder(folder, net, optimizer, exact=exact) as recorder:
        for step in range(STEPS):
            losses = []
            for tokens, targets in zip(*(each.chunk(microbatches) for each in batch(step)), strict=True):
                losses.append(loss_of(net(tokens), targets) / microbatches)
                losses[-1].backward()
            recorder.scalar("loss", sum(losses))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--microbatches", type=int, default=1)
    main(**vars(parser.parse_args()))
