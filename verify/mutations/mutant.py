"""`Mutant`: a real bug of another stack as the same mistake in this backend, with what a good verifier says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...core.base.errors import PlanError, RankFailure
from ...core.plan.plan import Plan
from ...core.schedule.action import Action
from ..run.proof_run import Scenario, train_steps
from .patches import Patches


@dataclass(frozen=True)
class Expected:
    """The first difference that a bug makes, known from its nature: where it is, and what it is called.

    `tensor` is a pattern (`fnmatch`) of a canonical name, `kinds` are the kinds of difference that are right, `actions`
    the names of `core.schedule.action.Kind` in which the tensor is computed. `ranks` hold it wrongly; None where the
    bug does not decide that. `step` counts from 1.
    """

    phase: str
    tensor: str
    kinds: tuple[str, ...]
    actions: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    step: int = 1

    def is_placed(self, first: Mapping[str, Any]) -> bool:
        """Whether a first divergence (`dynamic.divergence`) is where it should be."""
        action = first["action"]
        return (
            first["phase"] == self.phase
            and first["step"] == self.step
            and fnmatchcase(first["tensor"], self.tensor)
            and action is not None
            and Action.from_str(action).kind.name in self.actions
            and (self.ranks is None or tuple(first["ranks"]) == self.ranks)
        )


@dataclass(frozen=True)
class Stops:
    """The end of a run that a bug stops: an error whose message has `words` (a regular expression), such as the
    rank and the action that hold up the others, or the file that cannot be read; where `ranks` are given a
    `RankFailure` of one of them."""

    words: str
    ranks: tuple[int, ...] | None = None

    def is_placed(self, failure: RankFailure | PlanError) -> bool:
        """Whether a failure shows where the bug is."""
        rank = failure.global_rank if isinstance(failure, RankFailure) else None
        return re.search(self.words, str(failure)) is not None and (self.ranks is None or rank in self.ranks)


@dataclass(frozen=True)
class Mutant:
    """One bug of the catalog `id` (`MR01`; further forms of it `MR01-b`).

    `title` says in a few words what is wrong, `source` where it was a real bug. `breaks` puts the mistake into
    the backend; it is a function of a module, or a `functools.partial` of one, because the ranks get it by
    name. `plan` makes the smallest plan that has the mechanism. `scenario` is what every rank does, and one
    device too, for `steps` steps.
    """

    id: str
    title: str
    source: str
    plan: Callable[[], Plan]
    breaks: Callable[[Patches], None]
    expected: Expected | Stops
    scenario: Scenario = train_steps
    steps: int = 2

    @property
    def bug(self) -> str:
        """The entry of the catalog."""
        return self.id.partition("-")[0]

    @property
    def is_listed(self) -> bool:
        """Whether the bug is in the catalog; others have numbers that begin with XX."""
        return not self.id.startswith("XX")
