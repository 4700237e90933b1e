"""Does somebody sleep whom nobody wakes? The doorbell of the C code, state by state.

Ringers signal and ring; the sleeper looks at its bell, then for the signals, and sleeps where one is missing. Atomic
additions in one order of all (seq_cst) are done at once, when those that the rank made before are visible; weaker ones
may be visible later, after the rank has looked elsewhere, and that is what a lost wake-up is made of. The slices of
time in which the C code wakes by itself are left out: nobody may need them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...backend.transport.symmetric.barrier import RING, SLEEP, BellStep
from .memory_model import Explored, trace

NUM_SIGNALS = 2
"""That each of two ringers gives: one may come while the sleeper is woken for the other."""

Act = tuple[str, str, str]
"""What is done, of what, in which order."""


@dataclass(frozen=True)
class _State:
    """The steps that each ringer has taken and the adding to the bell that is not yet visible; the sleeper's step, the
    value of the bell and the signals that it saw; and the memory."""

    ringers: tuple[int, ...]
    pending: tuple[int, ...]
    at: int = 0
    seen: int = 0
    is_asleep: bool = False
    value: int = 0
    sleepers: int = 0
    signals: int = 0


def check_doorbell(
    ring: Sequence[BellStep] = RING,
    sleep: Sequence[BellStep] = SLEEP,
    *,
    rings_first: bool = False,
    looks_first: bool = False,
    num_ringers: int = 2,
    num_values: int = 1 << 32,
) -> Explored:
    """Whether the sleeper always ends with all signals; the kind is deadlock where it sleeps and nobody rings any more.

    Wrong on purpose: with `rings_first` a ringer rings before it signals, with `looks_first` the sleeper looks for
    signals before it looks at the bell; `num_values` is after how many rings the bell has its first value again.
    """
    rung = tuple((step.act, step.of, step.order) for step in ring)
    signal = (("signal", "", ""),)
    ringer = ((*rung, *signal) if rings_first else (*signal, *rung)) * NUM_SIGNALS
    model = _Model(ringer, tuple(sleep), looks_first, num_ringers * NUM_SIGNALS, num_values)
    return model.explore(_State((0,) * num_ringers, (0,) * num_ringers))


@dataclass(frozen=True)
class _Model:
    ringer: tuple[Act, ...]
    sleep: tuple[BellStep, ...]
    looks_first: bool
    num_signals: int
    num_values: int

    def explore(self, first: _State) -> Explored:
        before: dict[_State, tuple[_State, str] | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            moves = list(self._moves(state))
            if not moves and state.at != self._done:
                return Explored("deadlock", len(before), trace(before, state))
            for what, after in moves:
                if after not in before:
                    before[after] = (state, what)
                    queue.append(after)
        return Explored("ok", len(before))

    @property
    def _done(self) -> int:
        return 2 + len(self.sleep)

    def _moves(self, state: _State) -> Iterator[tuple[str, _State]]:
        for number, at in enumerate(state.ringers):
            if state.pending[number]:
                visible = replace(state, pending=_put(state.pending, number, state.pending[number] - 1))
                yield f"ringer {number}: a ring is visible", self._rung(visible)
            if at < len(self.ringer):
                yield from self._of_ringer(state, number, self.ringer[at])
        if not state.is_asleep and state.at != self._done:
            yield from self._of_sleeper(state)

    def _of_ringer(self, state: _State, number: int, step: Act) -> Iterator[tuple[str, _State]]:
        act, of, order = step
        if (act, order) == ("add", "seq_cst") and state.pending[number]:
            return
        at = state.ringers[number] + 1
        after = replace(state, ringers=_put(state.ringers, number, at))
        if act == "signal":
            after = replace(after, signals=after.signals + 1)
        elif act == "add":
            is_late = order != "seq_cst"
            after = (
                replace(after, pending=_put(after.pending, number, after.pending[number] + 1))
                if is_late
                else self._rung(after)
            )
        elif act == "look" and not state.sleepers:
            skipped = next(index for index in range(at, len(self.ringer)) if self.ringer[index][0] == "wake") + 1
            after = replace(state, ringers=_put(state.ringers, number, skipped))
        elif act == "wake" and state.is_asleep:
            after = replace(after, is_asleep=False, at=state.at + 1)
        yield f"ringer {number}: {act} {of}".rstrip(), after

    def _rung(self, state: _State) -> _State:
        return replace(state, value=(state.value + 1) % self.num_values)

    def _of_sleeper(self, state: _State) -> Iterator[tuple[str, _State]]:
        if state.at < 2:
            looks_at_bell = (state.at == 0) != self.looks_first
            if looks_at_bell:
                yield f"sleeper: the bell is at {state.value}", replace(state, at=state.at + 1, seen=state.value)
            elif state.signals == self.num_signals:
                yield "sleeper: all signals are there", replace(state, at=self._done)
            else:
                yield f"sleeper: {state.signals} signals are there", replace(state, at=state.at + 1)
            return
        step = self.sleep[state.at - 2]
        # the last step leads back to the first look
        after = replace(state, at=0 if state.at + 1 == self._done else state.at + 1)
        if step.act == "add":
            after = replace(after, sleepers=after.sleepers + 1)
        elif step.act == "subtract":
            after = replace(after, sleepers=after.sleepers - 1)
        elif step.act == "sleep" and state.value == state.seen:
            after = replace(state, is_asleep=True)
        yield f"sleeper: {step.act} {step.of}", after


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


DOORBELL_MUTANTS: dict[str, Callable[[], Explored]] = {
    "rings before it signals": lambda: check_doorbell(rings_first=True),
    "looks for signals before the bell": lambda: check_doorbell(looks_first=True),
    "bell rung relaxed": lambda: check_doorbell((replace(RING[0], order="relaxed"), *RING[1:])),
    "looks for sleepers before it rings": lambda: check_doorbell((RING[1], RING[0], RING[2])),
    "sleeps before it says so": lambda: check_doorbell(sleep=(SLEEP[1], SLEEP[0], SLEEP[2])),
    "nobody is woken": lambda: check_doorbell(RING[:1]),
    "a bell of one bit": lambda: check_doorbell(num_values=2),
}
"""Wrong doorbells, each of which leaves somebody asleep."""
