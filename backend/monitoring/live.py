"""`Live`: a run's progress on a terminal, rewritten in place."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from ...core.base.names import printable
from ...core.base.units import format_bytes, format_s
from ..base.step_result import StepResult
from .lines import more_lines, step_line
from .metrics import Row

if TYPE_CHECKING:
    from rich.table import Table

SMOOTHING = 0.9
"""Share of the mean seconds of a step that stays with each new one; what is left to do is counted by that mean."""


class Live:
    """A table of the last step: loss, gradient norm, rate, tokens/s, MFU, seconds next to those that were predicted,
    memory, and when the run will be over. Lines with held-out losses and texts scroll above it, and the last step's."""

    def __init__(self, title: str, num_steps: int, stream: TextIO | None = None):
        from rich.console import Console  # a moment to load, and only terminals need it
        from rich.live import Live as Rewritten

        self._title, self._num_steps = title, num_steps
        self._console = Console(file=sys.stderr if stream is None else stream)
        self._shown = Rewritten(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._shown.start()
        self._mean_s: float | None = None
        self._last_s = time.perf_counter()

    def add(self, result: StepResult, row: Row) -> None:
        """Shows a step."""
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s  # with what comes between two steps
        if self._mean_s is None or result.elapsed_s > took_s:
            self._mean_s = result.elapsed_s
        else:
            self._mean_s = SMOOTHING * self._mean_s + (1 - SMOOTHING) * took_s
        left = self._num_steps - row["step"]
        if result.validation_loss is not None or left == 0:
            self._above(step_line(self._num_steps, result))
        for line in more_lines({**row, "timers": None}):
            self._above(line)
        self._shown.update(_table(self._title, self._num_steps, row, left * self._mean_s), refresh=True)

    def close(self) -> None:
        """The table stays as it is, and the cursor comes back."""
        self._shown.stop()

    def _above(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False)


def _table(title: str, num_steps: int, row: Row, left_s: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = Text(printable(title), style="bold"), "left"
    for name, value in cells_of(row, num_steps, left_s):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def cells_of(row: Row, num_steps: int, left_s: float) -> list[tuple[str, str]]:
    """What the display says of a step: names and values."""

    def number(key: str, form: str) -> str:
        return "not finite" if row[key] is None else format(row[key], form)

    measured, expected = format_s(row["step_time_s"]), row["predicted_step_time_s"]
    modelled = "" if expected is None else f", predicted {format_s(expected)}"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return [
        ("step", f"{row['step']:,} of {num_steps:,}, {left(left_s)} left"),
        ("loss", f"{number('loss', '.4f')}, gradient norm {number('grad_norm', '.3f')}"),
        ("learning rate", f"{row['learning_rate']:.3g}, {row['num_microbatches']} microbatches"),
        ("speed", f"{row['tokens_per_s']:,.0f} tokens/s{mfu}"),
        ("step time", f"{measured}{modelled}"),
        *([("memory", f"{format_bytes(row['memory_bytes'])} on rank 0")] if "memory_bytes" in row else []),
    ]


def left(seconds: float) -> str:
    """A time to wait.

    >>> left(5.4), left(125), left(90_061)
    ('5 s', '2 min 5 s', '25 h 1 min')
    """
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
