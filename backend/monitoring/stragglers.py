"""Who holds up the others: the rank whose own work takes longer than that of ranks with the same work.

Collectives make ranks equally slow: who is early waits in them. So what counts is a rank's *own* seconds in an action,
without those it was in calls that exchange tensors. They are compared with those of the ranks whose stages have equal
content. Where there is none, a rank is compared with itself, earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from ...core.base.units import format_s

LEAST_RATIO = 1.3
"""Of own seconds to the usual ones. Ranks of one machine with more ranks than idle cores differ by up to a quarter."""
LEAST_SHARE = 0.02
"""Of a step that the difference must make."""
PAST = 20
"""Reports that a rank without peers is compared with; it takes three to compare with any."""

Work = tuple[str, int]
"""The name of a kind of action, and its stage."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, and what of its work: `own_s` a step where `usual_s` is usual."""

    rank: int
    host: str
    what: str
    own_s: float
    usual_s: float

    @property
    def lost_s(self) -> float:
        """What it takes more, a step."""
        return self.own_s - self.usual_s

    def to_json(self) -> dict[str, Any]:
        """As the metrics have it."""
        return asdict(self)


class Stragglers:
    """Looks at one report after another. `contents` is, of each stage, a name that equal stages share."""

    def __init__(self, contents: Mapping[int, str], hosts: Sequence[str]):
        self._contents, self._hosts = contents, hosts
        self._past: dict[tuple[int, Work], deque[float]] = {}

    def find(self, own: Sequence[Mapping[Work, float]], step_s: float) -> Straggler | None:
        """The rank that loses most, by the own seconds a step of every rank's work; None where none is slow."""
        found = [each for rank, works in enumerate(own) for each in self._of(rank, works, own)]
        slow = [each for each in found if each.own_s >= LEAST_RATIO * each.usual_s]
        worst = max(slow, key=lambda each: each.lost_s, default=None)
        return worst if worst is not None and worst.lost_s >= LEAST_SHARE * step_s else None

    def _of(self, rank: int, works: Mapping[Work, float], own: Sequence[Mapping[Work, float]]) -> list[Straggler]:
        found = []
        for work, seconds in works.items():
            if not (usual := self._peers(rank, work, own)):
                past = self._past.setdefault((rank, work), deque(maxlen=PAST))
                usual = list(past) if len(past) > 2 else []
                past.append(seconds)
            if usual:
                what = f"{work[0]} of stage {work[1]}"
                found.append(Straggler(rank, self._hosts[rank], what, seconds, median_low(usual)))
        return found

    def _peers(self, rank: int, work: Work, own: Sequence[Mapping[Work, float]]) -> list[float]:
        """What the same work takes on other ranks, of this stage or of equal ones."""
        name, stage = work
        content = self._contents.get(stage)
        return [
            seconds
            for other, theirs in enumerate(own)
            if other != rank
            for (their_name, their_stage), seconds in theirs.items()
            if their_name == name and self._contents.get(their_stage) == content
        ]


def straggler_line(found: Mapping[str, Any]) -> str:
    """`straggler: rank 2 on HOST: forward of stage 3 takes 31 ms a step, 2.1 times the usual 15 ms`, from its JSON."""
    own_s, usual_s = found["own_s"], found["usual_s"]
    times = f"{own_s / usual_s:.1f} times the usual {format_s(usual_s)}" if usual_s else "where others take nothing"
    what = f"{found['what']} takes {format_s(own_s)} a step"
    return f"straggler: rank {found['rank']} on {found['host']}: {what}, {times}"
