"""`Shown`: what is to be seen of a run, as its ranks get it. Whoever starts ranks needs no torch for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .prediction import Prediction

Display = Literal["none", "lines", "live"]
"""What is said of the steps on standard error: nothing, lines, or a display that rewrites itself."""


@dataclass(frozen=True)
class Shown:
    """Where a run's metrics go (None: nowhere), on what display, and the step that is expected
    (`prediction.predicted`), and what is said of what is experimental. It can be pickled."""

    metrics: str | None = None
    display: Display = "none"
    prediction: Prediction | None = None
    experimental: tuple[str, ...] = ()
