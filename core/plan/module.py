"""`Module`: one of several models that are trained as one, and the layout of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..layout.layout import Layout
from ..model.model import ModelSpec

OWN_SECTIONS = ("model", "layout")
"""Sections that every module has for itself; all others are those of the whole plan."""


@dataclass(frozen=True)
class Module:
    """One model on the ranks `[first_rank, last_rank]`, fed by the modules called `inputs`."""

    name: str
    first_rank: int
    last_rank: int
    model: ModelSpec
    layout: Layout
    inputs: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of its range."""
        return self.last_rank - self.first_rank + 1

    @property
    def ranks(self) -> str:
        """The range as a plan file writes it: `4-7`, or `0`."""
        return f"{self.first_rank}-{self.last_rank}" if self.num_ranks > 1 else str(self.first_rank)


@dataclass(frozen=True)
class ModuleLayout(Layout):
    """The layout of a module whose rank 0 is `first_rank` of the whole: ranks are always those of the whole."""

    first_rank: int = 0

    def groups(self, axes: str) -> list[list[int]]:
        """As `Layout.groups`."""
        return self._moved(super().groups(axes))

    def expert_groups(self, axes: str) -> list[list[int]]:
        """As `Layout.expert_groups`."""
        return self._moved(super().expert_groups(axes))

    def global_rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """As `Layout.global_rank`."""
        return self.first_rank + super().global_rank(tp=tp, cp=cp, dp=dp, pp=pp)

    def _coordinates(self, global_rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
        return super()._coordinates(global_rank - self.first_rank, sizes)

    def _moved(self, groups: list[list[int]]) -> list[list[int]]:
        return [[self.first_rank + rank for rank in group] for group in groups]
