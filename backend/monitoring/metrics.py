"""The metrics of a run: what is said of each step, and the file that has it, one JSON object a line.

A step stands once, also after a run was killed and resumed: what a run that goes on finds of steps it is about to do
again, and a line that was torn in the middle, are taken out before the first step.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.base.errors import FileError, PlanError
from ...core.base.files import read_lines, write_text
from ...core.base.metrics import row_in
from ...core.base.terminal import say
from ...core.base.urls import is_url
from ...core.plan.plan import AnyPlan
from ..base.step_result import StepResult
from .prediction import Prediction

IN_CHECKPOINTS = "metrics.jsonl"
ELSEWHERE = "train-metrics.jsonl"
"""Names of the file in the folder of checkpoints, and in the current folder where there is none."""

Row = Mapping[str, Any]
"""What is said of a step, as JSON has it."""


def metrics_file(plan: AnyPlan, otherwise: str | None = None) -> str | None:
    """The file of a run's metrics: `log.file`, else one next to the checkpoints where they lie on a disk, else
    `otherwise`."""
    if plan.log.file is not None:
        return plan.log.file
    folder = plan.checkpoint.folder
    return otherwise if folder is None or is_url(folder) else str(Path(folder) / IN_CHECKPOINTS)


def check_metrics_file(plan: AnyPlan) -> None:
    """Raises `PlanError` where `log.file` cannot be the file of metrics: its folder is missing or cannot be written to,
    or it holds something else, which a run would write over."""
    if plan.log.file is None:
        return
    path = Path(plan.log.file)
    if not path.parent.is_dir():
        raise PlanError(f"log.file={plan.log.file!r} lies in a folder that is not there. Make it, or give another.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlanError(f"log.file={plan.log.file!r} cannot be written: it is read-only, or its folder. Give another.")
    if path.exists() and not _holds_metrics(path):
        raise PlanError(f"log.file={plan.log.file!r} holds something else than metrics. Give another file.")


def _holds_metrics(path: Path) -> bool:
    """True for a file without a line, or whose first line is of a step."""
    try:
        first = next(iter(read_lines(path)), None)
    except (FileError, OSError):
        return False
    return first is None or row_in(first) is not None or not first.endswith("\n")


def row_of(
    result: StepResult, prediction: Prediction | None, memory_bytes: int | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """What is said of a step. `step` is how many steps are done after it; null is what is not known or not finite.

    `predicted_step_time_s` is that of a step with the plan's own number of microbatches. `tokens`, `step_time_s` and
    `tokens_per_s` are of this step alone; `memory_bytes` is what rank 0 holds. Keys that say nothing are left out,
    but for those that every row has.
    """
    comparable = prediction is not None and prediction.num_tokens == result.num_tokens
    said = {
        "step": result.step + 1,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "num_microbatches": result.num_microbatches,
        "tokens": result.num_tokens,
        "step_time_s": result.elapsed_s,
        "predicted_step_time_s": prediction.step_time_s if prediction is not None and comparable else None,
        "tokens_per_s": result.num_tokens / result.elapsed_s,
        "mfu": None if prediction is None else prediction.mfu_of(result.num_tokens, result.elapsed_s),
        **({"memory_bytes": memory_bytes} if memory_bytes is not None else {}),
        **({"validation_loss": result.validation_loss} if result.validation_loss is not None else {}),
        **({"aux_loss": result.aux_loss} if result.aux_loss else {}),
        **({"mtp_loss": result.mtp_loss} if result.mtp_loss else {}),
        **({"loss_scale": result.loss_scale} if result.loss_scale != 1.0 else {}),
        **({"skipped": True} if result.skipped else {}),
        **more,
    }
    return {key: _finite(value) for key, value in said.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """The file of a run's metrics, written a line a step by rank 0. `first` is how many steps are done: the file keeps
    what it has of those, each once, and nothing else. A disk that fails ends the file, not the run."""

    def __init__(self, path: str, first: int):
        self.path = path
        self._handle: int | None = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            _mend(Path(path), first)
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, FileError) as error:
            self._given_up(error)

    def add(self, result: StepResult, row: Row) -> None:
        """One line, which is in the file when this returns."""
        if self._handle is None:
            return
        try:
            os.write(self._handle, (json.dumps(row) + "\n").encode())
        except OSError as error:
            self._given_up(error)

    def close(self) -> None:
        """Nothing is added any more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _given_up(self, error: Exception) -> None:
        self.close()
        say(f"warning: no metrics in {self.path}: {getattr(error, 'strerror', None) or error}", sys.stderr)


def _mend(path: Path, first: int) -> None:
    """Leaves in a file the rows of the first steps, each once, in order."""
    if not path.exists():
        return
    lines = list(read_lines(path)) if first else []
    rows = {row["step"]: row for row in map(row_in, lines) if row is not None and row["step"] <= first}
    stored = "".join(json.dumps(rows[step]) + "\n" for step in sorted(rows))
    if stored != "".join(lines) or not first:
        write_text(path, stored)
