"""The metrics of a run as a file has them: one JSON object a line, each of one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import FileError
from .files import read_lines


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of metrics by step, the last of each; a torn last line is left out. Raises `FileError` for a
    file with any other line that is no row, and for one without rows; `OSError` where it cannot be opened."""
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(read_lines(path), 1):
        row = row_in(line)
        if row is not None:
            rows[row["step"]] = row
        elif line.endswith("\n") and line.strip():
            raise FileError(f"{path}:{number}: this is no metrics of a step, a JSON object with `step`. Give another.")
    if not rows:
        raise FileError(f"{path}: there is no step in it. Give a file of metrics; `train` says where it writes one.")
    return [rows[step] for step in sorted(rows)]


def row_in(line: str) -> dict[str, Any] | None:
    """The row that a line says; None for a line that says none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    return row if is_row else None
