"""A Llama in plain torch, as the peers of `peers.py` train it, with weights that come from our own draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.backend.gradients.parameter import initial_shard
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE, parameters


class Attention(nn.Module):
    """[b, s, h] -> [b, s, h] over as many heads as the projections have features for."""

    def __init__(self, model: ModelSpec):
        super().__init__()
        self.head_dim = model.head_dim
        self.wq, self.wk, self.wv = (
            nn.Linear(model.hidden_size, model.num_heads * model.head_dim, bias=False) for _ in range(3)
        )
        self.wo = nn.Linear(model.num_heads * model.head_dim, model.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU)."""

    def __init__(self, model: ModelSpec):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm attention and pre-norm feed-forward, each added to its input."""

    def __init__(self, model: ModelSpec):
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(model.hidden_size, model.norm_eps) for _ in range(2))
        self.attention = Attention(model)
        self.feed_forward = FeedForward(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """int64 [b, s] -> logits [b, s, v]; of some layers only, a pipeline stage between hidden states [b, s, h].
    `vocab_size` is even."""

    def __init__(
        self,
        model: ModelSpec,
        sequence: int,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
    ):
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(model) for layer in layers})
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps) if last else None
        self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if last else None
        pairs = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        angles = torch.outer(torch.arange(sequence, dtype=torch.float64), model.rope_theta**-pairs).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves as in Llama's published weights."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initial_weights(model: ModelSpec, seed: int) -> dict[str, Tensor]:
    """The weights our runs start from, under the names of `Llama`. Heads are not grouped, and layers have no bias."""
    found: dict[str, Tensor] = {}
    for parameter in parameters(model):
        whole = tuple(slice(0, size) for size in parameter.shape)
        found |= _named(
            model, parameter.name, initial_shard(parameter, whole, seed, torch.device("cpu"), torch.float32).tensor
        )
    return found


def _named(model: ModelSpec, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One of our parameters as those of `Llama` (`core.model.parameters` says how rows are grouped)."""
    prefix, _, last = name.partition(".attention.qkv")
    if last:
        rows = tensor.view(model.num_heads, 3, model.head_dim, -1)
        return {
            f"{prefix}.attention.w{part}.weight": rows[:, number].flatten(0, 1) for number, part in enumerate("qkv")
        }
    prefix, _, last = name.partition(".mlp.up")
    if last:
        return {f"{prefix}.feed_forward.w1.weight": tensor[0::2], f"{prefix}.feed_forward.w3.weight": tensor[1::2]}
    for ours, theirs in (
        (TOKEN_TABLE, "tok_embeddings.weight"),
        ("head.norm", "norm"),
        ("head.output", "output"),
        ("attention.norm", "attention_norm"),
        ("attention.output", "attention.wo"),
        ("mlp.norm", "ffn_norm"),
        ("mlp.down", "feed_forward.w2"),
    ):
        name = name.replace(ours, theirs)
    return {name: tensor}
