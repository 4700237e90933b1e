"""Layers cut over tensor-, sequence-, context- and expert-parallel ranks, with their exchanges. Knows no stage."""

from ..gradients.gradients import Gradients, WeightWork, finish_tied
from ..gradients.parameter import Shard
from .context import LayerContext
from .cross_entropy import LossChoice, VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from .data import TensorSpec, broadcast, context_part, context_positions, context_whole
from .dropout import hidden_dropout
from .embedding import PositionEmbedding, VocabParallelEmbedding
from .fused import join_fused, split_fused
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import HeadNorms, Norm
from .recompute import recomputed, recomputed_layer
from .shared_features import SharedFeaturesLinear
from .whole_linear import WholeLinear
from .whole_norm import WholeNorms

__all__ = [
    "ColumnParallelLinear",
    "Gradients",
    "HeadNorms",
    "LayerContext",
    "LossChoice",
    "Norm",
    "PositionEmbedding",
    "RowParallelLinear",
    "Shard",
    "SharedFeaturesLinear",
    "TensorSpec",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "WeightWork",
    "WholeLinear",
    "WholeNorms",
    "broadcast",
    "context_part",
    "context_positions",
    "context_whole",
    "finish_tied",
    "hidden_dropout",
    "join_fused",
    "recomputed",
    "recomputed_layer",
    "split_fused",
    "vocab_parallel_cross_entropy",
]
