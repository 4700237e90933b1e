"""Which microbatches of a stage, and which stages of a rank, may use the same memory, one after the other: `slots_of`,
`places_of`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ...core.schedule.action import Action, Kind


def slots_of(row: Iterable[Action]) -> Mapping[int, Mapping[int, int]]:
    """By stage and microbatch a number from 0: that of no other microbatch whose forward has begun and whose weight
    gradients are not computed (B or W), as a rank walks over its row. Each takes the smallest that is free.

    >>> row = [Action.from_str(each) for each in "0F0 0F1 0B0 0F2 0I1 0B2 0F3 0W1 0B3".split()]
    >>> dict(slots_of(row)[0])
    {0: 0, 1: 1, 2: 0, 3: 0}
    """
    slots: defaultdict[int, dict[int, int]] = defaultdict(dict)
    taken: defaultdict[int, set[int]] = defaultdict(set)
    for action in (part for each in row for part in each.parts):
        stage, microbatch = action.stage, action.microbatch
        if microbatch is None:
            continue
        if action.kind is Kind.F:
            slots[stage][microbatch] = free = next(n for n in range(len(taken[stage]) + 1) if n not in taken[stage])
            taken[stage].add(free)
        elif action.kind in (Kind.B, Kind.W):
            taken[stage].remove(slots[stage][microbatch])
    return slots


def places_of(*rows: Iterable[Action]) -> Mapping[int, int]:
    """By stage a number from 0: that of no other stage whose weights are together at the same time (UNSHARD to RESHARD)
    in any of a rank's rows.

    >>> row = [Action.from_str(each) for each in "0UNSHARD 0F0 2UNSHARD 0RESHARD 4UNSHARD 2F0 2RESHARD".split()]
    >>> places_of(row)
    {0: 0, 2: 1, 4: 0}
    """
    meets: dict[int, set[int]] = {}
    for row in rows:
        together: set[int] = set()
        for action in row:
            if action.kind is Kind.UNSHARD:
                for other in together:
                    meets[other].add(action.stage)
                together.add(action.stage)
                meets.setdefault(action.stage, set()).update(together - {action.stage})
            elif action.kind is Kind.RESHARD:
                together.discard(action.stage)
    places: dict[int, int] = {}
    for stage, others in meets.items():
        taken = {places[other] for other in others if other in places}
        places[stage] = next(number for number in range(len(taken) + 1) if number not in taken)
    return places
