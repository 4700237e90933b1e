"""What a schedule computes, against a plain interpreter: ranks take turns, values are interned
trees, sums are multisets."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.symbolic.schedule import OneDevice, mixed
from shardproof.verify.symbolic.sums import judge


class Oracle:
    """Runs the rows with buffered messages, blocking in list order. `stuck` when a receive waits for ever."""

    def __init__(self, schedule: Schedule):
        self.schedule, self.last = schedule, schedule.num_stages - 1
        self.ids: dict[tuple, int] = {}
        self.memory: dict[tuple, int | None] = {}
        self.wires: defaultdict[tuple, list] = defaultdict(list)
        self.gradients: defaultdict[tuple, list] = defaultdict(list)
        self.applied: dict[tuple, list] = {}
        self.losses: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
        self.counted_losses: list[int] = []
        self.wrong = 0
        rows = [list(row) for row in schedule.rows()]
        cursors = [0] * len(rows)
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(rows):
                while cursors[rank] < len(row) and self.run(rank, row[cursors[rank]]):
                    cursors[rank] += 1
                    progress = True
        self.stuck = cursors != [len(row) for row in rows]

    def node(self, *parts) -> int:
        return self.ids.setdefault(parts, len(self.ids))

    def output(self, stage: int, microbatch: int) -> int:
        below = self.node("tokens", microbatch) if stage == 0 else self.output(stage - 1, microbatch)
        return self.node("F", stage, below)

    def gradient(self, what: str, stage: int, microbatch: int) -> int:
        above = self.node("targets", microbatch) if stage == self.last else self.gradient("I", stage + 1, microbatch)
        return self.node(what, stage, self.output(stage, microbatch), above)

    def run(self, rank: int, action: Action) -> bool:
        """False when it has to wait."""
        s, m = action.stage, action.microbatch
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            step, slot = (-1, "in") if action.kind is Kind.RECV_F else (1, "out gradient")
            if not 0 <= s + step <= self.last:
                self.memory[rank, slot, s, m] = None
                return True
            wire = self.wires[action.kind, self.schedule.placement.rank_of(s + step, m), rank]
            if not wire:
                return False
            self.memory[rank, slot, s, m] = wire.pop(0)
            return True
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            step, slot, receive = (
                (1, "out", Kind.RECV_F) if action.kind is Kind.SEND_F else (-1, "in gradient", Kind.RECV_B)
            )
            if 0 <= s + step <= self.last:
                self.wires[receive, rank, self.schedule.placement.rank_of(s + step, m)].append(
                    self.memory.get((rank, slot, s, m))
                )
        elif action.kind is Kind.REDUCE_GRAD:
            for entry in self.gradients[rank, s]:
                entry[1] += 1
        elif action.kind is Kind.STEP:
            if rank not in {r for r, _ in self.applied}:
                for (r, stage), entries in self.gradients.items():
                    if r == rank:
                        self.applied[r, stage] = [tuple(entry) for entry in entries]
                self.applied.setdefault((rank, -1), [])
                self.counted_losses += self.losses[rank]
        else:
            for part in action.parts:
                self.compute(rank, part)
        return True

    def compute(self, rank: int, action: Action) -> None:
        s, m = action.stage, action.microbatch
        if action.kind is Kind.F:
            given = self.node("tokens", m) if s == 0 else self.memory.get((rank, "in", s, m))
            value = self.node("F", s, given)
            self.wrong += value != self.output(s, m)
            self.memory[rank, "saved", s, m] = self.memory[rank, "out", s, m] = value
            if s == self.last:
                self.losses[rank].append(self.node("loss", value, m))
            elif self.schedule.placement.rank_of(s + 1, m) == rank:
                self.memory[rank, "in", s + 1, m] = value
        elif action.kind in (Kind.B, Kind.I):
            given = self.node("targets", m) if s == self.last else self.memory.get((rank, "out gradient", s, m))
            saved = self.memory.get((rank, "saved", s, m))
            value = self.node("I", s, saved, given)
            self.wrong += value != self.gradient("I", s, m)
            self.memory[rank, "in gradient", s, m] = value
            if s > 0 and self.schedule.placement.rank_of(s - 1, m) == rank:
                self.memory[rank, "out gradient", s - 1, m] = value
            weight = self.node("W", s, saved, given)
            if action.kind is Kind.B:
                self.gradients[rank, s].append([weight, 0])
            else:
                self.memory[rank, "work", s, m] = weight
        elif action.kind is Kind.W:
            work = self.memory.get((rank, "work", s, m))
            self.wrong += work is None
            self.gradients[rank, s].append([work, 0])

    def sums(self) -> bool:
        """Whether every stage's gradient and the loss are the sums they should be, by their terms."""
        for stage in range(self.last + 1):
            terms = Counter(value for (_, s), entries in self.applied.items() if s == stage for value, _ in entries)
            if terms != Counter(self.gradient("W", stage, m) for m in range(self.schedule.num_microbatches)):
                return False
        wanted = Counter(self.node("loss", self.output(self.last, m), m) for m in range(self.schedule.num_microbatches))
        return Counter(self.counted_losses) == wanted

    def right(self) -> bool:
        """Whether everything is what its name says, and reduced once."""
        return (
            not self.wrong
            and self.sums()
            and all(count == 1 for entries in self.applied.values() for _, count in entries)
        )


NAMES = [
    ("1F1B", 3, 1),
    ("GPipe", 2, 1),
    ("Interleaved1F1B", 2, 2),
    ("ZBH1", 3, 1),
    ("ZBVZeroBubble", 2, 2),
    ("DualPipe", 4, 1),
]


@st.composite
def mutants(draw: st.DrawFn) -> Schedule:
    """A lowered schedule with up to three of its actions dropped, doubled, moved or renamed."""
    name, pp, vpp = draw(st.sampled_from(NAMES))
    schedule = lower(build(name, pp=pp, vpp=vpp, num_microbatches=8 if name == "DualPipe" else draw(st.integers(1, 4))))
    rows = [list(row) for row in schedule.rows()]
    for _ in range(draw(st.integers(0, 3))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        i, j = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        match draw(st.sampled_from(["drop", "double", "swap", "move", "rename"])):
            case "drop":
                del row[i]
            case "double":
                row.insert(j, row[i])
            case "swap":
                row[i], row[j] = row[j], row[i]
            case "move":
                row.insert(j, row.pop(i))
            case "rename":
                if row[i].microbatch is not None and row[i].kind is not Kind.OVERLAP_F_B:
                    row[i] = Action(row[i].stage, row[i].kind, draw(st.integers(0, schedule.num_microbatches - 1)))
        if not row:
            row.append(Action(0, Kind.RESHARD))
    return Schedule.from_rows("mutant", schedule.placement, rows)


@settings(deadline=None, max_examples=400)
@given(mutants())
def test_a_mutated_schedule_is_judged_as_the_plain_interpreter_sees_it(schedule: Schedule):
    oracle = Oracle(schedule)
    if oracle.stuck or (schedule.actions.kind == Kind.RESHARD).any():
        return
    judgement = judge(schedule)
    reduced_once = all(counts == (1,) for counts in judgement.num_reductions.values())
    assert (not judgement.places and judgement.same_sums and reduced_once) == oracle.right()
    if not any(place.index is None for place in judgement.places):
        assert judgement.same_sums == oracle.sums()


@pytest.mark.parametrize(("name", "pp", "vpp"), NAMES)
def test_the_plain_interpreter_finds_the_builders_right(name, pp, vpp):
    schedule = lower(build(name, pp=pp, vpp=vpp, num_microbatches=8))
    assert Oracle(schedule).right() and not judge(schedule).places


def test_crossed_messages_that_cross_back_are_the_same_sums_under_other_names():
    """Stage 1 runs microbatches 0 and 1 under each other's names; stage 2 and the way back put
    everything right again."""
    rows = [
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B1 0RECV_B0 0B1 0B0 0REDUCE_GRAD 0STEP",
        "1RECV_F0 1RECV_F1 1F0 1F1 1SEND_F1 1SEND_F0 1RECV_B1 1RECV_B0 1B0 1B1 1SEND_B0 1SEND_B1 1REDUCE_GRAD 1STEP",
        "2RECV_F0 2RECV_F1 2F0 2F1 2B0 2B1 2SEND_B0 2SEND_B1 2REDUCE_GRAD 2STEP",
    ]
    placement = lower(build("1F1B", pp=3, num_microbatches=2)).placement
    schedule = Schedule.from_rows(
        "crossed", placement, [[Action.from_str(text) for text in row.split()] for row in rows]
    )
    oracle, judgement = Oracle(schedule), judge(schedule)
    assert not oracle.stuck and oracle.sums() and oracle.wrong
    assert judgement.same_sums and {place.what.split(" instead")[0] for place in judgement.places} >= {
        "it gets the output of stage 0 for microbatch 1"
    }


def test_digests_of_one_device_are_all_different():
    tables = OneDevice.of(40, 100)
    every = np.concatenate([tables.forward.ravel(), tables.gradient.ravel(), tables.weight.ravel()])
    assert len(np.unique(every)) == 3 * 40 * 100 and not (every == 0).any()


def test_a_digest_depends_on_every_argument_and_on_their_order():
    a, b = np.array([1], dtype=np.uint64), np.array([2], dtype=np.uint64)
    tag = np.uint64(5)
    assert len({int(mixed(tag, *order)[0]) for order in ([a, b], [b, a], [a], [a, a], [b, b])}) == 5
    assert mixed(tag, a) != mixed(np.uint64(6), a)
