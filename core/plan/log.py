"""`Log`: what a training run writes down about its steps, and where."""

from __future__ import annotations

from ..base.option import Bounded, noun, option


@noun()
class Log(Bounded, section="log"):
    """What `train` shows and writes of a run's steps (`backend.seeing`). None of it changes a bit of the result."""

    every: int = option(
        "steps between two lines of progress",
        default=1,
        minimum=1,
        more="A terminal has a live display instead. The file of metrics has every step.",
        read_by="backend.seeing.run_log",
    )
    file: str | None = option(
        "the file of metrics, one JSON object a step",
        default=None,
        kind="path",
        default_note="metrics.jsonl in checkpoint.folder, else train-metrics.jsonl where `train` is started",
        more="A run that is resumed goes on with it; one from the start begins it anew.",
        read_by="backend.seeing.metrics",
    )
