"""Layers cut over tensor-parallel ranks, built on an explicit group and exchangeable numerics."""

from .context import LayerContext, Microbatch
from .cross_entropy import VocabParallelCrossEntropy
from .embedding import PositionEmbedding, VocabParallelEmbedding
from .gradients import Gradients, WeightWork, finish_tied
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import Norm
from .parameter import Shard

__all__ = [
    "ColumnParallelLinear",
    "Gradients",
    "LayerContext",
    "Microbatch",
    "Norm",
    "PositionEmbedding",
    "RowParallelLinear",
    "Shard",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "WeightWork",
    "finish_tied",
]
