"""Where a finding belongs in the files that the user wrote: the line of the plan's key that it is about, or
the row of a schedule."""

from __future__ import annotations

from pathlib import Path

from ...core.base.findings import NOWHERE, Finding, Location
from ...core.commands.github import line_about
from ...core.imports.given import UNASKED, Reading, places_of
from .rules.rule import SCHEDULE_KEY


def location_of(finding: Finding, source: str | None, reading: Reading = UNASKED) -> Location:
    """The place of a finding about the plan or the schedule CSV in the file `source`, which was read as `reading` says;
    without a file, none.

    Raises `OSError` and `PlanError` for a file that cannot be read.
    """
    if source is None or Path(source).is_dir():
        return NOWHERE
    if source.lower().endswith(".csv"):
        return _row_of(finding, source)
    values = places_of(source, reading)
    written = values.get("schedule", {}).get("file")
    is_about_a_row = finding.key == SCHEDULE_KEY and finding.axis is None  # else about copies of a stage
    if is_about_a_row and written is not None:
        return _row_of(finding, str((written.folder or Path()) / str(written.value)))
    return Location(source, line_about(values, finding.key))


def _row_of(finding: Finding, source: str) -> Location:
    """The line of a schedule CSV: it has one for each pipeline rank."""
    return Location(source, None if finding.rank is None else finding.rank + 1)
