"""`Part`: what one tensor-parallel rank holds of a tensor of one microbatch, and what a collective makes of
the parts of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.base.reduction import Node
from .expressions import Expression, apply, digest, exactly_summed, summed, tree


class MisfitError(Exception):
    """An operation was applied to parts that it cannot take. The text says why; findings quote it."""


@dataclass(frozen=True)
class Part:
    """`value` is the expression of the whole tensor's elements; the other fields say which of them are here.

    `tokens` is the interval of each sample's tokens, `features` the leaves `(axis, lo, hi)` of a cut feature dimension
    (None: whole), `elements` a part `(member, size)` of the flat tensor between the two halves of an exact reduction.
    While a sum over leaves waits for the other ranks, `value` is what this rank has added up, `leaves` the interval
    `(lo, hi, num_leaves)` it covers, and `nodes` the tree nodes it keeps apart (exact numerics). `exactly` marks a sum
    that cannot round, and `maximum` a maximum by the leaves it has seen. `per_token` marks one number per token: so
    small that ranks gather all summands and add for themselves.
    """

    value: Expression
    tokens: tuple[int, int]
    features: tuple[str, int, int] | None = None
    elements: tuple[int, int] | None = None
    leaves: tuple[int, int, int] | None = None
    nodes: tuple[tuple[Node, Expression], ...] = ()
    exactly: bool = False
    maximum: frozenset[int] | None = None
    per_token: bool = False

    @property
    def extents(self) -> tuple[object, ...]:
        """Which elements are here."""
        return self.tokens, self.features, self.elements


def collective(op: str, members: Sequence[Part], cuts: Sequence[tuple[int, int]], *, by_tokens: bool) -> list[Part]:
    """What every member of a group holds after one collective over `members`, in the group's order.

    `cuts` are the tokens of each member where tokens are cut. An all_to_all cuts them with `by_tokens` (sequence
    parallelism), else the flat elements. Raises `MisfitError` where the parts cannot be added or put together.
    """
    match op:
        case "all_reduce":
            return [_added(members, "all_reduce")] * len(members)
        case "reduce_scatter":
            return _scattered(_added(members, "reduce_scatter"), cuts)
        case "all_to_all":
            return _exchanged(members, cuts, by_tokens)
        case _:
            return [_gathered(members, cuts)] * len(members)


def open_over_context(part: Part, cp: int) -> Part:
    """A sum over the queries of all context-parallel ranks on the first of them, which has
    added up those of its own."""
    return (
        replace(part, value=apply("own queries", part.value), leaves=(0, 1, cp), nodes=(((0, cp), part.value),))
        if cp > 1
        else part
    )


def over_context(op: str, part: Part, own: int, cp: int) -> Part:
    """What the first context-parallel rank holds after one collective over all of them, which have `own` tokens of each
    sample: tokens of the others as well, from all (all_gather) or from a neighbour (all_to_all); or a finished sum over
    the queries of all, of its tokens. Exact numerics finish it as a tree (all_to_all)."""
    lo, hi = part.tokens
    if part.leaves == (0, 1, cp):
        if op not in ("reduce_scatter", "all_to_all"):
            raise MisfitError(f"{op} over cp is given sums over queries that no rank has finished")
        ((_, total),) = part.nodes
        value = total if op == "all_to_all" else replace(total, ordered=digest(op, total.ordered, cp))
        return replace(part, value=value, leaves=None, nodes=())
    if op == "all_gather" and (lo, hi) == (0, own):
        return replace(part, tokens=(0, cp * own))
    if op == "all_to_all" and lo == 0 and hi % own == 0 and hi < cp * own:
        return replace(part, tokens=(0, hi + own))
    raise MisfitError(f"{op} over cp is given tokens [{lo}, {hi}) of {cp * own}, of which every rank has {own}")


def over_heads(op: str, part: Part, own: int, inner: int) -> Part:
    """What the first of `inner` neighbours holds after they have exchanged heads for tokens, of which every one has
    `own` of each sample, or back (all_to_all). An all_gather brings where documents begin, and nothing of `part`."""
    if op == "all_gather":
        return part
    if op == "all_to_all" and part.leaves is None and part.features is not None:
        axis, lo, hi = part.features
        if part.tokens == (0, own) and axis == axis.removesuffix(_share(inner)):
            return replace(part, tokens=(0, inner * own), features=(axis + _share(inner), lo, hi))
        if part.tokens == (0, inner * own) and axis.endswith(_share(inner)):
            return replace(part, tokens=(0, own), features=(axis.removesuffix(_share(inner)), lo, hi))
    raise MisfitError(f"{op} over cp_inner is given {_extents_text(part)}, of which every rank has {own} tokens")


def share_of(part: Part, inner: int) -> Part:
    """A rank's heads as the first of `inner` neighbours has them that have exchanged heads for tokens."""
    if inner == 1 or part.features is None:
        return part
    axis, lo, hi = part.features
    return replace(part, features=(axis + _share(inner), lo, hi))


def _share(inner: int) -> str:
    return f" (1 of {inner} parts)"


def on_another_copy(part: Part, axis: str, index: int) -> Part:
    """What the rank `index` steps along another axis holds: the same expression of its own samples."""
    value = Expression(digest(axis, index, part.value.ordered), digest(axis, index, part.value.unordered))
    return replace(part, value=value, nodes=tuple((node, apply(axis, index, each)) for node, each in part.nodes))


def _added(members: Sequence[Part], how: str) -> Part:
    if len({member.extents for member in members}) > 1:
        raise MisfitError(
            f"{how} adds tensors of which the ranks hold different parts ({_extents_text(members[0])} on the first)"
        )
    first = members[0]
    return Part(_sum_of(members, how), first.tokens, first.features, first.elements, maximum=_union(members))


def _sum_of(members: Sequence[Part], how: str) -> Expression:
    values = [member.value for member in members]
    if all(member.exactly for member in members):
        return exactly_summed(values)
    nodes = {node: value for member in members for node, value in member.nodes}
    finished = (
        tree(members[0].leaves[2], nodes)
        if members[0].leaves and nodes and how in ("all_to_all", "all_gather")
        else None
    )
    total = summed(how, values)
    return total if finished is None else Expression(finished.ordered, total.unordered)


def _union(members: Sequence[Part]) -> frozenset[int] | None:
    seen = [member.maximum for member in members if member.maximum is not None]
    return frozenset().union(*seen) if len(seen) == len(members) else None


def _scattered(part: Part, cuts: Sequence[tuple[int, int]]) -> list[Part]:
    if part.tokens != (0, cuts[-1][1]):
        raise MisfitError(f"a scatter cuts tokens that are cut already ({_extents_text(part)})")
    return [replace(part, tokens=tokens) for tokens in cuts]


def _exchanged(members: Sequence[Part], cuts: Sequence[tuple[int, int]], by_tokens: bool) -> list[Part]:
    """Every member finishes an even part."""
    part = _added(members, "all_to_all")
    if by_tokens:
        return _scattered(part, cuts)
    if part.elements is not None:
        raise MisfitError("all_to_all is given the finished parts of an earlier one")
    return [replace(part, elements=(member, len(members))) for member in range(len(members))]


def _gathered(members: Sequence[Part], cuts: Sequence[tuple[int, int]]) -> Part:
    """Parts put together, or sums that every rank finishes for itself."""
    first, size = members[0], len(members)
    if first.per_token and (first.nodes or first.exactly or first.maximum is not None):
        return _added(members, "all_gather")
    if len({member.value for member in members}) > 1:
        raise MisfitError("all_gather puts together parts of different tensors")
    if [member.elements for member in members] == [(index, size) for index in range(size)]:
        return replace(first, elements=None)
    whole = 0, cuts[-1][1]
    if [member.tokens for member in members] == list(cuts) and first.tokens != whole:
        return replace(first, tokens=whole)
    if first.leaves is not None:
        raise MisfitError("all_gather is given sums that no rank has finished")
    raise MisfitError(f"all_gather is given no parts that make a whole: the first rank holds {_extents_text(first)}")


def _extents_text(part: Part) -> str:
    features = (
        "" if part.features is None else (f", leaves [{part.features[1]}, {part.features[2]}) of {part.features[0]}")
    )
    elements = "" if part.elements is None else f", part {part.elements[0]} of {part.elements[1]} of the elements"
    return f"tokens [{part.tokens[0]}, {part.tokens[1]}){features}{elements}"
