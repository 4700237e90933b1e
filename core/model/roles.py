"""`Role`: what an operator of a model is for. Whoever treats some operators differently asks for the role, never for a
name: names are for people, ledgers and the recorder."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """The value is the end of the operator's name, behind the prefix of the block that it is in."""

    TOKENS = "embedding.tokens"
    POSITIONS = "embedding.positions"
    TOKENS_NORM = "embedding.norm"  # of the rows of the token table, before the first layer
    ATTENTION_NORM = "attention.norm"
    QKV = "attention.qkv"
    QUERY_HEAD_NORM = "attention.query_norm"
    KEY_HEAD_NORM = "attention.key_norm"
    ALL_QUERIES_NORM = "attention.all_queries_norm"  # of all heads of a token together
    ALL_KEYS_NORM = "attention.all_keys_norm"
    QUERIES = "attention.q"  # latent attention without low-rank queries
    QUERIES_DOWN = "attention.q_down"
    QUERIES_NORM = "attention.q_norm"
    QUERIES_UP = "attention.q_up"
    KEYS_DOWN = "attention.kv_down"
    KEYS_NORM = "attention.kv_norm"
    KEYS_UP = "attention.kv_up"
    CORE = "attention.core"
    ATTENTION_OUTPUT = "attention.output"
    ATTENTION_POST_NORM = "attention.post_norm"
    MLP_NORM = "mlp.norm"
    UP = "mlp.up"
    ACTIVATION = "mlp.activation"
    DOWN = "mlp.down"
    ROUTER = "mlp.router"
    DISPATCH = "mlp.dispatch"
    EXPERTS_UP = "mlp.experts.up"
    EXPERTS_ACTIVATION = "mlp.experts.activation"
    EXPERTS_DOWN = "mlp.experts.down"
    COMBINE = "mlp.combine"
    SHARED_UP = "mlp.shared.up"
    SHARED_ACTIVATION = "mlp.shared.activation"
    SHARED_DOWN = "mlp.shared.down"
    SHARED_GATE = "mlp.shared.gate"
    MLP_POST_NORM = "mlp.post_norm"
    EMBEDDING_NORM = "embedding_norm"  # of the next token's embedding, in multi-token prediction
    HIDDEN_NORM = "hidden_norm"
    PROJECTION = "projection"  # of a hidden state and the next token's embedding
    OUTPUT_NORM = "norm"
    HEAD_NORM = "head.norm"
    HEAD = "head.output"
    LOSS = "head.loss"
    INPUT = ""  # a block's input, where tensor-parallel ranks keep it in parts

    def named(self, prefix: str) -> str:
        """The operator's name in a block, such as `layers.3.attention.qkv`.

        >>> Role.QKV.named("layers.3"), Role.HEAD.named(""), Role.INPUT.named("layers.3")
        ('layers.3.attention.qkv', 'head.output', 'layers.3')
        """
        return ".".join(filter(None, (prefix, self.value)))
