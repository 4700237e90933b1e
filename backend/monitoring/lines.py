"""`Lines`: the progress of a run as lines of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TextIO

from ...core.base.terminal import say
from ..base.step_result import StepResult
from .metrics import Row
from .stragglers import straggler_line


class Lines:
    """One line every so many steps, for the last one, and wherever a held-out loss was taken."""

    def __init__(self, num_steps: int, every: int, stream: TextIO | None = None):
        self._num_steps, self._every = num_steps, every
        self._stream = sys.stderr if stream is None else stream

    def add(self, result: StepResult, row: Row) -> None:
        """A line, if it is time for one."""
        done = result.step + 1
        if done % self._every == 0 or done == self._num_steps or result.validation_loss is not None:
            say(step_line(self._num_steps, result), self._stream, flush=True)
        for line in more_lines(row):
            say(line, self._stream, flush=True)

    def close(self) -> None:
        """Lines stay."""


def more_lines(row: Row) -> Iterator[str]:
    """What is said of a step besides its line: timers, who is slow, and text from the model."""
    if timers := row.get("timers"):
        yield "timers, least/middle/most over ranks: " + ", ".join(
            f"{name} {'/'.join(f'{seconds * 1e3:.3g}' for seconds in over_ranks)} ms"
            for name, over_ranks in timers.items()
        )
    if straggler := row.get("straggler"):
        yield straggler_line(straggler)
    if sample := row.get("sample"):
        prompt, text = (json.dumps(sample[part], ensure_ascii=False) for part in ("prompt", "text"))
        yield f"sample: {prompt} goes on {text}"


def step_line(num_steps: int, result: StepResult) -> str:
    """`step 2/20  loss 5.4321  grad norm 1.234  5,678 tokens/s`, and what there is besides."""
    validation = "" if result.validation_loss is None else f"  validation loss {result.validation_loss:.4f}"
    aux = f"  aux loss {result.aux_loss:.4f}" if result.aux_loss else ""
    skipped = f"  skipped: losses times {result.loss_scale:g} overflow" if result.skipped else ""
    return (
        f"step {result.step + 1}/{num_steps}  loss {result.loss:.4f}{aux}  grad norm {result.grad_norm:.3f}  "
        f"{result.num_tokens / result.elapsed_s:,.0f} tokens/s{validation}{skipped}"
    )
