"""`Role`: what an operation of a model is for. Whoever treats some layers differently asks for the role, never for a
name: names are for people, ledgers and the recorder."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """The value is the end of the layer's name, behind the prefix of the block that it is in."""

    TOKENS = "embedding.tokens"
    QKV = "attention.qkv"
    QUERIES = "attention.q"  # latent attention without low-rank queries
    QUERIES_DOWN = "attention.q_down"
    QUERIES_UP = "attention.q_up"
    KEYS_DOWN = "attention.kv_down"
    KEYS_UP = "attention.kv_up"
    CORE = "attention.core"
    ATTENTION_OUTPUT = "attention.output"
    UP = "mlp.up"
    DOWN = "mlp.down"
    ROUTER = "mlp.router"
    DISPATCH = "mlp.dispatch"
    EXPERTS_UP = "mlp.experts.up"
    EXPERTS_DOWN = "mlp.experts.down"
    COMBINE = "mlp.combine"
    SHARED_UP = "mlp.shared.up"
    SHARED_DOWN = "mlp.shared.down"
    PROJECTION = "projection"  # of a hidden state and the next token's embedding, in multi-token prediction
    HEAD = "head.output"
    LOSS = "head.loss"
    INPUT = ""  # a block's input, where tensor-parallel ranks keep it in parts

    def named(self, prefix: str) -> str:
        """The layer's name in a block, such as `layers.3.attention.qkv`.

        >>> Role.QKV.named("layers.3"), Role.HEAD.named(""), Role.INPUT.named("layers.3")
        ('layers.3.attention.qkv', 'head.output', 'layers.3')
        """
        return ".".join(filter(None, (prefix, self.value)))
