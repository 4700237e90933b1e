"""What a schedule's run is judged by: first causes among its values, and the sums of gradients and losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from ...core.schedule.action import Kind
from ...core.schedule.schedule import Schedule
from ..schedule.rules import Violation
from .schedule import ABSENT, ScheduleRun

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Judgement:
    """`places` are first causes, where a schedule computes otherwise than one device; `same_sums` says that all
    gradients and losses are the same sums all the same.

    `num_reductions[pp_rank, stage]` are the numbers of REDUCE_GRAD that contributions of a stage go through before
    STEP: (1,) is right. `unordered_stages` are those whose microbatches are not added in ascending order.
    """

    places: tuple[Violation, ...]
    same_sums: bool
    num_reductions: dict[tuple[int, int], tuple[int, ...]]
    unordered_stages: tuple[int, ...]


def judge(schedule: Schedule) -> Judgement:
    """A lowered schedule against one device."""
    return _Judge(ScheduleRun(schedule)).judgement()


class _Judge:
    def __init__(self, run: ScheduleRun):
        self.run = run
        self.schedule = run.schedule

    def judgement(self) -> Judgement:
        sums = [*self._gradient_places(), *self._loss_places()]
        return Judgement(
            places=(*self._forward_places(), *self._backward_places(), *sums),
            same_sums=not sums and self._same_gradients(),
            num_reductions=self._num_reductions(),
            unordered_stages=self._unordered_stages(),
        )

    def _forward_places(self) -> Iterator[Violation]:
        run = self.run
        rows = run.rows(Kind.F)
        source = run.forward_inputs[rows]
        caused = (run.stage[rows] == 0) | (source == ABSENT) | self.is_right[source]
        for row in rows[~self.is_right[rows] & caused].tolist():
            yield self._place(row, self._what(row, int(run.forward_inputs[row]), "output", -1))

    def _backward_places(self) -> Iterator[Violation]:
        run = self.run
        rows = run.rows(Kind.B, Kind.I)
        source, saved = run.gradient_inputs[rows], run.saved[rows]
        last = run.stage[rows] == self.schedule.num_stages - 1
        caused = ((saved == ABSENT) | self.is_right[saved]) & (last | (source == ABSENT) | self.is_right[source])
        for row in rows[~self.is_right[rows] & caused].tolist():
            if run.saved[row] == ABSENT:
                yield self._place(row, "it runs before its forward, so it has nothing to go back through")
            else:
                yield self._place(row, self._what(row, int(run.gradient_inputs[row]), "gradient", 1))
        for row in run.rows(Kind.W)[run.deferred[run.rows(Kind.W)] == ABSENT].tolist():
            yield self._place(row, "no I has left its work")

    def _what(self, row: int, source: int, value: str, step: int) -> str:
        run = self.run
        if not run.has_weights[row]:
            return "its parameters are not gathered: there is no UNSHARD after the last RESHARD"
        wanted = f"the {value} of stage {run.stage[row] + step} for microbatch {run.microbatch[row]}"
        if source == ABSENT:
            return f"it never gets {wanted}"
        return (
            f"it gets the {value} of stage {run.stage[source]} for microbatch {run.microbatch[source]} instead of "
            f"{wanted}"
        )

    def _place(self, row: int, what: str) -> Violation:
        return Violation(int(self.run.index[row]), int(self.run.rank[row]), what)

    @cached_property
    def is_right(self) -> np.ndarray:
        """[row] -> whether F, B and I make what their names say; True for all others. The last
        entry stands for ABSENT."""
        run = self.run
        right = np.ones(len(run.kind) + 1, dtype=bool)
        for kinds, table in (((Kind.F,), run.right.forward), ((Kind.B, Kind.I), run.right.gradient)):
            rows = run.rows(*kinds)
            right[rows] = run.values[rows] == table[run.stage[rows], run.microbatch[rows]]
        return right

    @cached_property
    def _step_index(self) -> np.ndarray:
        """[pp_rank] -> index of the first STEP, or `_NEVER`."""
        first = np.full(self.schedule.num_ranks, _NEVER)
        steps = self.run.rows(Kind.STEP)[::-1]
        first[self.run.rank[steps]] = self.run.index[steps]
        return first

    @cached_property
    def _adding(self) -> np.ndarray:
        """Rows that add to a weight gradient before their rank's STEP."""
        rows = self.run.rows(Kind.B, Kind.W)
        step = self._step_index[self.run.rank[rows]]
        return rows[self.run.index[rows] < np.where(step == _NEVER, -1, step)]

    def _gradient_places(self) -> Iterator[Violation]:
        """Microbatches that are missing from the gradient of a stage or in it twice, over all replicas of the stage."""
        for stage, microbatch, count in _not_once(self._counts(self._adding)):
            owner = self.schedule.placement.rank_of(stage, microbatch)
            times = "missing from" if count == 0 else f"{count} times in"
            what = f"microbatch {microbatch} is {times} the gradient of stage {stage} that STEP applies"
            yield Violation(None, owner, what, microbatch=microbatch)

    def _loss_places(self) -> Iterator[Violation]:
        run, last = self.run, self.schedule.num_stages - 1
        rows = run.rows(Kind.F)
        rows = rows[(run.stage[rows] == last) & (run.index[rows] < self._step_index[run.rank[rows]])]
        for _, microbatch, count in _not_once(self._counts(rows)[last:]):
            owner = self.schedule.placement.rank_of(last, microbatch)
            times = "missing from" if count == 0 else f"{count} times in"
            yield Violation(None, owner, f"microbatch {microbatch} is {times} the loss", microbatch=microbatch)

    def _counts(self, rows: np.ndarray) -> np.ndarray:
        """[stage, microbatch] -> how many of some rows there are."""
        counts = np.zeros((self.schedule.num_stages, self.schedule.num_microbatches), dtype=np.int64)
        np.add.at(counts, (self.run.stage[rows], self.run.microbatch[rows]), 1)
        return counts

    def _same_gradients(self) -> bool:
        """Every stage's sum of contributions is one device's, whatever the labels; and every loss
        is of its own targets."""
        sums = np.zeros(self.schedule.num_stages, dtype=np.uint64)
        np.add.at(sums, self.run.stage[self._adding], self.run.contributions[self._adding])
        losses = self.run.rows(Kind.F)
        losses = losses[self.run.stage[losses] == self.schedule.num_stages - 1]
        return bool(np.array_equal(sums, self.run.right.weight.sum(1, dtype=np.uint64)) and self.is_right[losses].all())

    def _num_reductions(self) -> dict[tuple[int, int], tuple[int, ...]]:
        run, length = self.run, len(self.schedule) + 1
        reductions, rows = run.rows(Kind.REDUCE_GRAD), self._adding
        holders = run.rank * self.schedule.num_stages + run.stage
        times = np.sort(holders[reductions] * length + run.index[reductions])
        step = np.minimum(self._step_index[run.rank[rows]], length - 1)
        before = np.searchsorted(times, holders[rows] * length + run.index[rows])
        counts = np.searchsorted(times, holders[rows] * length + step) - before
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        pairs = np.unique(np.stack([holders[rows], counts]), axis=1).T.tolist() if len(rows) else []
        for holder, group in groupby(pairs, key=lambda pair: pair[0]):
            pp_rank, stage = divmod(holder, self.schedule.num_stages)
            found[pp_rank, stage] = tuple(count for _, count in group)
        return found

    def _unordered_stages(self) -> tuple[int, ...]:
        run, rows = self.run, self._adding
        holder = run.rank[rows] * self.schedule.num_stages + run.stage[rows]
        rows = rows[np.lexsort((run.index[rows], holder))]
        same = (run.rank[rows][1:] == run.rank[rows][:-1]) & (run.stage[rows][1:] == run.stage[rows][:-1])
        falls = same & (np.diff(run.microbatch[rows]) < 0)
        return tuple(np.unique(run.stage[rows][1:][falls]).tolist())


def _not_once(counts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    for stage, microbatch in np.argwhere(counts != 1).tolist():
        yield stage, microbatch, int(counts[stage, microbatch])
