"""`Placement`: which pipeline rank holds which stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ..base.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """Maps (stage, microbatch) to a pipeline rank.

    `ranks[stage]` holds the pipeline ranks that own the stage: one, or two replicas of which the first runs the
    lower half of the microbatches (two-direction schedules). `kind` only names the pattern (on one rank a vee is a
    loop too) and is not compared.

    `sources` holds for every stage the earlier stages whose outputs are added up, in this order, to its input, where
    that is not always the one before: branches that join (`core.plan.plan.ModularPlan`). Passes and rules about lines
    of stages do not take such a placement.
    """

    kind: Literal["loop", "vee", "replicated", "explicit"] = field(compare=False)
    num_ranks: int
    ranks: tuple[tuple[int, ...], ...]
    num_microbatches: int
    sources: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def loop(cls, num_ranks: int, num_stages: int, num_microbatches: int) -> Placement:
        """Stage s on rank s mod p: one stage per rank, or interleaved."""
        return cls("loop", num_ranks, tuple((stage % num_ranks,) for stage in range(num_stages)), num_microbatches)

    @classmethod
    def vee(cls, num_ranks: int, num_microbatches: int) -> Placement:
        """Two stages per rank: down the ranks and back, so that first and last stage share rank 0."""
        return cls(
            "vee",
            num_ranks,
            tuple((min(stage, 2 * num_ranks - 1 - stage),) for stage in range(2 * num_ranks)),
            num_microbatches,
        )

    @classmethod
    def replicated(cls, num_ranks: int, num_microbatches: int) -> Placement:
        """Two directions: stage s on rank s for the lower half of the microbatches and on rank
        p-1-s for the upper half."""
        return cls(
            "replicated",
            num_ranks,
            tuple((stage, num_ranks - 1 - stage) for stage in range(num_ranks)),
            num_microbatches,
        )

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks, replicas counted once."""
        return len(self.ranks)

    def sources_of(self, stage: int) -> tuple[int, ...]:
        """The stages whose outputs, added up in this order, are a stage's input; none for one that reads tokens."""
        if self.sources is None:
            return (stage - 1,) if stage else ()
        return self.sources[stage]

    def target_of(self, stage: int) -> int:
        """The stage that a stage's output goes to; the number of stages for the last one."""
        if self.sources is None:
            return stage + 1
        return next((target for target, sources in enumerate(self.sources) if stage in sources), self.num_stages)

    def has_loss(self, stage: int) -> bool:
        """True for the stage that makes the losses, the last one."""
        return stage == self.num_stages - 1

    def called_there(self, stage: int) -> int:
        """The number that the ranks of a stage call it by."""
        return stage

    def rank_of(self, stage: int, microbatch: int | None = None) -> int:
        """The pipeline rank that runs `microbatch` of `stage`."""
        owners = self.ranks[stage]
        if len(owners) == 1:
            return owners[0]
        if microbatch is None:
            raise ScheduleError(f"stage {stage} has replicas on ranks {owners}; say which microbatch.")
        return owners[0] if microbatch < (self.num_microbatches + 1) // 2 else owners[1]

    def replica_of(self, stage: int, pp_rank: int) -> int:
        """Which replica of a stage a pipeline rank holds: 0, or 1 for the one that runs the upper
        half of the microbatches."""
        return self.ranks[stage].index(pp_rank)

    def ends_of(self, pp_rank: int) -> tuple[int, ...]:
        """The rank of the first and the rank of the last stage, of which `pp_rank` is one; ()
        for a rank that is neither.

        Both ends of the same replica where they have replicas. () too where ends lie together on a
        rank and need no such pair.
        """
        first, last = self.ranks[0], self.ranks[-1]
        if pp_rank not in first + last or set(first) & set(last) or len(first) != len(last):
            return ()
        replica = (first if pp_rank in first else last).index(pp_rank)
        return first[replica], last[replica]

    def crossed_ends_of(self, pp_rank: int) -> tuple[int, ...]:
        """The ranks that hold both ends of the model, the first stage in one replica and the last in another
        (DualPipe), in the order of the first stage's replicas, if `pp_rank` is one of them; else (). Replicas keep
        different parts of a sum with ZeRO, so that what such a rank keeps of one end's lies at another place than what
        it keeps of the other's."""
        first, last = self.ranks[0], self.ranks[-1]
        return first if pp_rank in first and first != last and set(first) == set(last) else ()

    def microbatches_of(self, stage: int, replica: int) -> tuple[int, int]:
        """The microbatches `[lo, hi)` that a replica of a stage runs."""
        if len(self.ranks[stage]) == 1:
            return 0, self.num_microbatches
        half = (self.num_microbatches + 1) // 2
        return (0, half) if replica == 0 else (half, self.num_microbatches)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages a pipeline rank holds, ascending."""
        return self.stages_of_ranks[pp_rank]

    @cached_property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every pipeline rank, ascending, found in one pass: thousands of ranks ask."""
        owned: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, owners in enumerate(self.ranks):
            for pp_rank in dict.fromkeys(owners):
                owned[pp_rank].append(stage)
        return tuple(map(tuple, owned))


@dataclass(frozen=True)
class ModulePlacement(Placement):
    """The stages of one module, a pipeline rank for each. A module that takes hidden states of others has before its
    first stage one that is called -1, on pipeline rank -1, and is stage `before` there; one that `gives` some has one
    after its last, on a pipeline rank after its own, which is stage 0 there."""

    before: int | None = None
    gives: bool = False

    def sources_of(self, stage: int) -> tuple[int, ...]:
        """The stage before; -1 for other modules."""
        return (stage - 1,) if stage or self.before is not None else ()

    def has_loss(self, stage: int) -> bool:
        """False where what a stage makes goes to another one."""
        return not self.gives and super().has_loss(stage)

    def called_there(self, stage: int) -> int:
        """A stage of this module, or of the one before or behind, by the number that its own module gives it."""
        if stage == -1 and self.before is not None:
            return self.before
        return 0 if stage == self.num_stages else stage

    def rank_of(self, stage: int, microbatch: int | None = None) -> int:
        """The pipeline rank of a stage, which has the same number."""
        return stage
