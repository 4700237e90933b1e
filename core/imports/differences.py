"""What a plan loses on its way through another format: the keys whose values differ when it is read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..plan.keys import NOUNS, keys_of
from ..plan.plan import Plan
from ..plan.write import sparse_model


def lost_keys(plan: Plan, again: Plan | None, whys: Mapping[str, str], usual: str) -> tuple[tuple[str, str], ...]:
    """Key and reason of every value of a plan that the plan read back has not; of all values that are no defaults where
    nothing could be read back. Reasons are those of the key, else of its section, else the usual one."""

    def why(key: str) -> str:
        return whys.get(key) or whys.get(key.partition(".")[0]) or usual

    return tuple((key, why(key)) for key in _different(plan, again))


def _different(plan: Plan, again: Plan | None) -> Iterator[str]:
    for section, noun in NOUNS.items():
        mine, other = getattr(plan, section), None if again is None else getattr(again, section)
        if section == "model":
            if other is None or dataclasses.replace(mine, **_FREE) != dataclasses.replace(other, **_FREE):
                yield from (f"model.{name}" for name in sorted(_changed(mine, other)))
            continue
        if section == "cluster":
            if other is None or mine.name != other.name or mine.num_devices != other.num_devices:
                yield "cluster.preset"
            continue
        for key in keys_of(section).values():
            if key.attribute is None:
                continue
            default = next(each for each in dataclasses.fields(noun) if each.name == key.attribute).default
            theirs = default if other is None else getattr(other, key.attribute)
            if getattr(mine, key.attribute) != theirs:
                yield key.dotted


_FREE: dict[str, Any] = {"name": "", "max_positions": 1}
"""What a model is called, and for how many positions a config was made, changes no step."""


def _changed(mine: Any, other: Any) -> set[str]:
    if other is None:
        return set(sparse_model(mine))
    fields = (each.name for each in dataclasses.fields(mine) if each.name not in _FREE)
    return {name for name in fields if getattr(mine, name) != getattr(other, name)}
