"""`ObservedGathers`: the weights of a stage that rests in parts (ZeRO 3), shown to an observer when UNSHARD has
brought them together."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.observe import Observer
from ..gradients.parameter import canonical
from ..model.transformer import Stage
from ..pipeline.executor import StageWeights
from .base import DataParallel


class ObservedGathers:
    """What the executor gathers and frees of a stage, seen by an observer while the stage trains."""

    def __init__(self, weights: DataParallel, stage: Stage, observer: Observer):
        self._weights, self._stage, self._observer = weights, stage, observer

    def gather(self) -> None:
        """UNSHARD."""
        self._weights.gather()
        if self._stage.training and self._weights.gathered_bytes:
            self._show()

    def free(self) -> None:
        """RESHARD."""
        self._weights.free()

    def _show(self) -> None:
        """What this rank has brought, in the format that layers compute with, and what it has got."""
        shards = self._stage.trained
        for piece in self._weights.pieces:
            dtype = shards[piece.parameter.name].operand.dtype
            self._observer.brought(piece.parameter.name, piece.slices, piece.tensor.to(dtype))
        for name, shard in shards.items():
            self._observer.gathered(name, shard.slices, canonical(shard.parameter, shard.operand))


def observed(
    weights: Mapping[int, DataParallel], stages: Mapping[int, Stage], observer: Observer | None
) -> Mapping[int, StageWeights]:
    """The weights of every stage, observed where there is an observer."""
    if observer is None:
        return weights
    return {stage: ObservedGathers(own, stages[stage], observer) for stage, own in weights.items()}
