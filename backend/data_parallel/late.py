"""`LateGather`: updated weights are gathered during the next step's first forward, each before the part of
the stage that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ..tensor_parallel.context import LayerContext
from ..transport.overlap import CommunicationLane, Work
from .buckets import FlatBucket

LAST = "head"
"""The part of a stage that comes last in its forward, also where it has no head (`LayerContext.comes_to`)."""


class LateGather:
    """What is under way of one stage. All copies of the stage start the same, in the order in
    which a forward needs it."""

    def __init__(self, context: LayerContext, lane: CommunicationLane, used: Callable[[str], None] | None = None):
        """`used` hears of each part that a forward comes to when its weights are there."""
        self._lane = lane
        self._used = used
        self._under_way: list[tuple[set[str], Work]] = []
        context.comes_to = self._comes_to

    def start(self, buckets: Iterable[FlatBucket]) -> None:
        """Begins to bring buckets together: those that are needed first, first."""
        self.finish()
        for each in sorted(buckets, key=lambda bucket: min(map(_place, bucket.parts))):
            self._under_way.append((each.parts, self._lane.start(_shared(each), each.updated)))

    def _comes_to(self, part: str) -> None:
        self.wait_for(part)
        if self._used is not None:
            self._used(part)

    def wait_for(self, part: str) -> None:
        """Returns when the weights of a part are there, and with the last part all."""
        needed = [part in parts or part == LAST for parts, _ in self._under_way]
        last = max((place for place, each in enumerate(needed) if each), default=-1)
        for _, gathered in self._under_way[: last + 1]:
            gathered()
        del self._under_way[: last + 1]

    def finish(self) -> None:
        """Returns when everything is there."""
        self.wait_for(LAST)


def _place(part: str) -> int:
    """Where in a forward a part comes."""
    kind, _, number = part.partition(".")
    return int(number) if number else -1 if kind == "embedding" else 2**31


def _shared(bucket: FlatBucket) -> Work:
    def work() -> Tensor:
        bucket.share()
        return bucket.weights

    return work
