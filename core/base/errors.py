"""Errors a user can meet. Each says what was given, which rule it breaks, where it came from,
and what works instead."""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable, Sequence
from pathlib import Path

from .findings import NOWHERE, Location

TRACEBACK_VARIABLE = "SHARDPROOF_TRACEBACK"
"""In the environment it has the command line print tracebacks."""


class Problem(str):
    """One thing that is wrong with what a user gave. As a text it is what is printed: the `origin`, where the value was
    given, such as `plan.toml:12` or `--tp`, and the `sentence` that says what is wrong.

    `key` is the key of a plan that it is about (`layout.tp`), None where unknown; `place` the line of a file.

    >>> Problem("tp=5 is odd.", "layout.tp", Location("plan.toml", 12), origin="plan.toml:12")
    'plan.toml:12: tp=5 is odd.'
    """

    sentence: str
    key: str | None
    place: Location
    origin: str

    def __new__(cls, sentence: str, key: str | None = None, place: Location = NOWHERE, *, origin: str = "") -> Problem:
        problem = super().__new__(cls, f"{origin}: {sentence}" if origin else sentence)
        problem.sentence, problem.key, problem.place, problem.origin = sentence, key, place, origin
        return problem

    def of(self, name: str) -> Problem:
        """The same of a part of what was given, whose name goes before the sentence."""
        return Problem(f"{name}: {self.sentence}", self.key, self.place, origin=self.origin)


class ShardproofError(Exception):
    """Any error that the user can do something about. The command line prints it and exits with 2.

    `problems` are all that was found, in file order; the message is all of them.
    """

    def __init__(self, problems: str | Iterable[str]):
        given = (problems,) if isinstance(problems, str) else problems
        self.problems = tuple(each if isinstance(each, Problem) else Problem(each) for each in given)
        super().__init__("\n".join(self.problems))


class PlanError(ShardproofError, ValueError):
    """A plan breaks rules."""


class FileError(PlanError):
    """A file that is not taken: no regular file, too long, no text, or not in the form that its kind has."""


class LayoutError(PlanError):
    """Degrees, orders or stage cuts that do not fit the model or the world."""


class ModelError(PlanError):
    """A model description that is incomplete, contradictory or not understood."""


class ClusterError(PlanError):
    """A cluster description that is incomplete or contradictory."""


class ScheduleError(ShardproofError, ValueError):
    """A schedule that cannot be built, parsed or lowered."""


class TimelineError(ShardproofError, ValueError):
    """A recorded timeline that cannot be read, or two that cannot be drawn together."""


class UnknownNameError(ShardproofError, LookupError):
    """A name that is not in a catalog. The message offers the closest known one, and all of them or
    where they are `listed`."""

    def __init__(self, what: str, name: str, known: Iterable[str], listed: str = ""):
        known = sorted(known)
        listing = f"{listed} lists the {len(known)} known ones." if listed else f"Known: {', '.join(known)}."
        super().__init__(f"unknown {what} {name[:LONGEST_NAME]!r}{did_you_mean(name, known)} {listing}")


class RankFailure(ShardproofError, RuntimeError):
    """A rank ended before its work was done. The message names the rank and how it ended; `global_rank` is
    None when none stands out.

    `report` is the JSON form of what all ranks were doing (`backend.watch.halt.Halt.report`), where that is known.
    """

    def __init__(self, message: str, global_rank: int | None = None, report: dict[str, object] | None = None):
        super().__init__(message)
        self.global_rank = global_rank
        self.report = report


class InternalError(Exception):
    """A defect of ours, which no input should cause. The command line prints it and exits with 3.

    `ask` is what is asked of who meets one.
    """

    ask = (
        "This is a defect of shardproof: please report it with the plan, the command and the traceback "
        f"(the same command with {TRACEBACK_VARIABLE}=1 prints it)."
    )


class RankDefect(RankFailure, InternalError):
    """A rank met an exception that nobody foresaw, in code of ours. The message names rank, action, layer and line."""

    def __init__(self, message: str, global_rank: int | None = None, report: dict[str, object] | None = None):
        super().__init__(message, global_rank, report)
        self.problems = (Problem(str(self)),)

    def __str__(self) -> str:
        return f"{super().__str__()}. {self.ask}"


class DivergedError(ShardproofError, ArithmeticError):
    """Loss or gradient norm are no longer finite numbers, so training has ended."""


class MissingExtraError(ShardproofError, ImportError):
    """A verb needs a package of an extra that is not installed."""


def error_words(error: BaseException) -> str:
    """The type and the words of an exception; never empty words.

    >>> error_words(KeyError(0)), error_words(AssertionError())
    ('KeyError: 0', 'AssertionError without a message')
    """
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else f"{name} without a message"


def line_words(function: str, file: str, line: int) -> str:
    """`finish (tree.py:42: assert self.is_done)`: where a program was."""
    return f"{function} ({Path(file).name}:{line}: {linecache.getline(file, line).strip()})"


LONGEST_NAME = 200
"""Letters of the longest name that is compared with known ones, which takes time as the square of them."""
MOST_NAMED = 8
"""Things of one kind that a message names."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'closest'?` where something is close, else a full stop. Nothing is close to a name of
    more than `LONGEST_NAME`."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5) if len(name) <= LONGEST_NAME else []
    return f"; did you mean {close[0]!r}?" if close else "."


def named(items: Sequence[str]) -> str:
    """The first few of the items, and how many more there are.

    >>> named([f"layer {i}" for i in range(10)])
    'layer 0, layer 1, layer 2, layer 3, layer 4, layer 5, layer 6, layer 7 and 2 more'
    """
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return f"{', '.join(items[:MOST_NAMED])}{more}"
