"""`PartSums`: gradients of which a rank holds a part from the first microbatch on (ZeRO 2 and 3 in fast numerics).

A bucket is reduced as soon as a microbatch has given all of it, inside the backward, and its whole gradients go then.
Buckets go in one order on all copies of the stage, which run the same microbatches one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...core.program.buckets import Bucket
from ..base.streams import used_here
from ..numerics.contributions import Accumulator
from ..numerics.copies import Copies
from ..numerics.fast import FastNumerics
from ..transport.overlap import CommunicationLane, Work
from . import not_finite
from .gradients import Gradients


@dataclass(frozen=True)
class Reduced:
    """A bucket, the keys of its gradients, and the copies over which it is added up."""

    bucket: Bucket
    keys: Sequence[str]
    copies: Copies


class PartSums:
    """The buckets of a stage that wait for nothing but their own gradients; with a `lane` they are reduced during the
    rest of the backward."""

    def __init__(
        self,
        numerics: FastNumerics,
        gradients: Gradients,
        buckets: Sequence[Reduced],
        lane: CommunicationLane | None = None,
    ):
        self._not_finite: list[not_finite.Found] = []
        self._numerics = numerics
        self._gradients = gradients
        self._buckets = buckets
        self._lane = lane
        # By bucket this rank's part of the sum over microbatches, and the part's length.
        self._sums: dict[str, Tensor] = {}
        self._lengths: dict[str, int] = {}  # of the parts: a shorter one has a zero behind
        # By gradient how many uses this microbatch has given, and the next bucket to reduce: buckets are reduced in
        # their order, as all ranks must call in one order.
        self._given: Counter[str] = Counter()
        self._next = 0
        # Reductions on the lane whose results have not been added yet.
        self._under_way: list[tuple[str, Work]] = []
        gradients.reduce_each(self)

    def reduces(self, bucket: Bucket) -> bool:
        """Whether a bucket is reduced here."""
        return any(each.bucket == bucket for each in self._buckets)

    @property
    def held(self) -> list[Tensor]:
        """Every part held now."""
        return list(self._sums.values())

    def arrived(self, key: str) -> None:
        """One more use of a parameter has given its gradient for the microbatch whose backward runs."""
        self._given[key] += 1
        while self._next < len(self._buckets) and all(self._is_given(each) for each in self._buckets[self._next].keys):
            self._reduce_next()

    def finish(self) -> None:
        """The backward of a microbatch has given everything."""
        while self._next < len(self._buckets):
            self._reduce_next()
        for name, part in self._under_way:
            self._add(name, part())
        self._under_way.clear()
        self._given.clear()
        self._next = 0

    def take(self) -> Mapping[str, Tensor]:
        """REDUCE_GRAD: this rank's part of every bucket by its name [n], over all copies; the
        next step starts empty."""
        found = {}
        for each in self._buckets:
            with each.copies.whole.recorder.layer(each.bucket.layer):
                own = self._sums.pop(each.bucket.name)
                used_here([own])  # which backwards have made
                total = self._numerics.replicated(own, each.copies)
                found[each.bucket.name] = total[: self._lengths[each.bucket.name]].float()
        return found

    def take_not_finite(self) -> not_finite.Found:
        """What the rank's own gradients of a step had, before they were added to others', that is no number."""
        looks, self._not_finite = self._not_finite, []
        return lambda: next((found for found in (look() for look in looks) if found is not None), None)

    def _is_given(self, key: str) -> bool:
        return self._given[key] == self._gradients.num_uses(self._gradients.usages[key])

    def _reduce_next(self) -> None:
        reduced = self._buckets[self._next]
        self._next += 1
        sums = self._gradients.take(reduced.keys)
        self._not_finite.append(not_finite.look({key: each.held for key, each in sums.items()}))
        if self._lane is None:
            self._add(reduced.bucket.name, self._scattered(reduced, sums))
        else:
            inputs = [tensor for each in sums.values() for tensor in each.held]
            self._under_way.append((reduced.bucket.name, self._lane.start(self._later(reduced, sums), *inputs)))

    def _later(self, reduced: Reduced, sums: Mapping[str, Accumulator]) -> Callable[[], Tensor]:
        return lambda: self._scattered(reduced, sums)

    def _scattered(self, reduced: Reduced, sums: Mapping[str, Accumulator]) -> Tensor:
        group = reduced.copies.backwards
        with group.recorder.layer(reduced.bucket.layer):
            part, self._lengths[reduced.bucket.name] = self._numerics.scattered(sums, group)
            return part.float()

    def _add(self, name: str, part: Tensor) -> None:
        if name in self._sums:
            self._sums[name].add_(part)
        else:
            self._sums[name] = part
