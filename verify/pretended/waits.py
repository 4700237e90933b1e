"""`waits`: where the host waits for its device during a step, each place allowed with a reason or not at all.

A host that waits gives the device nothing to do meanwhile, so a step of fast numerics waits three times at most, and in
places that are named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .log import Entry

RULE = "host-waits"
"""The name of what is found here."""

MOST_WAITS = 3
"""In a step of fast numerics, besides those that the data or experts need."""


@dataclass(frozen=True)
class Allowed:
    """A place of ours that may wait. `counts` says whether it is one of the `MOST_WAITS`: what is read of the data
    before the step, or to know how long messages are, depends on the plan."""

    place: str
    why: str
    counts: bool = True


ALLOWED = (
    Allowed("backend/ranks/training_rank.py:_read", "loss, norm and what is added to the loss, together"),
    Allowed("backend/pipeline/messages.py:settle", "the times of the step, from events"),
    Allowed("backend/pipeline/graphs.py:_capture", "the device is idle when a step is captured", counts=False),
    Allowed("backend/tensor_parallel/exchange.py:exchange", "how many tokens each expert gets", counts=False),
    Allowed("backend/checkpoint/saver.py:write", "a checkpoint's copies, in the thread that writes it", counts=False),
    Allowed("backend/checkpoint/tensors.py:_write", "DCP's own stream, in that thread", counts=False),
    Allowed("backend/ranks/batches.py:_batch", "how many tokens of the batch count in its loss", counts=False),
    Allowed("backend/ranks/batches.py:_with_lengths", "how long padded documents are", counts=False),
)


@dataclass(frozen=True)
class Wait:
    """The host waits `per_step` times in a step, at `place`, for what `label` was given to do; `what` is read."""

    place: str
    label: str
    what: str
    per_step: float

    @property
    def allowed(self) -> Allowed | None:
        """The entry of `ALLOWED`, if there is one."""
        return next((each for each in ALLOWED if each.place == self.place), None)

    def __str__(self) -> str:
        label = f" in {self.label}" if self.label else ""
        return f"{self.place}{label}: {self.what}, {self.per_step:g} times a step"


def waits(entries: Iterable[Entry]) -> list[Wait]:
    """The waits of the steps after the first, which makes what lasts. `step` entries begin steps; a last one without a
    number ends them."""
    found: Counter[tuple[str, str, str]] = Counter()
    num_steps, counted = 0, False
    for entry in entries:
        if entry.kind == "step":
            counted = entry.name not in ("", "0")
            num_steps += counted
        elif counted and entry.kind.startswith("host waits"):
            what = entry.name if entry.kind == "host waits for stream" else ""
            found[entry.place, entry.label, what or entry.kind] += 1
    return [Wait(*key, count / num_steps) for key, count in found.items()]


def too_many(found: Sequence[Wait]) -> list[str]:
    """What is wrong with the waits of a rank in fast numerics: places that are not allowed, and more than may be."""
    wrong = [
        f"{RULE}: {wait}. Leave it on the device, or list the place with a reason."
        for wait in found
        if wait.allowed is None
    ]
    total = sum(wait.per_step for wait in found if wait.allowed is not None and wait.allowed.counts)
    if total > MOST_WAITS:
        wrong.append(f"{RULE}: {total:g} times a step, and {MOST_WAITS} are the most.")
    return wrong
