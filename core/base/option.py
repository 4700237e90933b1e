"""Options: fields of a plan's nouns that say of themselves, once, what the reader of plan files, its messages and an
editor must know."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import (
    Any,
    ClassVar,
    Literal,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from .bounds import Bound, beyond, bound_of, shown
from .errors import PlanError, Problem, did_you_mean

T = TypeVar("T")


class About(TypedDict, total=False):
    """What is said of an option besides its type, its default and what it is.

    `more` is what a user should know besides that; `key` is its name in a plan file where that is not the field's, and
    `kind` the form of a text. `minimum` and `maximum` limit its value, `above` and `below` are exclusive, and `bound`
    is how large it is in any run, where its name does not imply that (`core.base.bounds`). `choices` are its legal
    texts where its type does not name them; many are `listed`, each with what it is, by `shardproof presets LISTED`.
    `read_by` names the module (below `shardproof`) whose behaviour the value changes; a test holds that it reads it.
    `default_note` describes a default that depends on other options.
    """

    read_by: Required[str]
    more: str
    key: str
    kind: Literal["path", "data", "size"]
    choices: tuple[str, ...]
    minimum: float
    maximum: float
    above: float
    below: float
    bound: Bound
    default_note: str
    listed: str


@overload
def option(
    doc: str, *, default: T, hash: bool | None = None, kw_only: bool | None = None, **about: Unpack[About]
) -> T: ...
@overload
def option(
    doc: str,
    *,
    default_factory: Callable[[], T],
    hash: bool | None = None,
    kw_only: bool | None = None,
    **about: Unpack[About],
) -> T: ...
@overload
def option(doc: str, *, hash: bool | None = None, kw_only: bool | None = None, **about: Unpack[About]) -> Any: ...
def option(
    doc: str,
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    hash: bool | None = None,
    kw_only: bool | None = None,
    **about: Unpack[About],
) -> Any:
    """A field of a noun that users set: `tp: int = option("tensor parallelism", default=1, minimum=1, ...)`.

    `doc` says in a few words what it is, and what else is known of it stands in the field's metadata. Without
    `default` it must be given; `default`, `hash` and `kw_only` are those of `dataclasses.field`.
    """
    return field(
        default=default,
        default_factory=default_factory,
        hash=hash,
        kw_only=MISSING if kw_only is None else kw_only,
        metadata={"doc": doc, **about},
    )


@dataclass_transform(frozen_default=True, field_specifiers=(option, field))
def noun(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """The decorator of a frozen dataclass of options; type checkers see their defaults by it."""
    return dataclass(frozen=True, kw_only=kw_only)


@cache
def option_types(of: type) -> Mapping[str, Any]:
    """The types of a noun's fields by name, without `None` where that says that nothing is given."""
    hints = get_type_hints(of)
    return {each.name: _without_none(hints[each.name]) for each in fields(of)}


def _without_none(hint: Any) -> Any:
    given = [each for each in get_args(hint) if each is not type(None)]
    return given[0] if type(None) in get_args(hint) and len(given) == 1 else hint


@cache
def option_choices(of: type) -> Mapping[str, tuple[str, ...]]:
    """The legal texts of those fields of a noun that have a few, by name."""
    found = {
        each.name: each.metadata.get("choices", get_args(hint) if get_origin(hint) is Literal else ())
        for each, hint in zip(fields(of), option_types(of).values(), strict=True)
    }
    return {name: choices for name, choices in found.items() if choices}


def limit_complaint(value: Any, about: Mapping[str, Any]) -> str:
    """What is wrong with a number, or those of a tuple, by the limits of its option: `must be at least 1`; empty
    when nothing is, and for what is no number.

    >>> limit_complaint(0, {"minimum": 1}), limit_complaint((0.5, 1.0), {"below": 1}), limit_complaint(2, {})
    ('must be at least 1', 'must be below 1', '')
    """
    limits = (
        ("minimum", "at least", operator.ge),
        ("above", "above", operator.gt),
        ("maximum", "at most", operator.le),
        ("below", "below", operator.lt),
    )
    for number in value if isinstance(value, list | tuple) else [value]:
        for name, words, is_within in limits:
            limit = about.get(name)
            if limit is not None and isinstance(number, int | float) and not is_within(number, limit):
                return f"must be {words} {limit}"
    return ""


FieldProblem = tuple[str, str]
"""The field of a noun that is wrong, and the sentence that says how."""


class Bounded:
    """A noun of a plan whose values are such as its options allow: one that has others raises `problem_type`, with a
    problem for each. `section` is that of its keys."""

    section: ClassVar[str]
    problem_type: ClassVar[type[PlanError]] = PlanError

    def __init_subclass__(cls, *, section: str | None = None, problem_type: type[PlanError] = PlanError) -> None:
        if section is not None:  # else a noun with more fields of the same section
            cls.section, cls.problem_type = section, problem_type

    def __post_init__(self) -> None:
        own: type = type(self)
        given = ((option.name, option.complaint(getattr(self, option.name))) for option in _limited(own))
        wrong = {name: complaint for name, complaint in given if complaint}
        if problems := [*wrong.items(), *self._problems(wrong)]:
            raise self.problem_type([Problem(sentence, f"{self.section}.{name}") for name, sentence in problems])

    def _problems(self, wrong: Collection[str]) -> Iterable[FieldProblem]:
        """What is wrong besides single values; the values of the fields in `wrong` can be anything."""
        return ()


@dataclass(frozen=True, slots=True)
class _Limited:
    """An option whose type or metadata leave out some values. `is_optional`: None is as nothing given. `plain` are
    whole numbers that nothing is wrong with, most of what is asked about, so that they need no look at `about`."""

    name: str
    is_whole: bool
    is_optional: bool
    choices: tuple[str, ...]
    about: Mapping[str, Any]
    plain: range

    def complaint(self, value: Any) -> str:
        """The sentence that says what is wrong with a value, empty when nothing is."""
        if (value is None and self.is_optional) or (type(value) is int and value in self.plain):
            return ""
        if self.choices:
            return self._unknown(value)
        least = self.about.get("minimum")
        if self.is_whole and (
            not isinstance(value, int) or isinstance(value, bool) or value < (value if least is None else least)
        ):
            words = "must be a whole number" + (f" of at least {least}" if least is not None else "")
        else:
            words = limit_complaint(value, self.about) or beyond(self.name, value, self.about.get("bound"))
        return words and f"{self.name}={shown(value)} {words}."

    def _unknown(self, value: Any) -> str:
        """The sentence about the first text that is none of the choices."""
        for text in value if isinstance(value, list | tuple) else (value,):
            if text not in self.choices:
                legal = f"`shardproof presets {listed}`" if (listed := self.about.get("listed")) else self.choices
                known = legal if isinstance(legal, str) else ", ".join(legal)
                return f"{self.name}={shown(text)} is not one of {known}{did_you_mean(str(text), self.choices)}"
        return ""


@cache
def _limited(of: type) -> tuple[_Limited, ...]:
    """The options of a noun that have limits; any number has."""
    hints, choices = option_types(of), option_choices(of)
    return tuple(
        _Limited(
            each.name,
            hints[each.name] is int,
            each.default is None,
            choices.get(each.name, ()),
            each.metadata,
            range(0) if each.name in choices else _plain_numbers(each.name, each.metadata),
        )
        for each in fields(of)
        if each.name in choices or hints[each.name] not in (str, bool)
    )


def _plain_numbers(name: str, about: Mapping[str, Any]) -> range:
    """Whole numbers from 1 on that are within the limits and the bound of an option.

    >>> _plain_numbers("tp", {"minimum": 2, "below": 8.5})
    range(2, 9)
    """
    bound = about.get("bound") or bound_of(name, whole=True)
    least = max(1, about.get("minimum", 1), about.get("above", 0) + 1, bound.least)
    below = min(about.get("maximum", bound.most) + 1, about.get("below", bound.most + 1), bound.most + 1)
    return range(math.ceil(least), math.ceil(below))
