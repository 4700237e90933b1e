"""The words and the JSON form of differences and of distances from bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.base.findings import Finding, Where
from ...core.plan.plan import AnyPlan, Plan
from ..ledger.compare import Difference, Problem, action_of, name_of, ranks_listed
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GATHERED,
    GRADIENT,
    HELD_OUT,
    NO_STEP,
    RECOMPUTED,
    Key,
    RunLedger,
)
from ..ledger.relations import HINTS
from ..run.fast_run import FastCheck
from ..run.regression import Coefficient

_PROBLEMS: Mapping[Problem, str] = {
    "differs": "a second run of the same ranks had the right bits",
    "missing": "the reference has this tensor, and no rank of the run",
    "extra": "the run has this tensor, and the reference has not",
    "incomplete": "the pieces of the ranks do not make up the whole tensor exactly once",
    "unclear": "these ranks of the reference hold the same tensor and have other bits",
}

_DUPLICATES: Mapping[str, str] = {
    GATHERED: (
        "What ranks bring together is right: look at the gather, at what it waits for, and at who writes into "
        "its buffer."
    ),
    RECOMPUTED: (
        "The rank had other values forward: look at what its recomputation reads (weights, buffers, random numbers), "
        "and at the groups that it gathers from."
    ),
}
"""Where to look, where a run itself has both the right values and the wrong ones."""


def devices_words(num_modules: int) -> str:
    """What a run is compared with."""
    return "one device" if num_modules == 1 else f"one device for each of {num_modules} modules"


def count_words(number: int, what: str) -> str:
    """`1 tensor`, `2,000 tensors`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def divergence(plan: AnyPlan, difference: Difference) -> dict[str, object]:
    """The JSON form of the first divergence. Steps are counted from 1; 0 is before the first. Numbers that
    are not known are null."""
    key, values, relation = difference.key, difference.values, difference.relation
    rank = difference.global_ranks[0] if difference.global_ranks else None
    action = None if rank is None else action_of(plan, key, rank)
    return {
        "step": key.step + 1,
        "rank": rank,
        "ranks": list(difference.global_ranks),
        "action": None if action is None else str(action),
        "microbatch": None if action is None else action.microbatch,
        "tensor": key.tensor,
        "phase": key.phase,
        "sample": key.sample,
        "problem": difference.problem,
        "elements_different": values.elements_different if values else None,
        "num_elements": values.num_elements if values else None,
        "bits_different": values.bits_different if values else None,
        "class": difference.kind,
        "words": _PROBLEMS[difference.problem] if relation is None else relation.words,
        "distance": relation.distance if relation and math.isfinite(relation.distance) else None,
        "norm": relation.norm if relation and math.isfinite(relation.norm) else None,
    }


def differing_words(number: int) -> str:
    """`1 tensor differs`, `2,000 tensors differ`."""
    return f"{count_words(number, 'tensor')} differ{'s' if number == 1 else ''}"


def later(
    keys: Sequence[Key], rule: str = "bits-differ-later", *, order: str = "dataflow", what: str = "differ"
) -> list[Finding]:
    """One line about the tensors after the first that is wrong; none where there are none."""
    if not keys:
        return []
    names = list(dict.fromkeys(name_of(key._replace(sample=None)) for key in keys))
    words = f"{count_words(len(keys), 'more tensor')} {what}, first {', '.join(names[:3])}."
    return [Finding(rule, "info", f"later in {order} order", words)]


def fast_words(fast: Mapping[str, Any]) -> str:
    """The verdict on fast numerics (`FastCheck.report`)."""
    compared, nearest = count_words(fast["tensors"], "tensor"), fast["nearest"]
    if fast["tensors_outside"]:
        return (
            f"Fast numerics LEAVE THE BOUND: {fast['tensors_outside']} of {compared} are farther from exact ones "
            "than rounding allows."
        )
    classes = len(fast["classes"])
    if fast["classes_scaled"]:
        return (
            f"Fast numerics HAVE A COMMON FACTOR: {fast['classes_scaled']} of {classes} classes of tensors are "
            "not once exact ones."
        )
    place = f"{nearest['phase']} {nearest['tensor']} of step {nearest['step']}"
    verdict = (
        f"Fast numerics, {compared}: all within the bound derived from their terms; {place} uses most of it, "
        f"{nearest['share']:.2%}."
    )
    if not classes:
        return verdict
    first = fast["classes"][0]
    times = _times(first["coefficient"], (first["interval"][1] - first["interval"][0]) / 2)
    return (
        f"{verdict} None of {classes} classes has a common factor; {first['phase']} {first['class']} is nearest "
        f"to one, with {times}."
    )


def fast_findings(plan: Plan, check: FastCheck) -> list[Finding]:
    """The first tensor that leaves its bound, the first class that has a common factor, and one
    line each about the rest."""
    return [*_bound_findings(plan, check), *_factor_findings(check.scaled)]


def _bound_findings(plan: Plan, check: FastCheck) -> list[Finding]:
    if not check.wrong:
        return []
    key, far = check.wrong[0], check.distances[check.wrong[0]]
    where = where_of(plan, key, (far.global_rank,))
    what = (
        f"fast numerics are {far.distance:.3g} from exact ones, where {check.terms(key)} bound the distance by "
        f"{far.bound:.3g}."
    )
    hint = "Orders of sums cannot explain it: look at what is summed over ranks here, and how often."
    if plan.model.is_moe:
        hint += (
            " With experts also at the router: rounding may have decided which of two equal experts a token goes to."
        )
    return [
        Finding.at("bound-left", "error", where, what, hint, key="numerics.mode"),
        *later(check.wrong[1:], "bound-left-later", what="leave theirs"),
    ]


def _factor_findings(scaled: Sequence[Coefficient]) -> list[Finding]:
    """Classes that are multiplied by something."""
    if not scaled:
        return []
    first, others = scaled[0], scaled[1:]
    where = Where(tensor=first.group, words=f"{first.phase} {first.group}")
    times, observations = _times(first.factor, first.half_width), count_words(first.num_observations, "observation")
    what = f"scaled by {times}: fast numerics are so many times exact ones in {observations} of all steps."
    hint = (
        "Rounding has no common factor: look at what these tensors are multiplied or divided by in fast numerics, "
        "such as a mean over "
        "ranks, a number of tokens or microbatches, or the scale of the loss."
    )
    found = [Finding.at("common-factor", "error", where, what, hint, key="numerics.mode")]
    if others:
        named = ", ".join(f"{each.phase} {each.group} by {_times(each.factor, each.half_width)}" for each in others[:3])
        found.append(
            Finding("common-factor-later", "info", "later in dataflow order", (f"{len(others)} more, first {named}."))
        )
    return found


def _times(factor: float, half_width: float) -> str:
    """A coefficient to as many digits as are known.

    >>> _times(1.0204, 0.0031), _times(1.00100004, 1.2e-6)
    ('1.0204 +- 0.0031', '1.0010000 +- 0.0000012')
    """
    digits = max(2, 1 - math.floor(math.log10(half_width)))
    return f"{factor:.{digits}f} +- {half_width:.{digits}f}"


def describe(plan: AnyPlan, run: RunLedger, differences: Sequence[Difference]) -> list[Finding]:
    """The first difference as an error that says where and how, and one line about the rest."""
    if not differences:
        return []
    return [_first(plan, run, differences[0]), *later([each.key for each in differences[1:]])]


def problem_words(problem: Problem) -> tuple[str, str]:
    """What and hint of a difference that is not one of values."""
    held = (
        "Find what is wrong in the reference first."
        if problem == "unclear"
        else ("Look at which layers and leaves each rank holds.")
    )
    return f"{_PROBLEMS[problem]}.", held


def where_of(plan: AnyPlan, key: Key, ranks: Sequence[int]) -> Where:
    """`step 2, rank 6, 3F3, layers.0.output of sample 3`; of several ranks the first, whose action is named."""
    when = "the start of training" if key.step == NO_STEP else f"step {key.step + 1}"
    if not ranks:
        return Where(tensor=key.tensor, words=f"{when}, {name_of(key)}")
    action = action_of(plan, key, ranks[0])
    words = f"{when}, {ranks_listed(ranks)}, {action}, {name_of(key)}"
    return Where(ranks[0], str(action), key.tensor, action.microbatch, words)


def _first(plan: AnyPlan, run: RunLedger, first: Difference) -> Finding:
    """The finding of the first divergence."""
    key, values, ranks, relation = first.key, first.values, first.global_ranks, first.relation
    where = where_of(plan, key, ranks)
    if first.problem != "differs":
        return Finding.at(f"tensor-{first.problem}", "error", where, *problem_words(first.problem))
    if values is None or relation is None:
        what = f"digests differed, but {_PROBLEMS['differs']}."
        return Finding.at("run-dependent", "error", where, what, HINTS["run-dependent"])
    right = "it was" if key.phase == RECOMPUTED else "one device has"
    what = (
        f"{relation.kind}: {relation.words}. {values.elements_different} of {values.num_elements} elements differ "
        f"({values.bits_different} bits); at {list(values.index)} {right} {values.expected!r}, rank {ranks[0]} has "
        f"{values.found!r}."
    )
    rule = "run-dependent" if relation.kind == "run-dependent" else "bits-differ"
    hint, axis = _hint(plan, run, first)
    axis = axis or relation.axis
    return Finding.at(rule, "error", where, what, hint, axis=axis, key="schedule.name" if axis == "pp" else None)


def _hint(plan: AnyPlan, run: RunLedger, first: Difference) -> tuple[str, str | None]:
    """Which reduction to look at: the one over the axis that separates wrong replicas from right ones; and it."""
    if (words := _DUPLICATES.get(first.key.phase)) is not None:
        return words, None
    wrong = set(first.global_ranks)
    regions = {piece.region for piece in run.pieces[first.key] if piece.global_rank in wrong}
    right = {piece.global_rank for piece in run.pieces[first.key] if piece.region in regions} - wrong
    if not right:
        return HINTS[first.kind], None
    axis = _axis_between(plan.part_of(min(wrong)), wrong, right, first.key.phase)
    what = "input-gradient reduction behind" if first.key.phase == ACTIVATION_GRADIENT else "reduction of"
    if first.key.phase not in (ACTIVATION, HELD_OUT, ACTIVATION_GRADIENT, GRADIENT):
        what = "step of"
    plural = len(right) > 1
    replicas = (
        f"{'Replicas' if plural else 'The replica'} on {ranks_listed(sorted(right))} {'are' if plural else 'is'} right"
    )
    return f"{replicas}: look at the {_AXIS_WORDS[axis]} {what} {first.key.tensor} on rank {min(wrong)}.", axis


_AXIS_WORDS = {"tp": "tensor-parallel", "pp": "cross-replica", "dp": "data-parallel"}
"""Reductions by the axis of the ranks that they join; along pp they join replicas of a stage."""


def _axis_between(plan: Plan, wrong: set[int], right: set[int], phase: str) -> str:
    """The axis of the reduction that separates wrong ranks from right ones (`_AXIS_WORDS`)."""

    def separates(axis: str) -> bool:
        places = [{plan.layout.coordinates(rank)[axis] for rank in ranks} for ranks in (wrong, right)]
        return places[0].isdisjoint(places[1])

    if separates("tp") or phase in (ACTIVATION, HELD_OUT, ACTIVATION_GRADIENT):
        return "tp"
    return "pp" if separates("pp") and not separates("dp") else "dp"
