"""`View`: a schedule's actions as index tables, made once for all rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ....core.base.findings import Where
from ....core.schedule.action import Action, Kind
from ....core.schedule.schedule import Schedule
from ..facts import Facts
from .blocking import NONE, Blocked, Hops, run_blocking


@dataclass(frozen=True)
class View:
    """The actions of a schedule with overlapped pairs taken apart, and where each one is.

    An *index* numbers the actions of the schedule, rank after rank; inside one rank a smaller index runs earlier.
    """

    schedule: Schedule
    facts: Facts = field(default_factory=Facts)

    @cached_property
    def rank(self) -> np.ndarray:
        """Pipeline rank of every index."""
        return self.schedule.pp_rank

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(kind, stage, microbatch, index) of every action, the forward and backward of a pair
        apart; ascending by index."""
        actions = self.schedule.actions
        index = np.arange(len(actions))
        pair = np.flatnonzero(actions.kind == Kind.OVERLAP_F_B)
        kind = np.where(actions.kind == Kind.OVERLAP_F_B, np.int8(Kind.F), actions.kind)
        if not len(pair):
            return kind, actions.stage, actions.microbatch, index
        columns = (
            np.concatenate([kind, np.full(len(pair), Kind.B, dtype=np.int8)]),
            np.concatenate([actions.stage, actions.pair_stage[pair]]),
            np.concatenate([actions.microbatch, actions.pair_microbatch[pair]]),
            np.concatenate([index, pair]),
        )
        order = np.argsort(columns[3], kind="stable")
        kind, stage, microbatch, index = (column[order] for column in columns)
        return kind, stage, microbatch, index

    @cached_property
    def _identities(self) -> dict[Kind, tuple[np.ndarray, np.ndarray]]:
        """Kind -> (first index of each [stage, microbatch], indices of repetitions)."""
        kind, stage, microbatch, index = self.parts
        shape = (self.schedule.num_stages, self.schedule.num_microbatches)
        tables = {}
        for each in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
            chosen = np.flatnonzero(kind == each)
            table = np.full(shape, NONE, dtype=np.int64)
            where = (stage[chosen], microbatch[chosen])
            # Of repeated cells the last assignment stays: backwards, so that it is the first action (copies, as
            # numpy may turn strides).
            table[where[0][::-1].copy(), where[1][::-1].copy()] = index[chosen][::-1].copy()
            tables[each] = table, index[chosen][table[where] != index[chosen]]
        return tables

    def first(self, kind: Kind) -> np.ndarray:
        """[stage, microbatch] -> index of the first such action, or NONE."""
        return self._identities[kind][0]

    def repeated(self, kind: Kind) -> np.ndarray:
        """Indices of actions whose (kind, stage, microbatch) was there before."""
        return self._identities[kind][1]

    @cached_property
    def gradient(self) -> np.ndarray:
        """[stage, microbatch] -> index of the B or I that makes the gradient of the stage's input, or NONE."""
        full = self.first(Kind.B)
        return np.where(full != NONE, full, self.first(Kind.I))

    def owner(self, stage: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
        """The pipeline rank that the placement names for each (stage, microbatch)."""
        half = (self.schedule.num_microbatches + 1) // 2
        owners = self.schedule.placement.ranks
        first, second = (np.array([ranks[i % len(ranks)] for ranks in owners]) for i in (0, 1))
        return np.where(microbatch < half, first[stage], second[stage])

    @cached_property
    def owner_table(self) -> np.ndarray:
        """[stage, microbatch] -> pipeline rank."""
        stage, microbatch = np.indices((self.schedule.num_stages, self.schedule.num_microbatches), sparse=True)
        return self.owner(stage, microbatch)

    @cached_property
    def hops(self) -> tuple[Hops, Hops]:
        """The tables of everything handed over forward and backward."""
        crossing = self.owner_table[:-1] != self.owner_table[1:]
        forward, gradient = self.first(Kind.F), self.gradient
        return (
            Hops(
                "output", self.first(Kind.SEND_F)[:-1], self.first(Kind.RECV_F)[1:], forward[:-1], forward[1:], crossing
            ),
            Hops(
                "gradient",
                self.first(Kind.SEND_B)[1:],
                self.first(Kind.RECV_B)[:-1],
                gradient[1:],
                gradient[:-1],
                crossing,
            ),
        )

    def find(self, pp_rank: int, action: Action) -> int | None:
        """The first index of an action in the row of a rank; None when it is not there."""
        kind, stage, microbatch, index = self.parts
        lo, hi = np.searchsorted(index, self.schedule.offsets[pp_rank : pp_rank + 2])
        wanted, same = action.parts[0], slice(lo, hi)
        number = NONE if wanted.microbatch is None else wanted.microbatch
        found = np.flatnonzero(
            (kind[same] == wanted.kind) & (stage[same] == wanted.stage) & (microbatch[same] == number)
        )
        return int(index[same][found[0]]) if len(found) else None

    @cached_property
    def blocking(self) -> Blocked:
        """How the lists end when every send and receive blocks; worked out once for all rules."""
        return run_blocking(self.schedule, self.hops)

    def token(self, index: int) -> str:
        """The token of an action."""
        return str(self.schedule.actions[int(index)])

    def place(self, index: int) -> str:
        """Rank, step and token of an action, as findings name it."""
        rank = int(self.rank[index])
        return f"rank {rank}, step {int(index) - int(self.schedule.offsets[rank])}, {self.token(index)}"

    def where(self, pp_rank: int, index: int | None, microbatch: int | None = None) -> Where:
        """The place of an action, else the rank that lacks one of a microbatch."""
        if index is None:
            return Where(pp_rank, microbatch=microbatch)
        action = self.schedule.actions[index]
        return Where(int(self.rank[index]), str(action), microbatch=action.microbatch, words=self.place(index))
