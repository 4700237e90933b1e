"""Loss curves of one run or several, without pixels: points by step, smoothed, and what is said of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.base.errors import FileError
from ..core.base.metrics import read_metrics
from .scene.axis import Tick, ticks_between

SMOOTHED_FROM = 40
"""Steps from which on a run has a smoothed curve; its window is a fortieth of them."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One run: training losses by step, and held-out ones, each `[points, 2]` of (step, loss)."""

    name: str
    losses: np.ndarray
    validations: np.ndarray
    num_tokens: int
    mean_step_s: float

    @property
    def smoothed(self) -> np.ndarray:
        """Means over windows with each step in their middle, shorter towards both ends, so that the curve neither lags
        nor leads; steps whose windows would be less than half as long have none. Of a short run its losses."""
        window = len(self.losses) // SMOOTHED_FROM
        if window < 2:
            return self.losses
        sums = np.cumsum(np.concatenate([[0.0], self.losses[:, 1]]))
        at = np.arange(window // 4, len(self.losses) - window // 4)
        half = np.minimum(np.minimum(at, len(self.losses) - 1 - at), window // 2)
        begins, ends = at - half, at + half + 1
        return np.stack([self.losses[at, 0], (sums[ends] - sums[begins]) / (ends - begins)], 1)

    def report(self) -> dict[str, Any]:
        """The JSON form: of losses the first, the least and the last."""
        own, held = self.losses[:, 1].tolist(), self.validations[:, 1].tolist()
        return {
            "name": self.name,
            "steps": int(self.losses[-1, 0]),
            "tokens": self.num_tokens,
            "mean_step_time_s": self.mean_step_s,
            "first_loss": own[0],
            "least_loss": min(own),
            "last_loss": own[-1],
            "last_validation_loss": held[-1] if held else None,
        }

    @property
    def caption(self) -> str:
        """`run: 2,000 steps, loss 1.2345, held-out 1.3456`."""
        held = f", held-out {self.validations[-1, 1]:.4f}" if len(self.validations) else ""
        return f"{self.name}: {int(self.losses[-1, 0]):,} steps, loss {self.losses[-1, 1]:.4f}{held}"


@dataclass(frozen=True)
class CurvesScene:
    """Curves over steps from 0 to `last_step` and losses from `low` to `high`, with the ticks of both."""

    title: str
    curves: tuple[Curve, ...]
    last_step: float
    low: float
    high: float
    steps: tuple[Tick, ...]
    losses: tuple[Tick, ...]


def read_curve(path: str, name: str) -> Curve:
    """The curve of a file of metrics. Raises `FileError` for one that is none, or without a finite loss."""
    rows = read_metrics(path)
    losses = [(row["step"], row["loss"]) for row in rows if _is_number(row.get("loss"))]
    if not losses:
        raise FileError(f"{path}: no step in it has a loss. Give the metrics of a run that trained.")
    held = [(0, row["validation_loss_before"]) for row in rows if _is_number(row.get("validation_loss_before"))]
    held += [(row["step"], row["validation_loss"]) for row in rows if _is_number(row.get("validation_loss"))]
    seconds = [row["step_time_s"] for row in rows if _is_number(row.get("step_time_s"))]
    tokens = sum(row["tokens"] for row in rows if _is_number(row.get("tokens")))
    mean_s = sum(seconds) / len(seconds) if seconds else math.nan
    return Curve(name, _points(losses), _points(held), int(tokens), mean_s)


def _points(pairs: Sequence[tuple[float, float]]) -> np.ndarray:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def names_of(paths: Sequence[str]) -> list[str]:
    """What runs are called: their files, or where those share a name, their folders.

    >>> names_of(["run.jsonl", "a/other.jsonl"]), names_of(["a/metrics.jsonl", "b/metrics.jsonl"])
    (['run', 'other'], ['a', 'b'])
    """
    stems, folders = [Path(path).stem for path in paths], [Path(path).parent.name for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    return folders if len(set(folders)) == len(folders) and all(folders) else list(paths)


def curves_scene(curves: Sequence[Curve], *, num_steps: int = 8, num_losses: int = 6) -> CurvesScene:
    """All curves over common axes, with about so many ticks. The axis of losses does not begin at zero."""
    points = np.concatenate([part for curve in curves for part in (curve.losses, curve.validations)])
    low, high, last = float(points[:, 1].min()), float(points[:, 1].max()), max(float(points[:, 0].max()), 1.0)
    if high - low < 1e-9 * max(abs(high), 1.0):
        low, high = low - 0.5, high + 0.5
    ticks, step = ticks_between(low, high, num_losses)
    low, high = min(low, ticks[0].value), max(high, ticks[-1].value)
    margin = 0.03 * (high - low) if step else 0.0
    at, _ = ticks_between(0.0, last, num_steps)
    whole = tuple(tick for tick in at if tick.value == int(tick.value))
    return CurvesScene("Training loss", tuple(curves), last, low - margin, high + margin, whole, tuple(ticks))
