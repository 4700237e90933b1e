"""`Lines`: the progress of a run as lines of text."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from ...core.base.terminal import say
from ..base.step_result import StepResult
from .metrics import Row


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
        if (sample := row.get("sample")) is not None:
            say(sample_line(sample["prompt"], sample["text"]), self._stream, flush=True)

    def close(self) -> None:
        """Lines stay."""


def sample_line(prompt: str, text: str) -> str:
    """A text from the model behind what it goes on with, on one line."""
    return f"sample: {json.dumps(prompt, ensure_ascii=False)} goes on {json.dumps(text, ensure_ascii=False)}"


def step_line(num_steps: int, result: StepResult) -> str:
    """`step 2/20  loss 5.4321  grad norm 1.234  5,678 tokens/s`, and what there is besides."""
    validation = "" if result.validation_loss is None else f"  validation loss {result.validation_loss:.4f}"
    aux = f"  aux loss {result.aux_loss:.4f}" if result.aux_loss else ""
    skipped = f"  skipped: losses times {result.loss_scale:g} overflow" if result.skipped else ""
    return (
        f"step {result.step + 1}/{num_steps}  loss {result.loss:.4f}{aux}  grad norm {result.grad_norm:.3f}  "
        f"{result.num_tokens / result.elapsed_s:,.0f} tokens/s{validation}{skipped}"
    )
