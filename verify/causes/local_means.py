"""Means that ranks, microbatches or samples took over their own tokens, explained by the numbers of
these where they are unequal.

A mean over N tokens is a sum of parts divided by N. Who divides by the n tokens of a part alone makes N/n of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...core.plan.plan import Plan
from ..ledger.relations import Class
from ..run.contributions import Part
from .part_groups import Label, groupings, named
from .sums import explains, slack_of

ONE_NUMBER = 1e-7
"""What rounding may leave over of a number alone, which exact numerics add up in integers."""

Multiples = tuple[dict[Label, float], str]
"""How often each group is in a sum, and how that is said."""


def explained_by_counts(
    plan: Plan, parts: Sequence[Part], values: np.ndarray, difference: np.ndarray, counted: Sequence[Part], dtype: str
) -> tuple[Class, str] | None:
    """Kind and words of a sum of `values` [parts, ...] that is off by `difference` [...] because parts of it were
    divided by their own number of tokens; `counted` are all tokens that count in the loss. None of all others, and
    where all groups count equally: that is a simple multiple."""
    values, difference = values.reshape(len(parts), -1), difference.reshape(-1)
    slack = slack_of(values, dtype) if len(difference) > 1 else ONE_NUMBER * float(np.abs(values.sum(0))[0])
    for labels in groupings(plan, [*parts, *counted]):
        own, counts = labels[: len(parts)], Counter(labels[len(parts) :])
        if len(set(counts.values())) < 2 or not counts.keys() >= set(own):
            continue
        for factors, words in _suspects(plan, counts):
            each = [factors[label] for label in own]
            if not _is_simple(each) and explains((np.array(each) - 1) @ values, difference, slack):
                return "local mean", words
    return None


def _suspects(plan: Plan, counts: Mapping[Label, int]) -> Iterator[Multiples]:
    total, number = sum(counts.values()), len(counts)
    explained = "; ".join(f"{count} of {named(plan, [label])}" for label, count in list(counts.items())[:4])
    shown = f"{explained}{f' and {number - 4} more' if number > 4 else ''}"
    own = {label: total / count for label, count in counts.items()}
    yield own, f"each part is divided by its own number of tokens, {shown}, and not by all {total}"
    yield (
        {label: factor / number for label, factor in own.items()},
        f"the mean of {number} means, each over its own number of tokens, {shown}, and not the mean over all {total}",
    )
    for label, count in counts.items():
        words = f"{count} tokens of {named(plan, [label])}"
        yield dict.fromkeys(counts, total / count), f"the whole sum is divided by the {words}, and not by all {total}"
        yield (
            {each: own[each] * (each == label) for each in counts},
            (f"the mean over the {words} alone, and not over all {total}"),
        )


def _is_simple(factors: Sequence[float]) -> bool:
    """Whether the whole was multiplied or divided by a whole number, which says nothing of counts."""
    factor = factors[0]
    return len(set(factors)) == 1 and any(
        abs(each - round(each)) < 1e-9 * each for each in (factor, 1 / factor if factor else 1.0)
    )
