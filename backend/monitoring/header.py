"""What a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.base.units import format_s
from .shown import Shown


def header_lines(shown: Shown, no_energy: str | None) -> Iterator[str]:
    """Where its metrics go, the step that is expected, and why no energy is measured: None where it is, or need not."""
    if shown.metrics is not None:
        yield f"metrics: {shown.metrics}"
    if (prediction := shown.prediction) is not None:
        yield f"predicted step: {format_s(prediction.step_time_s)} on {prediction.cluster}"
    yield from shown.experimental
    if no_energy:
        yield f"energy: not measured, since {no_energy}"
