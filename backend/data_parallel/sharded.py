"""`ShardedStage`: what a rank keeps of a stage whose optimizer state, and more, is spread over the copies of the stage (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from torch import Tensor

from ...core.plan import Plan
from ...core.program.buckets import Bucket, gradient_buckets
from ...core.program.tensors import sequences_are_cut
from ..tensor_parallel.gradients import ExpertCopies, Gradients
from ..tensor_parallel.parameter import Shard
from ..transport.base import Group
from .buckets import FlatBucket, KeptPiece


def trained_buckets(plan: Plan, stage: int, trained: Container[str]) -> list[tuple[Bucket, list[str]]]:
    """The buckets of a stage with the keys of the gradients in them; only parameters that are `trained` have any."""
    found = [(each, [usage.key for usage in each.usages if usage.parameter.name in trained]) for each in gradient_buckets(plan, stage)]
    return [(bucket, keys) for bucket, keys in found if keys]


class ShardedStage:
    """The buckets of one stage. `weights` hold its parameters, each once; `gradients` are all its sums, two for a table that is tied in the
    stage, by bucket with the keys of those that are trained."""

    def __init__(self, plan: Plan, stage: int, shards: Mapping[str, Shard], copies: Group, experts: Group | None):
        """`shards` are the trained ones; `copies` and `experts` join the copies of the stage and of its experts."""
        cp = plan.layout.cp if sequences_are_cut(plan) else 1
        flat = [self._bucket(each, shards, copies, experts, cp) for each in gradient_buckets(plan, stage)]
        flat = [each for each in flat if len(each)]
        tables = [each for each in flat if each.bucket.usages[0].role]
        self.gradients: list[tuple[Bucket, list[str]]] = [(each.bucket, each.keys) for each in flat]
        self.weights = [each for each in flat if each not in tables[1:]]
        for each in self.weights:
            each.flatten()
        self.pieces: list[tuple[FlatBucket, KeptPiece]] = [(each, piece) for each in self.weights for piece in each.pieces()]
        self.copies = copies

    @staticmethod
    def _bucket(bucket: Bucket, shards: Mapping[str, Shard], copies: Group, experts: Group | None, cp: int) -> FlatBucket:
        if not bucket.is_expert:
            return FlatBucket(bucket, shards, copies, cp)
        assert experts is not None, "experts have copies of their own"
        return FlatBucket(bucket, shards, experts, 1)

    def reduce(
        self, gradients: Gradients, samples_of: Callable[[int], tuple[int, int]], tp: Group | None, experts: ExpertCopies | None
    ) -> dict[str, Tensor]:
        """REDUCE_GRAD: by bucket this rank's part of the sums over the global batch."""
        return gradients.reduce_parts(self.copies, samples_of, tp, experts)

    def share(self) -> None:
        """All copies get the weights that each has updated."""
        for each in self.weights:
            each.share()

    def finished(self, parts: Mapping[str, Tensor], table: Tensor | None) -> list[Tensor]:
        """The gradients of `pieces` from `reduce`; `table` is that of a tied table, of which both sums are added."""
        tied = {id(flat) for flat in self.weights if flat.bucket.usages[0].role and table is not None}
        return [piece.of(table if table is not None and id(flat) in tied else parts[flat.bucket.name]) for flat, piece in self.pieces]
