"""Every run of a few ranks under a weak memory model, one state after the other: is what they read ever wrong?

The model is operational and allows what the PTX and C11 models do to the accesses that are here. A store that is
relaxed becomes visible at any later time, in order with stores to the same place only. A load may be done early, before
anything that it follows but an acquire, and late, after anything but a release. A release waits for all that its rank
did before. Stores are never done before what they follow: a rank that waits does not guess that it has waited.

So that there are fewer states, a step that no other can tell from its successor is taken at once: a store is handed
over, a load is begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...backend.transport.symmetric.barrier import Order

MOST_STATES = 2_000_000


@dataclass(frozen=True)
class Op:
    """An access of a rank to a place. store: writes `value`. load: must read `value`. swap: waits for `expected` and
    writes `value`, at once. until: waits for `value` or more."""

    kind: Literal["store", "load", "swap", "until"]
    place: str
    value: int
    expected: int = 0
    order: Order = "relaxed"


Program = tuple[Op, ...]


@dataclass(frozen=True)
class Explored:
    """How many states there are, and what is wrong in one: `trace` leads to it. `kind` is ok, wrong data, deadlock (who
    waits can never go on), pad not reset (all are done, and a signal is left), or too many states."""

    kind: Literal["ok", "wrong data", "deadlock", "pad not reset", "too many states"]
    num_states: int
    trace: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """All states were seen and none is wrong."""
        return self.kind == "ok"


@dataclass(frozen=True)
class _Rank:
    """Where a rank is: its next step, stores not yet visible, loads begun and not done, and later loads done early."""

    next: int = 0
    pending: tuple[tuple[str, int], ...] = ()
    begun: tuple[int, ...] = ()
    early: frozenset[int] = frozenset()


State = tuple[tuple[_Rank, ...], tuple[tuple[str, int], ...]]


def explore(programs: Sequence[Program], most_states: int = MOST_STATES, reset: Collection[str] = ()) -> Explored:
    """All states that the programs can reach from places that are all 0, in an order that is always the same. The
    places in `reset` must be 0 again when all are done."""
    first: State = (tuple(_settled(program, _Rank()) for program in programs), ())
    before: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        moves = list(_moves(programs, state))
        ranks = state[0]
        if not moves and any(rank.next < len(program) for rank, program in zip(ranks, programs, strict=True)):
            return Explored("deadlock", len(before), trace(before, state))
        if not moves and any(value and place in reset for place, value in state[1]):
            return Explored("pad not reset", len(before), trace(before, state))
        for what, after in moves:
            if after is None:
                return Explored("wrong data", len(before), (*trace(before, state), what))
            if after not in before:
                before[after] = (state, what)
                queue.append(after)
        if len(before) > most_states:
            return Explored("too many states", len(before))
    return Explored("ok", len(before))


def trace(before: Mapping[Any, tuple[Any, str] | None], state: Any) -> tuple[str, ...]:
    """The steps to a state from the first one: `before` has of each state the one before it and the step, of the first
    None."""
    found = []
    while (step := before[state]) is not None:
        state, what = step
        found.append(what)
    return tuple(reversed(found))


def _settled(program: Program, rank: _Rank) -> _Rank:
    """The rank after the steps that nobody sees yet: relaxed stores handed over, loads begun."""
    while rank.next < len(program):
        op = program[rank.next]
        if op.kind == "store" and op.order == "relaxed":
            rank = _Rank(rank.next + 1, (*rank.pending, (op.place, op.value)), rank.begun, rank.early)
        elif op.kind == "load" and rank.next in rank.early:
            rank = _Rank(rank.next + 1, rank.pending, rank.begun, rank.early - {rank.next})
        elif op.kind == "load":
            rank = _Rank(rank.next + 1, rank.pending, (*rank.begun, rank.next), rank.early)
        else:
            break
    return rank


def _moves(programs: Sequence[Program], state: State) -> Iterator[tuple[str, State | None]]:
    """What may happen next, in words, and the state after it; None where a load reads something else."""
    ranks, held = state
    memory = dict(held)
    for number, (program, rank) in enumerate(zip(programs, ranks, strict=True)):
        for what, after, written in _own_moves(program, rank, memory):
            words = f"rank {number}: {what}"
            if after is None:
                yield words, None
            else:
                new = {**memory, **written}
                settled = _settled(program, after)
                yield words, ((*ranks[:number], settled, *ranks[number + 1 :]), tuple(sorted(new.items())))


def _own_moves(
    program: Program, rank: _Rank, memory: Mapping[str, int]
) -> Iterator[tuple[str, _Rank | None, dict[str, int]]]:
    for index, (place, value) in enumerate(rank.pending):
        if all(other != place for other, _ in rank.pending[:index]):
            left = (*rank.pending[:index], *rank.pending[index + 1 :])
            yield f"{place} = {value} is visible", _Rank(rank.next, left, rank.begun, rank.early), {place: value}
    for at in rank.begun:
        left_begun = tuple(other for other in rank.begun if other != at)
        yield from _read(program[at], memory, _Rank(rank.next, rank.pending, left_begun, rank.early))
    for at in _may_be_early(program, rank):
        yield from _read(program[at], memory, _Rank(rank.next, rank.pending, rank.begun, rank.early | {at}))
    if rank.next < len(program):
        yield from _next_move(program[rank.next], rank, memory)


def _read(op: Op, memory: Mapping[str, int], after: _Rank) -> Iterator[tuple[str, _Rank | None, dict[str, int]]]:
    got = memory.get(op.place, 0)
    yield f"{op.place} is read as {got}, for {op.value}", after if got == op.value else None, {}


def _may_be_early(program: Program, rank: _Rank) -> Iterator[int]:
    """Later loads that nothing keeps from being done now."""
    for at in range(rank.next, len(program)):
        op = program[at]
        if op.order == "acquire":
            return
        if op.kind == "load" and at not in rank.early:
            yield at


def _next_move(op: Op, rank: _Rank, memory: Mapping[str, int]) -> Iterator[tuple[str, _Rank | None, dict[str, int]]]:
    """The step where the rank is, when it can be taken: a swap, a wait, or a store that is a release."""
    is_held_up = op.order == "release" and (rank.pending or rank.begun)
    if is_held_up or any(place == op.place for place, _ in rank.pending):
        return
    got = memory.get(op.place, 0)
    after = _Rank(rank.next + 1, rank.pending, rank.begun, rank.early)
    if op.kind == "until" and got >= op.value:
        yield f"{op.place} is {got}", after, {}
    elif op.kind == "swap" and got == op.expected:
        yield f"{op.place}: {op.expected} becomes {op.value} ({op.order})", after, {op.place: op.value}
    elif op.kind == "store":
        yield f"{op.place} = {op.value} ({op.order})", after, {op.place: op.value}
