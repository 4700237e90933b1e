"""What a plan loses on its way through another format: the keys whose values differ when it is read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..plan.keys import NOUNS, keys_of
from ..plan.plan import Plan

_FREE = ("name", "max_positions")
"""What a model is called, and for how many positions a config was made, changes no step."""


def lost_keys(plan: Plan, again: Plan, whys: Mapping[str, str], usual: str) -> tuple[tuple[str, str], ...]:
    """Key and reason of every value of a plan that the plan read back has not. Reasons are those of the key, else of
    its section, else the usual one."""

    def why(key: str) -> str:
        return whys.get(key) or whys.get(key.partition(".")[0]) or usual

    return tuple((key, why(key)) for key in _different(plan, again))


def _different(plan: Plan, again: Plan) -> Iterator[str]:
    for section in NOUNS:
        mine, other = getattr(plan, section), getattr(again, section)
        if section == "model":
            yield from (f"model.{name}" for name in sorted(_changed(mine, other)))
        elif section == "cluster":
            if mine.name != other.name or mine.num_devices != other.num_devices:
                yield "cluster.preset"
        else:
            keys = [key for key in keys_of(section).values() if key.attribute is not None]
            yield from (key.dotted for key in keys if _value(mine, key.attribute) != _value(other, key.attribute))


def _value(noun: Any, attribute: str | None) -> Any:
    return getattr(noun, attribute) if attribute is not None else None


def _changed(mine: Any, other: Any) -> set[str]:
    fields = (each.name for each in dataclasses.fields(mine) if each.name not in _FREE)
    return {name for name in fields if getattr(mine, name) != getattr(other, name)}
