"""`Rule`: one named entry of the table of static rules, and what rules say and take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ....core.base.findings import Severity
from ..facts import Facts

if TYPE_CHECKING:
    from .view import View


@dataclass(frozen=True)
class Violation:
    """One place where a rule is broken: the index of the action (None where the fault is that there is none),
    its rank, what is wrong.

    `related` holds the indices of other actions that take part, such as the rest of a cycle.
    """

    index: int | None
    pp_rank: int
    what: str
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule. `example` is the smallest schedule that breaks it and nothing else, as CSV,
    together with `example_facts`.

    `needs` names the part of `Facts` without which the rule is not asked. A warning is about a schedule
    that is right all the same.
    """

    name: str
    doc: str
    hint: str
    example: str
    find: Callable[[View], Iterator[Violation]]
    needs: Literal["memory", "messages", "buffers", "layers", "collectives"] | None = None
    example_facts: Facts | None = None
    severity: Severity = "error"
