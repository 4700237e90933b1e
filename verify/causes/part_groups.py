"""Groups of the parts of a sum, by the ranks that bring them, by microbatches, sequences and what else separates
them apart; in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations

from ...core.base.reduction import cut
from ...core.layout.chunks import Chunks
from ...core.layout.leaves import Leaves
from ...core.plan.plan import Plan
from ..ledger.relations import Class, degree_of, in_ratio
from ..run.contributions import Part

AXES = ("dp", "cp", "tp", "ep", "etp")

Label = tuple[tuple[str, int], ...]
"""A group of parts: `(("dp", 1), ("cp", 0))`; what is not cut by these axes is `()`."""


def groupings(plan: Plan, parts: Sequence[Part]) -> Iterator[list[Label]]:
    """The group of every part, in one way of grouping after the other, the coarse ones first."""
    cut_by = {axis: [rank_of(plan, axis, part) for part in parts] for axis in AXES if degree_of(plan.layout, axis) > 1}
    axes = [axis for axis, ranks in cut_by.items() if any(rank is not None for rank in ranks)]
    for number in range(1, len(axes) + 1):
        for chosen in combinations(axes, number):
            yield [_label(part, **{axis: cut_by[axis][at] for axis in chosen}) for at, part in enumerate(parts)]
    uses = list(dict.fromkeys(part.use or "" for part in parts))
    if len(uses) > 1:
        yield [((f"use {part.use}", uses.index(part.use or "")),) for part in parts]
    if any(part.expert is not None for part in parts):
        yield [_source(part) for part in parts]
    yield [
        _label(part, microbatch=None if part.sample is None else part.sample // plan.batch.micro_size) for part in parts
    ]
    yield [_label(part, sample=part.sample) for part in parts]
    yield [_label(part, tokens=_first_token(part)) for part in parts]
    yield [_label(part, leaf=part.leaf, expert=part.expert) for part in parts]
    yield [_label(part, sample=part.sample, tokens=_first_token(part)) for part in parts]


def _first_token(part: Part) -> int | None:
    return None if part.tokens is None else part.tokens[0]


def _source(part: Part) -> Label:
    """What of a layer with experts a part comes from: those that tokens are sent to, those that all tokens take, or the
    router."""
    if part.rest or part.use:
        return (("rest", 0),) if part.rest else ((f"use {part.use}", 0),)
    return (("routed experts" if part.expert is not None else "shared experts", 0),)


def _label(part: Part, **found: int | None) -> Label:
    return (("rest", 0),) if part.rest else tuple((name, value) for name, value in found.items() if value is not None)


def rank_of(plan: Plan, axis: str, part: Part) -> int | None:
    """The rank of an axis that brings a part; None where that axis does not cut it."""
    layout = plan.layout
    if axis == "dp" and part.sample is not None:
        return next(rank for rank in range(layout.dp) if part.sample < plan.samples_of(rank)[1])
    if axis == "ep" and part.expert is not None:
        return _owner(plan.model.num_experts, layout.ep, part.expert)
    if axis == ("tp" if part.expert is None else "etp") and part.leaf is not None and part.num_leaves is not None:
        return _owner(part.num_leaves, degree_of(layout, axis), part.leaf)
    if axis in ("cp", "tp") and part.tokens is not None:
        return rank_of_token(plan, axis, part.tokens[0])
    return None


def _owner(number: int, degree: int, item: int) -> int:
    return next(rank for rank in range(degree) if item < cut(number, degree, rank)[1])


def rank_of_token(plan: Plan, axis: str, token: int) -> int:
    """The rank that has a token of a sequence: of context parallelism, or of the ranks that cut tokens further
    over tensor parallelism."""
    layout, sequence = plan.layout, plan.batch.sequence
    for cp_rank in range(layout.cp):
        own = Chunks(sequence, layout.cp, cp_rank)
        if any(lo <= token < hi for lo, hi in own.spans):
            if axis == "cp":
                return cp_rank
            leaves = Leaves(own.num_own, plan.leaf_sizes.reduction_token_block)
            return next(rank for rank in range(layout.tp) if own.local(token) < leaves.owned_items(layout.tp, rank)[1])
    raise AssertionError(f"no rank has token {token}")


def in_words(plan: Plan, global_rank: int, factors: Mapping[Label, Fraction], axes: Sequence[str]) -> tuple[Class, str]:
    """Kind and words of a sum of which each group is in so many times; `axes` may have made a multiple of the whole."""
    if not any(factors.values()):
        return "missing", "without any of its parts"
    if len(set(factors.values())) == 1:
        return in_ratio(next(iter(factors.values())), plan.layout, axes)
    counted = {label: factor for label, factor in factors.items() if label != (("rest", 0),)}
    lost = [label for label, factor in factors.items() if factor == 0]
    present = {label: factor for label, factor in counted.items() if factor != 0}
    odd = {label: factor for label, factor in factors.items() if factor not in (0, 1)}
    if lost and not odd:
        return "missing", f"only {named(plan, list(present))}" if len(present) < len(
            lost
        ) else f"without {named(plan, lost)}"
    times = "; ".join(
        (f"{named(plan, [label])} {'twice' if factor == 2 else f'times {factor}'}")
        for label, factor in list(odd.items())[:4]
    )
    if lost:
        own = plan.layout.coordinates(global_rank)
        is_own = all(dict(label).get(axis, rank) == rank for label in present for axis, rank in own.items())
        if sum(counted.values()) == len(counted) and not is_own:
            return "permuted", f"{times}, and without {named(plan, lost)}"
        return "missing", f"without {named(plan, lost)}, and {times}"
    return ("doubled" if set(odd.values()) == {Fraction(2)} else "scaled"), f"the right sum with {times}"


def named(plan: Plan, labels: Sequence[Label]) -> str:
    """Groups in words: `the parts of dp rank 1 (samples 2-3), tp rank 0`, of many only the first."""
    words = [
        ", ".join(_word(plan, name, value) for name, value in label) or ("what no rank has alone") for label in labels
    ]
    shown = "; ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
    return f"the part{'s' if len(words) > 1 else ''} of {shown}"


def _word(plan: Plan, name: str, value: int) -> str:
    if name == "dp":
        lo, hi = plan.samples_of(value)
        return f"dp rank {value} (sample{'s' if hi - lo > 1 else ''} {f'{lo}-{hi - 1}' if hi - lo > 1 else lo})"
    if name in ("cp", "tp", "ep", "etp"):
        return f"{name} rank {value}"
    if name.endswith(" experts"):
        return f"the {name}"
    if name == "tokens":
        return f"the tokens from {value}"
    if name == "microbatch":
        rank = next(rank for rank in range(plan.layout.dp) if value * plan.batch.micro_size < plan.samples_of(rank)[1])
        return f"microbatch {value - plan.samples_of(rank)[0] // plan.batch.micro_size}" + (
            f" of dp rank {rank}" if plan.layout.dp > 1 else ""
        )
    if name.startswith("use "):
        return f"its {name}" if name[4:].isdecimal() else f"its use as {name[4:]}"
    return "what is added to the product" if name == "rest" else f"{'feature leaf' if name == 'leaf' else name} {value}"
