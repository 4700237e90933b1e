"""V-Half and V-Min: vees that hold a half or a third of the activations (Qi et al. 2024, "Pipeline Parallelism
with Controllable Memory").

A *building block* is what the six actions of one microbatch do on all ranks, in slots that take equally long
(F=I=W). Repeating it every six slots gives a schedule; the time from F to W in the block, divided by six, is what a
rank holds (section 3). The block of a vee is fixed by one number, the slots between the F of neighbouring ranks on
the way down: 1 for V-Min, 2 for V-Half, 1 on the way back (section 3.1). Waits at the two turns keep the block's
actions on every rank in different slots modulo six; W takes the free ones. Warm-up and cool-down are then pulled
together without holding more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from .schedule import Schedule
from .vee import F0, F1, I0, I1, W0, W1, vee_schedule

_PERIOD = 6
_MARGIN = 8
"""Microbatches beyond 2p after which an order is continued by repeating its middle; the test
compares with not doing so."""

_Slots = list[dict[int, list[int]]]
"""Per rank and code the slot of every microbatch."""


def v_half(pp: int, num_microbatches: int, vpp: int = 2) -> Schedule:
    """About half the memory of 1F1B and half its bubble: at most 2*floor((p+2)/2) activations of
    half a rank's layers each.

    For F=I=W and m >= p > 1 ranks idle up to 6p-1-3*limit slots between their first and last action (1F1B:
    6(p-1)), for p=2 none. For other times the order and its memory stay the same; for times such as F:I:W =
    4:5:3 the bubble does not grow with m.
    """
    waits, limit = (0 if pp % 2 else 3, 1), 2 * ((pp + 2) // 2)
    return _controlled("VHalf", num_microbatches, _block(pp, 2, waits), limit, keep_steady=pp % 2 == 0 and pp > 2)


def v_min(pp: int, num_microbatches: int, vpp: int = 2) -> Schedule:
    """About a third of the memory of 1F1B and two thirds of its bubble: at most 2*floor((p+4)/3) activations of
    half a rank's layers each.

    Bubble as in `v_half`, with this limit (for p=2 one slot). Where F, I and W differ, ranks wait in the steady state
    too, O(m) in all; so does the authors' order.
    """
    waits, limit = ((2, 0, 4)[pp % 3], 0), 2 * ((pp + 4) // 3)
    return _controlled("VMin", num_microbatches, _block(pp, 1, waits), limit, keep_steady=False)


def _controlled(
    name: str, num_microbatches: int, block: list[dict[int, int]], limit: int, *, keep_steady: bool
) -> Schedule:
    """The repeated block with its ends pulled together. The middle of long schedules repeats, so it is
    worked out for a short one.

    `keep_steady` leaves alone what lies between the first I0 and the last F0 of rank 0, whose slack
    takes up unequal F, I and W.
    """
    num_ordered = min(num_microbatches, 2 * len(block) + _MARGIN)
    slots = [{code: [first + _PERIOD * k for k in range(num_ordered)] for code, first in row.items()} for row in block]
    _fill_with_weights(slots)
    _close_gaps(slots, limit, range(slots[0][I0][0], slots[0][F0][-1] + 1) if keep_steady else range(0))
    _let_gradients_pass(slots)
    rows = [
        np.array([code for _, code in sorted((slot, code) for code in row for slot in row[code])], dtype=np.int8)
        for row in slots
    ]
    middle, more = _PERIOD * (num_ordered // 2), num_microbatches - num_ordered
    rows = [np.concatenate([row[:middle], np.tile(row[middle : middle + _PERIOD], more), row[middle:]]) for row in rows]
    return vee_schedule(name, num_microbatches, rows)


def _block(pp: int, step: int, waits: tuple[int, int]) -> list[dict[int, int]]:
    """Slots of one microbatch's F0, F1, I1 and I0 per rank: down the vee, back, and with the
    gradient down and back again."""
    turn = [0, 0, 0, 0]
    turn[1] = step * (pp - 1) + 1
    turn[2] = turn[1] + pp + waits[0]
    turn[3] = turn[2] + step * (pp - 1) + 1 + waits[1]
    return [
        {F0: step * r, F1: turn[1] + pp - 1 - r, I1: turn[2] + step * r, I0: turn[3] + pp - 1 - r} for r in range(pp)
    ]


def _fill_with_weights(slots: _Slots) -> None:
    """Puts every W into the first free slot of its rank after its I, first come first served."""
    for row in slots:
        taken = {slot for code in (F0, F1, I0, I1) for slot in row[code]}
        row[W0], row[W1] = [], []
        last = -1
        for slot, weight in sorted([(slot, W0) for slot in row[I0]] + [(slot, W1) for slot in row[I1]]):
            last = next(free for free in count(max(slot, last) + 1) if free not in taken)
            row[weight].append(last)


def _close_gaps(slots: _Slots, limit: int, fixed: range) -> None:
    """Moves actions whose slot is not in `fixed` to earlier free ones, as far as inputs allow and no rank
    holds more than `limit`."""
    held = [_held(row) for row in slots]

    def earliest(rank: int, code: int, now: int, ready: int) -> int:
        if code not in (F0, F1):
            return ready
        while now > ready and held[rank][now - 1] < limit:
            now -= 1
        return now

    for rank, code, was, now in _pull(slots, (F0, F1, I0, I1, W0, W1), earliest, fixed):
        change = {F0: 1, F1: 1, W0: -1, W1: -1}.get(code, 0)
        for slot in range(now, was):
            held[rank][slot] += change


def _let_gradients_pass(slots: _Slots) -> None:
    """After a rank's last F, which alone adds to what it holds, I goes before every W."""
    last = [max(row[F0][-1], row[F1][-1]) for row in slots]
    for row in slots:
        del row[W0], row[W1]
    for _ in _pull(slots, (I0, I1), lambda rank, code, now, ready: max(ready, last[rank] + 1), range(0)):
        pass
    _fill_with_weights(slots)


def _pull(
    slots: _Slots, codes: tuple[int, ...], earliest: Callable[[int, int, int, int], int], fixed: range
) -> Iterator[tuple[int, int, int, int]]:
    """Moves actions of the codes, in order of their slots, to the first free slot from
    `earliest(rank, code, slot, ready)` on.

    Those in a slot of `fixed` stay. Yields (rank, code, old slot, new slot) of every move.
    """
    taken = [{slot for code in row for slot in row[code]} for row in slots]
    order = sorted(
        (slot, rank, code, k) for rank, row in enumerate(slots) for code in codes for k, slot in enumerate(row[code])
    )
    for was, rank, code, k in order:
        if was in fixed:
            continue
        lowest = earliest(rank, code, was, _ready(slots, rank, code, k))
        now = next((slot for slot in range(lowest, was) if slot not in taken[rank]), was)
        if now != was:
            slots[rank][code][k] = now
            taken[rank].remove(was)
            taken[rank].add(now)
            yield rank, code, was, now


def _ready(slots: _Slots, rank: int, code: int, k: int) -> int:
    """The first slot at which microbatch k's action has its inputs and the one of microbatch k-1 is over."""
    own, last = slots[rank], len(slots) - 1
    source: list[int] | None
    if code in (W0, W1):
        source = own[code - W0 + I0]
    elif code == F0:
        source = slots[rank - 1][F0] if rank else None
    elif code == F1:
        source = slots[rank + 1][F1] if rank < last else own[F0]
    elif code == I1:
        source = slots[rank - 1][I1] if rank else own[F1]
    else:
        source = slots[rank + 1][I0] if rank < last else own[I1]
    return max(own[code][k - 1] if k else -1, source[k] if source else -1) + 1


def _held(row: dict[int, list[int]]) -> list[int]:
    """Activations that a rank holds after each slot."""
    change = np.zeros(max(slots[-1] for slots in row.values()) + 1, dtype=np.int64)
    for code, amount in ((F0, 1), (F1, 1), (W0, -1), (W1, -1)):
        np.add.at(change, row[code], amount)
    return np.cumsum(change).tolist()
