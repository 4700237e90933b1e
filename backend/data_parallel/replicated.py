"""`ReplicatedStage`: every copy of a stage has all of its weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ...core.program.buckets import Bucket, are_bucketed, gradient_buckets
from ..base.host_copies import HostCopies
from ..gradients.gradients import ExpertCopies, Gradients
from ..gradients.parameter import Shard, canonical
from ..transport.base import Group
from .base import DataParallel, Piece, SamplesOf


@dataclass(frozen=True)
class ReplicatedStage(DataParallel):
    """The trained shards of a stage, and the sums of their gradients, over `copies` of the stage. The storage of those
    that are `away` is in host memory."""

    shards: Mapping[str, Shard]
    gradients: Gradients
    copies: Group
    away: dict[str, Shard] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        stage: int,
        shards: Mapping[str, Shard],
        gradients: Gradients,
        copies: Group,
        experts: Group | None = None,
    ) -> ReplicatedStage:
        """Reduced in the plan's buckets, where it has such; `experts` are the copies of experts."""
        if are_bucketed(plan):
            gradients.reduce_in(trained_buckets(plan, stage, shards))
        gradients.want_rooms(copies, experts)
        return cls(shards, gradients, copies)

    @property
    def pieces(self) -> list[Shard]:
        return list(self.shards.values())

    def reduce(self, samples_of: SamplesOf, tp: Group | None, experts: ExpertCopies | None) -> dict[str, Tensor]:
        return self.gradients.reduce(self.copies, samples_of, tp, experts)

    def finished(self, reduced: Mapping[str, Tensor], table: Tensor | None) -> list[Tensor]:
        return [table if table is not None and name == TOKEN_TABLE else reduced[name] for name in self.shards]

    def gather(self) -> None:
        pass  # weights rest whole

    def free(self) -> None:
        pass

    def share(self) -> None:
        for name, shard in self.shards.items():
            if name not in self.away:
                shard.refresh()

    def send_masters(self, copies: HostCopies, num_pieces: int) -> None:
        for name, shard in list(self.shards.items())[:num_pieces]:
            if shard.operand is not shard.storage:
                shard.storage.data = copies.copied(shard.storage)
                self.away[name] = shard

    def rounded(self, piece: Piece) -> Tensor | None:
        shard = self.away.get(piece.parameter.name)
        return None if shard is None else canonical(shard.parameter, shard.operand)

    def round_masters(self) -> None:
        for shard in self.away.values():
            shard.refresh()

    @contextmanager
    def whole_masters(self) -> Iterator[None]:
        resting = {name: shard.storage.data for name, shard in self.away.items()}
        for shard in self.away.values():
            shard.storage.data = shard.storage.to(shard.operand.device)
        try:
            yield
        finally:
            for name, shard in self.away.items():
                shard.storage.data = resting[name]


def trained_buckets(plan: Plan, stage: int, trained: Container[str]) -> list[tuple[Bucket, list[str]]]:
    """The buckets of a stage with the keys of the gradients in them; only parameters that are `trained` have any."""
    found = [
        (each, [usage.key for usage in each.usages if usage.parameter.name in trained])
        for each in gradient_buckets(plan, stage)
    ]
    return [(bucket, keys) for bucket, keys in found if keys]
