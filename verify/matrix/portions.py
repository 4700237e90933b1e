"""A part of a long list of checks, and a sample of it that still shows everything: what the gates of the project run.

`--part i/n` cuts a list into parts of about equal cost (longest first, each to the part with the least so far: Graham
1969, SIAM J. Appl. Math. 17(2)). `--sample` keeps the fewest entries that a greedy set cover (Chvatal 1979, Math. of OR
4(3)) needs to show all features. Both are deterministic: the same list gives the same entries.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...core.base.errors import PlanError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Part `number` of `of`, counted from 1."""

    number: int
    of: int


WHOLE = Part(1, 1)


def add_portions(parser: argparse.ArgumentParser | argparse._ArgumentGroup, what: str, shows: str) -> None:
    """The options `--sample` and `--part` for a list of `what`."""
    parser.add_argument("--sample", action="store_true", help=f"the fewest {what} that show {shows}")
    parser.add_argument(
        "--part", metavar="I/N", help=(f"part I of N of the chosen {what}, cut by expected cost; 1/1 is all of them")
    )


def parse_part(text: str | None) -> Part:
    """The part that `--part I/N` names, the whole without it. Raises `PlanError` unless 1 <= I <= N."""
    if text is None:
        return WHOLE
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise PlanError(
            f"--part {text}: a part is I/N with whole numbers and 1 <= I <= N. Use 1/3, 2/3 and 3/3 for three parts."
        )
    return Part(int(found[1]), int(found[2]))


def part_of(
    items: Sequence[Item], part: Part, cost: Callable[[Item], float], group: Callable[[Item], Hashable]
) -> list[Item]:
    """The items of a part, in their order. Items of one `group` share work and stay together; groups are
    cut by the sum of `cost`.

    >>> [part_of(["aaaaa", "bbbb", "ccc", "ddd", "eee"], Part(i, 2), cost=len, group=str) for i in (1, 2)]
    [['aaaaa', 'ddd'], ['bbbb', 'ccc', 'eee']]
    """
    costs: dict[Hashable, float] = {}
    for item in items:
        costs[group(item)] = costs.get(group(item), 0.0) + cost(item)
    loads = [0.0] * part.of
    chosen: set[Hashable] = set()
    for name in sorted(costs, key=lambda name: -costs[name]):
        least = loads.index(min(loads))
        loads[least] += costs[name]
        if least == part.number - 1:
            chosen.add(name)
    return [item for item in items if group(item) in chosen]


def smallest_cover(
    items: Sequence[Item], shows: Callable[[Item], Collection[Hashable]], cost: Callable[[Item], float]
) -> list[Item]:
    """A few items, in their order, that show all that all items show; each is needed for something.
    Cheaper ones come first.

    >>> smallest_cover(["ab", "bc", "cd", "bcd"], shows=set, cost=lambda word: 1.0)
    ['ab', 'bcd']
    """
    shown, costs = [frozenset(shows(item)) for item in items], [cost(item) for item in items]
    missing: set[Hashable] = set().union(*shown)
    chosen: list[int] = []
    while missing:
        best = max(range(len(items)), key=lambda i: (len(missing & shown[i]), -costs[i]))
        missing -= shown[best]
        chosen.append(best)
    for each in sorted(chosen, key=lambda i: -costs[i]):
        others = frozenset[Hashable]().union(*(shown[i] for i in chosen if i != each))
        if shown[each] <= others:
            chosen.remove(each)
    return [items[i] for i in sorted(chosen)]
