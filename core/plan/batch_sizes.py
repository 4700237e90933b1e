"""Which global batch each step of a run has: the same in every step, larger by and by, or by a list.

A batch follows from how many samples the steps before it took, as Megatron-Core's `num_microbatches_calculator` has it,
and these follow from the number of the step: a run is a short list of `Stretch`es of equal batches, so that what step t
begins with is a function of t alone.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..base.bounds import LONGEST_TEXT, SEQUENCES, shown, text_complaint
from .sections import Batch

MOST_SIZES = 10_000
"""Different batches of a run; a rank prepares itself for each."""

MOST_NAMED = 8
"""Batches that one sentence lists."""

FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)")


@dataclass(frozen=True)
class Stretch:
    """Steps with equal batches of `size` sequences, from `first_step` on, which begins with sample `first_sample`."""

    first_step: int
    first_sample: int
    size: int


def stretches(batch: Batch) -> tuple[Stretch, ...]:
    """All of a run, in order; the last has no end. The batch must obey `complaints`."""
    return _stretches(batch.global_size, batch.rampup, batch.schedule, batch.schedule_unit, batch.sequence)


@lru_cache(maxsize=256)
def _stretches(
    global_size: int, rampup: tuple[int, ...] | None, schedule: str | None, unit: str, sequence: int
) -> tuple[Stretch, ...]:
    begins = _begins(global_size, rampup, schedule, unit, sequence)
    found = [Stretch(0, 0, begins[0][1])]
    for place, (begin, size) in enumerate(begins[1:], 1):
        last = found[-1]
        # a step is whole: what begins within it begins after it, and what ends there too is never seen
        steps = max(0, -(-(begin - last.first_sample) // last.size))
        reached = last.first_sample + steps * last.size
        if place + 1 < len(begins) and begins[place + 1][0] <= reached:
            continue
        if size != last.size:
            found.append(Stretch(last.first_step + steps, reached, size))
    return tuple(found)


def _begins(
    global_size: int, rampup: tuple[int, ...] | None, schedule: str | None, unit: str, sequence: int
) -> list[tuple[int, int]]:
    """(consumed samples from which it holds, batch), in order, the first from 0."""
    if schedule is not None:
        per_sample = sequence if unit == "tokens" else 1
        return [(threshold // per_sample, size) for threshold, size in sorted(pairs_of(schedule))]
    if rampup is None:
        return [(0, global_size)]
    start, increment, samples = rampup
    number = (global_size - start) // increment if increment else 0
    if not number or not samples:
        return [(0, global_size)]
    return [(_consumed_for(step, samples / number), start + step * increment) for step in range(number + 1)]


def _consumed_for(increments: int, samples_each: float) -> int:
    """The fewest consumed samples after which so many increments have been made, which are floor(consumed /
    samples_each): in floats, as Megatron-LM has it, whose old runs would otherwise now and then be a sample early."""
    consumed = max(0, math.floor(increments * samples_each) - 1)
    while consumed / samples_each < increments:
        consumed += 1
    return consumed


def batch_at(batch: Batch, step: int) -> int:
    """Sequences of the global batch of a step, counted from 0.

    >>> [batch_at(Batch(8, 1, 16, rampup=(2, 2, 9)), step) for step in range(6)]
    [2, 2, 4, 6, 8, 8]
    """
    return _stretch_of(batch, step).size


def samples_before(batch: Batch, step: int) -> int:
    """Samples that the steps before this one took: the number, in the run, of its first sample.

    >>> [samples_before(Batch(8, 1, 16, rampup=(2, 2, 9)), step) for step in range(6)]
    [0, 2, 4, 8, 14, 22]
    """
    found = _stretch_of(batch, step)
    return found.first_sample + (step - found.first_step) * found.size


def batch_after(batch: Batch, consumed: int) -> int:
    """The global batch of a step that begins after so many samples, whatever batches these came in."""
    begins = _begins(batch.global_size, batch.rampup, batch.schedule, batch.schedule_unit, batch.sequence)
    return begins[bisect_right(begins, consumed, key=lambda each: each[0]) - 1][1]


def sizes_of(batch: Batch) -> tuple[int, ...]:
    """The different batches that a run may have, the last one, `batch.global`, first; those of a list that is wrong are
    left out."""
    if batch.stays or complaints(batch):
        return (batch.global_size,)
    begins = _begins(batch.global_size, batch.rampup, batch.schedule, batch.schedule_unit, batch.sequence)
    return tuple(dict.fromkeys((batch.global_size, *(size for _, size in begins))))


def said(batch: Batch, sizes: Sequence[int]) -> str:
    """Some batches of a run that changes them, for people: `batches 12, 20 of rampup=[12, 8, 100]`."""
    named = ", ".join(map(str, sizes[:MOST_NAMED])) + (
        f" and {len(sizes) - MOST_NAMED} more" if len(sizes) > MOST_NAMED else ""
    )
    key = f"schedule={shown(batch.schedule)}" if batch.rampup is None else f"rampup={list(batch.rampup)}"
    return f"batch{'es' if len(sizes) > 1 else ''} {named} of {key}"


def _stretch_of(batch: Batch, step: int) -> Stretch:
    found = stretches(batch)
    return found[bisect_right(found, step, key=lambda each: each.first_step) - 1]


def pairs_of(text: str) -> list[tuple[int, int]]:
    """The (threshold, batch) pairs of `0:256 1.5M:1K`, as written; spaces or commas lie between them, both numbers may
    end in K, M, B or T. Raises ValueError, whose text is a sentence about the first that is wrong.

    >>> pairs_of("0:256, 1.5M:1K")
    [(0, 256), (1500000, 1000)]
    """
    found = []
    for pair in re.split(r"[\s,]+", text.strip()):
        threshold, colon, size = pair.partition(":")
        if not colon or not NUMBER.fullmatch(size.upper()):
            raise ValueError(f"{shown(pair)} is no pair of a threshold and a batch. Write 0:256 or 1.5M:512, say.")
        found.append((counted(threshold), counted(size)))
    return found


def counted(text: str) -> int:
    """Samples or tokens as written: `1.5M` is 1,500,000. The product is one of floats without what is behind the point,
    as Megatron-Core has it: its 4.1M are 4,099,999. Raises ValueError, whose text is a sentence.

    >>> [counted(text) for text in ("1.5M", "2k", "0", "3T")]
    [1500000, 2000, 0, 3000000000000]
    """
    match = NUMBER.fullmatch(text.strip().upper())
    if match is None:
        raise ValueError(f"{shown(text)} is no number of samples or tokens. Write 200000 or 1.5M, say.")
    return int(float(match[1]) * FACTORS[match[2]])


def complaints(batch: Batch) -> list[str]:
    """What is wrong with the batches of a run, without a layout, as sentences."""
    return [*_of_rampup(batch), *_of_schedule(batch)]


def _of_rampup(batch: Batch) -> Iterator[str]:
    if batch.rampup is None:
        return
    written = f"rampup={list(batch.rampup)}"
    if batch.schedule is not None:
        yield f"{written} and schedule={shown(batch.schedule)} both say how batches grow. Leave one of the two out."
    if len(batch.rampup) != 3:
        yield f"{written} has {len(batch.rampup)} numbers. Give three: the first batch, the increment, the samples."
        return
    start, increment, samples = batch.rampup
    if start < 1 or increment < 1 or samples < 0:
        yield (
            f"{written} must have a first batch and an increment of at least 1, and samples of at least 0. "
            f"Use rampup = [{max(1, start)}, {max(1, increment)}, {max(0, samples)}]."
        )
    elif start > batch.global_size:
        yield (
            f"{written} begins with {start} sequences, more than global={batch.global_size}, where it ends. Use "
            f"global >= {start}, or begin with less."
        )
    elif (batch.global_size - start) % increment:
        below = batch.global_size - (batch.global_size - start) % increment
        yield (
            f"{written} does not reach global={batch.global_size} from {start} in increments of {increment}. Use "
            f"global = {below} or {below + increment}, or another increment."
        )
    elif (batch.global_size - start) // increment >= MOST_SIZES:
        yield (
            f"{written} has {(batch.global_size - start) // increment + 1:,} different batches, more than the "
            f"{MOST_SIZES:,} that a run may have. Use a larger increment."
        )


def _of_schedule(batch: Batch) -> Iterator[str]:
    if batch.schedule is None:
        if batch.schedule_unit != "samples":
            yield f'schedule_unit="{batch.schedule_unit}" is about schedule, which is not given. Leave it out.'
        return
    if complaint := text_complaint(batch.schedule, longest=LONGEST_TEXT):
        yield f"schedule {complaint}."
        return
    try:
        pairs = sorted(pairs_of(batch.schedule))
    except ValueError as error:
        yield f"schedule: {error}"
        return
    yield from _of_pairs(batch, pairs)


def _of_pairs(batch: Batch, pairs: list[tuple[int, int]]) -> Iterator[str]:
    written = f"schedule={shown(batch.schedule)}"
    begins = _begins(batch.global_size, None, batch.schedule, batch.schedule_unit, batch.sequence)
    if pairs[0][0] != 0:
        yield f"{written} does not say what the first step has. Begin it with 0:{pairs[0][1]}, say."
    for (before, _), (begin, size) in pairwise(begins):
        if begin == before:
            yield f"{written} has two batches from sample {begin:,} on, one of them {size}. Leave one of them out."
    for size in dict.fromkeys(size for _, size in pairs if not 1 <= size <= SEQUENCES.most):
        yield f"{written} has a batch of {size} sequences. Use 1 to {SEQUENCES.most:,}."
    if len({size for _, size in pairs}) > MOST_SIZES:
        yield f"{written} has more than {MOST_SIZES:,} different batches. Use fewer."
    if pairs[-1][1] != batch.global_size:
        yield (
            f"{written} ends with {pairs[-1][1]} sequences, but global={batch.global_size}. Set batch.global = "
            f"{pairs[-1][1]}, which plan, fit and simulate are about."
        )
