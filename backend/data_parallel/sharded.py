"""`ShardedStage`: what a rank keeps of a stage whose optimizer state, and more, is spread over the
copies of the stage (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from ...core.model.parameters import Parameter
from ...core.plan.plan import Plan
from ...core.program.buckets import Bucket, gradient_buckets, sums_are_sharded, waits_for_parts
from ...core.program.tensors import sequences_are_cut
from ..base.host_copies import HostCopies
from ..gradients.gradients import ExpertCopies, Gradients
from ..gradients.not_finite import Found
from ..gradients.parameter import Shard
from ..gradients.part_sums import PartSums, Reduced
from ..numerics import Numerics
from ..numerics.copies import Copies
from ..numerics.fast import FastNumerics
from ..transport.base import Group
from ..transport.overlap import CommunicationLane
from .base import DataParallel, Piece, SamplesOf
from .buckets import FlatBucket, OwnedPiece
from .copies import StageCopies
from .late import LateGather


class ShardedStage(DataParallel):
    """The buckets of one stage. `weights` hold its parameters, each once; `gradients` are all its sums, two for a table
    that is tied in the stage, by bucket with the keys of those that are trained."""

    def __init__(
        self,
        plan: Plan,
        stage: int,
        shards: Mapping[str, Shard],
        sums: Gradients,
        copies: StageCopies,
        *,
        numerics: Numerics,
        lane: CommunicationLane | None = None,
        late: LateGather | None = None,
    ):
        """`shards` are the trained ones, `sums` their gradients; `copies` those of the stage and of its experts. Where
        gradients are reduced after every microbatch, `lane` does it during the backward; `late` gathers updated weights
        during the next forward."""
        self._copies = copies
        flat = [self._bucket(plan, each, shards) for each in gradient_buckets(plan, stage)]
        flat = [each for each in flat if len(each)]
        tables = [each for each in flat if each.bucket.usages[0].role]
        self.gradients: list[tuple[Bucket, list[str]]] = [(each.bucket, each.keys) for each in flat]
        self.weights = [each for each in flat if each not in tables[1:]]
        for each in self.weights:
            each.flatten()
        self._owned = self._own()
        self._sums = sums
        self._late = late
        self.part_sums = self._part_sums(plan, sums, numerics, lane) if sums_are_sharded(plan) else None
        sums.reduce_in(self.gradients)
        for each in self.weights:
            each.want_rooms()
        for each in flat:
            self._want_rooms(each, numerics)

    def _want_rooms(self, flat: FlatBucket, numerics: Numerics) -> None:
        """Asks for the memory that the sums of a bucket are sent from."""
        copies = self._copies_of(flat.bucket.is_expert)
        early = self.part_sums is not None and self.part_sums.reduces(flat.bucket)
        numerics.want_rooms(len(flat), copies.backwards if early else copies.shard)

    @property
    def pieces(self) -> Sequence[OwnedPiece]:
        return [piece for _, piece in self._owned]

    def _own(self) -> list[tuple[FlatBucket, OwnedPiece]]:
        return [(each, piece) for each in self.weights for piece in each.pieces()]

    def send_masters(self, copies: HostCopies, num_pieces: int) -> None:
        """Of whole buckets."""
        first = [each for each, _ in self._owned[:num_pieces]]
        for each in self.weights:
            if each in first:
                each.send_master(copies)
        self._owned = self._own()

    def rounded(self, piece: Piece) -> Tensor | None:
        assert isinstance(piece, OwnedPiece)
        return piece.rounded

    def round_masters(self) -> None:
        for each in self.weights:
            each.round_master()

    def _part_sums(self, plan: Plan, sums: Gradients, numerics: Numerics, lane: CommunicationLane | None) -> PartSums:
        assert isinstance(numerics, FastNumerics)
        own = [(bucket, keys) for bucket, keys in self.gradients if not waits_for_parts(plan, bucket.name)]
        return PartSums(
            numerics, sums, [Reduced(bucket, keys, self._copies_of(bucket.is_expert)) for bucket, keys in own], lane
        )

    def _copies_of(self, expert: bool) -> Copies:
        copies = self._copies.experts if expert else self._copies.dense
        assert copies is not None, "experts have copies of their own"
        return copies

    def _bucket(self, plan: Plan, bucket: Bucket, shards: Mapping[str, Shard]) -> FlatBucket:
        copies = self._copies_of(bucket.is_expert)
        cp = plan.layout.cp if sequences_are_cut(plan) and not bucket.is_expert else 1
        return FlatBucket(bucket, shards, copies.gathers, cp, rests_in_parts=plan.layout.zero == 3)

    def reduce(self, samples_of: SamplesOf, tp: Group | None, experts: ExpertCopies | None) -> dict[str, Tensor]:
        """REDUCE_GRAD: by bucket this rank's part of the sums over the global batch."""
        nodes = () if experts is None else experts.nodes
        return self._sums.reduce_parts(self._copies.dense, samples_of, tp, self._copies.experts, nodes)

    def not_finite(self) -> Found:
        return super().not_finite() if self.part_sums is None else self.part_sums.take_not_finite()

    def counts(self, parameter: Parameter) -> bool:
        return self._copies_of(parameter.expert).is_first

    def gather(self) -> None:
        for each in self.weights:
            each.gather()

    def free(self) -> None:
        for each in self.weights:
            each.free()

    @property
    def gathered_bytes(self) -> int:
        return sum(each.gathered_bytes for each in self.weights)

    def share(self) -> None:
        """All copies get the weights that each has updated; during the next forward where the plan says so."""
        if self._late is None:
            for each in self.weights:
                each.share()
        else:
            self._late.start(self.weights)

    def settle(self) -> None:
        if self._late is not None:
            self._late.finish()

    def finished(self, parts: Mapping[str, Tensor], table: Tensor | None) -> list[Tensor]:
        """The gradients of `pieces` from `reduce`; `table` is that of a tied table, of which both sums are added."""
        tied = {id(flat) for flat in self.weights if flat.bucket.usages[0].role and table is not None}
        return [
            piece.of(table if table is not None and id(flat) in tied else parts[flat.bucket.name])
            for flat, piece in self._owned
        ]

    @contextmanager
    def whole_masters(self) -> Iterator[None]:
        self.settle()
        for each in self.weights:
            each.restore_masters()
        try:
            yield
        finally:
            for each in self.weights:
                each.give_up_masters()
