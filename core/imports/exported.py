"""A plan in somebody else's words: the files, and what they cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exported:
    """`files` are pairs of path and text, the main one first; `lost` are pairs of a plan's key and why the other format
    does not have its value."""

    to: str
    files: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, str], ...] = ()

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "to": self.to,
            "files": [{"path": path, "text": text} for path, text in self.files],
            "lost": [{"key": key, "why": why} for key, why in self.lost],
        }
