"""`Schedule`: per pipeline rank a sequence of actions, and `Placement`: which rank holds which stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from .action import PER_MICROBATCH, Action, ActionArray, Kind
from .errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """Maps (stage, microbatch) to a pipeline rank.

    `ranks[stage]` holds the pipeline ranks that own the stage: one, or two replicas of which the first runs the lower half of the
    microbatches (two-direction schedules). `kind` only names the pattern (on one rank a vee is a loop too) and is not compared.

    `sources` holds for every stage the earlier stages whose outputs are added up, in this order, to its input, where that is not always
    the one before: branches that join (`core.modules`). Passes and rules about lines of stages do not take such a placement.
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
        return cls("vee", num_ranks, tuple((min(stage, 2 * num_ranks - 1 - stage),) for stage in range(2 * num_ranks)), num_microbatches)

    @classmethod
    def replicated(cls, num_ranks: int, num_microbatches: int) -> Placement:
        """Two directions: stage s on rank s for the lower half of the microbatches and on rank p-1-s for the upper half."""
        return cls("replicated", num_ranks, tuple((stage, num_ranks - 1 - stage) for stage in range(num_ranks)), num_microbatches)

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
        """Which replica of a stage a pipeline rank holds: 0, or 1 for the one that runs the upper half of the microbatches."""
        return self.ranks[stage].index(pp_rank)

    def ends_of(self, pp_rank: int) -> tuple[int, ...]:
        """The rank of the first and the rank of the last stage, of which `pp_rank` is one; () for a rank that is neither.

        Both ends of the same replica where they have replicas. () too where ends lie together on a rank and need no such pair.
        """
        first, last = self.ranks[0], self.ranks[-1]
        if pp_rank not in first + last or set(first) & set(last) or len(first) != len(last):
            return ()
        replica = (first if pp_rank in first else last).index(pp_rank)
        return first[replica], last[replica]

    def crossed_ends_of(self, pp_rank: int) -> tuple[int, ...]:
        """The ranks that hold both ends of the model, the first stage in one replica and the last in another (DualPipe), in the order of
        the first stage's replicas, if `pp_rank` is one of them; else (). Replicas keep different parts of a sum with ZeRO, so that what
        such a rank keeps of one end's lies at another place than what it keeps of the other's."""
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


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every pipeline rank does in one step, in order. Immutable; built by `core.schedules` or read from CSV.

    `actions` holds all ranks' actions one rank after the other; rank r owns `actions[offsets[r]:offsets[r + 1]]`.
    A schedule is *lowered* when it has its communication, gradient reductions and optimizer step; builders make compute-only ones.
    """

    name: str
    placement: Placement
    actions: ActionArray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        if len(self.offsets) != self.placement.num_ranks + 1:
            raise ScheduleError(f"{self.name}: {len(self.offsets) - 1} rows for the {self.placement.num_ranks} ranks of the placement.")
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.actions), "offsets do not cover the actions"
        wrong = np.flatnonzero(_outside(self.actions, self.placement))
        if len(wrong):
            raise ScheduleError(
                f"{self.name}: {self.actions[wrong[0]]} does not fit {self.num_stages} stages x {self.num_microbatches} microbatches, "
                "or lacks a microbatch, or has one that its kind does not take."
            )

    @classmethod
    def from_rows(cls, name: str, placement: Placement, rows: Sequence[Iterable[Action]]) -> Schedule:
        """A schedule from one list of actions per pipeline rank."""
        lists = [list(row) for row in rows]
        offsets = np.cumsum([0, *(len(row) for row in lists)])
        return cls(name, placement, ActionArray.from_actions([action for row in lists for action in row]), offsets)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step (of one data-parallel rank)."""
        return self.placement.num_microbatches

    @property
    def pp_rank(self) -> np.ndarray:
        """The pipeline rank of every action, as an int32 array beside the columns of `actions`."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    @property
    def is_lowered(self) -> bool:
        """True when the optimizer step, which `lower` adds last, is there."""
        return bool((self.actions.kind == Kind.STEP).any())

    def row(self, pp_rank: int) -> ActionArray:
        """The actions of one pipeline rank, in order."""
        return self.actions.take(slice(int(self.offsets[pp_rank]), int(self.offsets[pp_rank + 1])))

    def rows(self) -> Iterator[ActionArray]:
        """The actions of every pipeline rank, in rank order."""
        return (self.row(pp_rank) for pp_rank in range(self.num_ranks))

    def __len__(self) -> int:
        return len(self.actions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        same_shape = self.placement == other.placement and np.array_equal(self.offsets, other.offsets)
        return same_shape and self.actions == other.actions

    __hash__ = None  # type: ignore[assignment]

    def to_csv(self, dialect: Literal["shardproof", "torch"] = "shardproof") -> str:
        """One line per rank, cells as in torch.distributed.pipelining. With `dialect="torch"` STEP is dropped and replicas are refused."""
        from .schedules.csv import to_csv

        return to_csv(self, dialect)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """The inverse of `to_csv`, for both dialects. All malformed cells are reported together in one `ScheduleError`."""
        from .schedules.csv import from_csv

        return from_csv(text, name)


def _outside(actions: ActionArray, placement: Placement) -> np.ndarray:
    """Mask of actions whose numbers are out of range, or given where the kind takes none (or the other way round)."""
    takes_microbatch = np.array([kind in PER_MICROBATCH for kind in Kind])[actions.kind]
    pair = actions.kind == Kind.OVERLAP_F_B
    outside = (actions.stage < 0) | (actions.stage >= placement.num_stages) | (actions.pair_stage >= placement.num_stages)
    outside |= (actions.microbatch >= placement.num_microbatches) | (actions.pair_microbatch >= placement.num_microbatches)
    outside |= (actions.microbatch >= 0) != takes_microbatch
    return outside | ((actions.pair_stage >= 0) != pair) | ((actions.pair_microbatch >= 0) != pair)
