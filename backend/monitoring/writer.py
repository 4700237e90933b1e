"""`Writer`: whoever takes down the steps of a run, one after another."""

from __future__ import annotations

from typing import Protocol

from ..base.step_result import StepResult
from .metrics import Row


class Writer(Protocol):
    """Rank 0 has some of these: the file of metrics, the terminal, and those that the plan asks for."""

    def add(self, result: StepResult, row: Row) -> None:
        """A step is done. `row` is what is said of it (`metrics.row_of`)."""

    def close(self) -> None:
        """The run is over, or has failed."""
