"""How far measured steps of a plan's kind were from their predictions, as published rows say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...core.plan.plan import AnyPlan

LEAST_SETTINGS = 8
"""An interval rests on at least so many settings; where a kind has fewer, a wider one is taken."""

SHARE = 0.8
"""Share of the settings that an interval holds: a tenth lies below it, and a tenth above."""


@dataclass(frozen=True)
class RunKind:
    """What distinguishes published runs: the software stack (`runtime.profile`), the cluster (its name), products in
    fp8, and experts. None: not distinguished."""

    profile: str | None = None
    cluster: str | None = None
    fp8: bool | None = None
    experts: bool | None = None

    def holds(self, other: RunKind) -> bool:
        """True when `other` differs in nothing that is distinguished here."""
        return all(
            (own := getattr(self, each.name)) is None or own == getattr(other, each.name) for each in fields(self)
        )

    def wider(self) -> Iterator[RunKind]:
        """This kind, then ones that distinguish less, the stack last."""
        yield self
        yield RunKind(self.profile, self.cluster, experts=self.experts)
        yield RunKind(self.profile, self.cluster)
        yield RunKind(self.profile)
        yield RunKind()

    def __str__(self) -> str:
        if self.profile is None:
            return "all stacks and devices"
        formats = None if self.fp8 is None else "fp8" if self.fp8 else "16 bits"
        layers = None if self.experts is None else "experts" if self.experts else "dense layers"
        return ", ".join(filter(None, (self.profile, self.cluster or "any device", formats, layers)))


@dataclass(frozen=True)
class Interval:
    """`SHARE` of the settings measured between `low` and `high` times what was predicted. `kind` is theirs."""

    low: float
    high: float
    num_settings: int
    kind: RunKind

    def report(self, step_s: float) -> dict[str, Any]:
        """The JSON form, in seconds, for a prediction."""
        return {
            "low": self.low * step_s,
            "high": self.high * step_s,
            "share": SHARE,
            "settings": self.num_settings,
            "of": str(self.kind),
        }


def kind_of(plan: AnyPlan) -> RunKind:
    """The kind of a plan's run. A cluster whose numbers a plan changes is of its own kind by name alone."""
    experts = any(part.model.is_moe for part in plan.parts)
    return RunKind(plan.runtime.profile, plan.cluster.name, plan.precision.dtype == "fp8", experts)


def interval_of(plan: AnyPlan) -> Interval:
    """The interval of the nearest kind that enough settings were measured of."""
    from .validated import RATIOS  # read when it is asked for

    own = kind_of(plan)
    for kind in own.wider():
        ratios = sorted(ratio for each, found in RATIOS for ratio in found if kind.holds(RunKind(*each)))
        if len(ratios) >= LEAST_SETTINGS:
            return Interval(_quantile(ratios, (1 - SHARE) / 2), _quantile(ratios, (1 + SHARE) / 2), len(ratios), kind)
    raise AssertionError("the table of ratios has rows of all kinds")


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of ordered numbers lies, between two of them by their distance."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
