"""`Rule`: one named entry of the table of static rules, and what rules say and take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ....core.base.findings import Finding, Severity
from ..facts import Facts

if TYPE_CHECKING:
    from .view import View


SCHEDULE_KEY = "schedule.name"
"""The key of a plan that says which actions run in which order."""


@dataclass(frozen=True)
class Violation:
    """One place where a rule is broken: the index of the action (None where the fault is that there is none),
    its rank, what is wrong.

    `related` holds the indices of other actions that take part, such as the rest of a cycle. `microbatch` is that of
    an action that is not there, `axis` that of a collective.
    """

    index: int | None
    pp_rank: int
    what: str
    related: tuple[int, ...] = ()
    microbatch: int | None = None
    axis: str | None = None


@dataclass(frozen=True)
class Rule:
    """A rule. `example` is the smallest schedule that breaks it and nothing else, as CSV,
    together with `example_facts`.

    `needs` names the part of `Facts` without which the rule is not asked. A warning is about a schedule
    that is right all the same. `key` is the key of a plan that the rule is about, None where the axis of a
    violation says it.
    """

    name: str
    doc: str
    hint: str
    example: str
    find: Callable[[View], Iterator[Violation]]
    needs: Literal["memory", "messages", "buffers", "layers", "collectives"] | None = None
    example_facts: Facts | None = None
    severity: Severity = "error"
    key: str | None = SCHEDULE_KEY

    def finding(self, violation: Violation, view: View) -> Finding:
        """A violation as text and fields."""
        where = view.where(violation.pp_rank, violation.index, violation.microbatch)
        axis, key = violation.axis, self.key
        return Finding.at(self.name, self.severity, where, violation.what, self.hint, axis=axis, key=key)
