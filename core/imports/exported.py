"""A plan in another format, and what of it is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..plan.keys import KEYS
from ..plan.plan import Plan


@dataclass(frozen=True)
class Exported:
    """A plan in another format: `files` are pairs of path and text, `lost` pairs of key and why it is not in them."""

    to: str
    files: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, str], ...]

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "to": self.to,
            "files": [{"path": path, "text": text} for path, text in self.files],
            "lost": [{"key": key, "why": why} for key, why in self.lost],
        }


def lost_keys(plan: Plan, again: Plan, why: Mapping[str, str], otherwise: str) -> tuple[tuple[str, str], ...]:
    """The keys that are other in a plan that is read back from what was written, each with its reason: that of the key
    or of its section, else `otherwise`. Keys that a plan leaves to its profile are in no file and not lost."""
    lost = []
    for key in KEYS:
        if key.attribute is None:
            continue
        value, other = (getattr(getattr(each, key.section), key.attribute) for each in (plan, again))
        if value is not None and value != other:
            lost.append((key.dotted, why.get(key.dotted) or why.get(key.section) or otherwise))
    return tuple(lost)
