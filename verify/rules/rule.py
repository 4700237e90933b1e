"""`Rule`: one named entry of the table of static rules, and what rules say and take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .view import View


@dataclass(frozen=True)
class Violation:
    """One place where a rule is broken: the index of the action (None where the fault is that there is none), its rank, what is wrong.

    `related` holds the indices of other actions that take part, such as the rest of a cycle.
    """

    index: int | None
    pp_rank: int
    what: str
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class ActivationMemory:
    """What the memory rule needs: bytes that one microbatch of each stage keeps from its forward to the end of its backward, and the
    bytes each pipeline rank has for them."""

    stage_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """A rule. `example` is the smallest schedule that breaks it and nothing else, as CSV (and `example_memory` for the memory rule).

    The text after `doc` and `hint` in the documentation is made from the example, and the tests run it.
    """

    name: str
    doc: str
    hint: str
    example: str
    find: Callable[[View], Iterator[Violation]]
    example_memory: ActivationMemory | None = None
