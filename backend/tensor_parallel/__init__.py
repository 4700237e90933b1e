"""Layers cut over tensor-parallel ranks, built on an explicit group and exchangeable numerics."""

from .context import LayerContext, Microbatch
from .cross_entropy import LossChoice, VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from .data import TensorSpec, broadcast, context_part, context_positions, context_whole
from .dropout import attention_with_dropout, hidden_dropout
from .embedding import PositionEmbedding, VocabParallelEmbedding
from .gradients import Gradients, WeightWork, finish_tied
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import Norm
from .parameter import Shard
from .recompute import recomputed

__all__ = [
    "ColumnParallelLinear",
    "Gradients",
    "LayerContext",
    "LossChoice",
    "Microbatch",
    "Norm",
    "PositionEmbedding",
    "RowParallelLinear",
    "Shard",
    "TensorSpec",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "WeightWork",
    "attention_with_dropout",
    "broadcast",
    "context_part",
    "context_positions",
    "context_whole",
    "finish_tied",
    "hidden_dropout",
    "recomputed",
    "vocab_parallel_cross_entropy",
]
