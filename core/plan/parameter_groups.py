"""`ParameterGroup`: parameters that an optimizer treats otherwise, chosen by their names (`[[optimizer.groups]]`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..base.errors import did_you_mean


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose whole canonical name (`layers.3.mlp.up.weight`) is matched by the regular expression `match`,
    and by that of no group before.

    `weight_decay` is their own, of those too that do not decay else (norms, biases); None leaves it as it is. Their
    learning rate is that of the step times `learning_rate_multiplier`. `frozen` ones have no gradient and no state, do
    not change and do not count in the norm.
    """

    match: str
    weight_decay: float | None = None
    learning_rate_multiplier: float = 1.0
    frozen: bool = False

    def has(self, name: str) -> bool:
        """Whether `match` matches a name."""
        return re.fullmatch(self.match, name) is not None

    @property
    def given(self) -> dict[str, Any]:
        """Key -> value of what is not as it would be without the group."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


_DEFAULTS = {each.name: each.default for each in fields(ParameterGroup)}

_KINDS: Mapping[str, tuple[type, ...]] = {
    "match": (str,),
    "weight_decay": (int, float),
    "learning_rate_multiplier": (int, float),
    "frozen": (bool,),
}

LARGEST = 1e6
"""Of a multiplier and a weight decay."""


def group_complaints(table: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the keys of one group as a plan file gives them."""
    where = f"group match={table.get('match')!r}"
    if not isinstance(table.get("match"), str) or not table["match"]:
        yield 'a group of [[optimizer.groups]] has no match. Give one, such as match = ".*norm.weight".'
        return
    try:
        re.compile(table["match"])
    except re.error as error:
        yield f"{where} is no regular expression: {error}."
    for name, value in table.items():
        if name not in _KINDS:
            yield f"{where} has an unknown key {name!r}{did_you_mean(name, _KINDS)} Known: {', '.join(_KINDS)}."
        elif not isinstance(value, _KINDS[name]) or (bool not in _KINDS[name] and isinstance(value, bool)):
            expected = {bool: "true or false", str: "a text in quotes"}.get(_KINDS[name][0], "a number")
            yield f"{where}: {name} = {value!r} must be {expected}."
        elif isinstance(value, int | float) and not 0 <= value <= LARGEST:
            yield f"{where}: {name} = {value!r} must be from 0 to {LARGEST:g}."
    if table.get("frozen") is True and len(table.keys() & _KINDS.keys()) > 2:
        yield f"{where} is frozen, so it has no weight_decay and no learning_rate_multiplier. Leave them out."


def group_of(table: Mapping[str, Any]) -> ParameterGroup:
    """The group of keys without complaint."""
    floats = {name: float(value) for name, value in table.items() if int in _KINDS[name]}
    return ParameterGroup(**{**table, **floats})
