"""Which layouts of a search obey the rules of the plan: every rule is asked as often as what it is about changes, and
no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...core.layout.layout import Layout
from ...core.plan.rules import Rule, rules_about
from ...core.plan.sections import Batch

MICRO = "batch.micro"
"""The key of a batch that a search changes."""


class Legality:
    """The rules about what the plans of a search share, a layout and a batch, of which the microbatch alone differs.

    `shared` has the nouns that are the same for all plans, by section.
    """

    def __init__(self, shared: Mapping[str, Any], batch: Batch):
        self._nouns = {**shared, "batch": batch}
        rules = list(enumerate(rules_about(frozenset((*self._nouns, "layout")))))
        self._of_batches = [(place, rule) for place, rule in rules if MICRO in rule.keys]
        others = [(place, rule) for place, rule in rules if MICRO not in rule.keys]
        self._of_layouts = [(place, rule) for place, rule in others if "layout" in rule.sections]
        always = [(place, rule) for place, rule in others if "layout" not in rule.sections]
        self._always = _first_broken(always, self._nouns)

    def of_layout(self, layout: Layout) -> tuple[int, Rule] | None:
        """The first rule that a layout breaks whatever the microbatch, with its place in the table."""
        return _earlier(self._always, _first_broken(self._of_layouts, {**self._nouns, "layout": layout}))

    def broken(self, layout: Layout, batch: Batch, of_layout: tuple[int, Rule] | None) -> Rule | None:
        """The first rule that a layout breaks with a batch; `of_layout` is what `of_layout` says of the layout."""
        nouns = {**self._nouns, "layout": layout, "batch": batch}
        first = _earlier(of_layout, _first_broken(self._of_batches, nouns))
        return None if first is None else first[1]


def _first_broken(rules: Iterable[tuple[int, Rule]], nouns: Mapping[str, Any]) -> tuple[int, Rule] | None:
    for place, rule in rules:
        if any(rule.check(*map(nouns.__getitem__, rule.sections))):
            return place, rule
    return None


def _earlier(one: tuple[int, Rule] | None, other: tuple[int, Rule] | None) -> tuple[int, Rule] | None:
    """Whichever comes first in the table."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other, key=lambda each: each[0])
