"""Where a finding belongs in the files that the user wrote: the line of the plan's key that it is about, or
the row of a schedule."""

from __future__ import annotations

import re
from pathlib import Path

from ...core.base.files import read_text
from ...core.base.findings import NOWHERE, Finding, Location
from ...core.commands.github import CAPACITY_KEYS, line_of
from ...core.plan.toml import read_values
from .rules import COLLECTIVE_RULES, LAYER_RULES, MEMORY_RULES, RULES

DEGREES = ("layout.tp", "layout.cp", "layout.pp", "layout.dp", "layout.ep", "layout.etp")

_ABOUT_NO_SCHEDULE = {
    **{rule.name: DEGREES for rule in COLLECTIVE_RULES},
    **{rule.name: ("layout.stages", "layout.pp") for rule in LAYER_RULES},
    **{rule.name: CAPACITY_KEYS for rule in MEMORY_RULES if rule.needs is not None},
    "out-of-memory": CAPACITY_KEYS,
    "bound-left": ("numerics.mode", "precision.dtype"),
    "common-factor": ("numerics.mode", "precision.dtype"),
}
"""Rule -> the keys of a plan that it is about, the nearest first, where these are not the schedule."""

_AXIS_WORDS = {
    "tensor-parallel": "layout.tp",
    "sequence-parallel": "layout.sequence_parallel",
    "context-parallel": "layout.cp",
    "data-parallel": "layout.dp",
    "expert-parallel": "layout.ep",
    "cross-replica": "schedule.name",
    "assumption": "numerics.mode",
}
"""What the words of a finding name -> the key that it is about."""


def location_of(finding: Finding, source: str | None) -> Location:
    """The place of a finding about the plan or the schedule CSV in the file `source`; without a file, none.

    Raises `OSError` and `PlanError` for a file that cannot be read.
    """
    if source is None or Path(source).is_dir():
        return NOWHERE
    if source.lower().endswith(".csv"):
        return _row_of(finding, source)
    values = read_values(read_text(source), source)
    keys = _keys_about(finding)
    if keys == _SCHEDULE and (written := values.get("schedule", {}).get("file")) is not None:
        return _row_of(finding, str((written.folder or Path()) / str(written.value)))
    return Location(source, line_of(values, keys))


_SCHEDULE = ("schedule.file", "schedule.name", "layout.pp")


def _keys_about(finding: Finding) -> tuple[str, ...]:
    if finding.rule in _ABOUT_NO_SCHEDULE:
        return _ABOUT_NO_SCHEDULE[finding.rule]
    if any(rule.name == finding.rule for rule in RULES):
        return _SCHEDULE
    words = f"{finding.what} {finding.hint}"
    return (*(key for word, key in _AXIS_WORDS.items() if word in words), *DEGREES)


def _row_of(finding: Finding, source: str) -> Location:
    """The line of a schedule CSV: it has one for each pipeline rank."""
    found = re.search(r"\brank (\d+)", finding.where)
    return Location(source, None if found is None else int(found.group(1)) + 1)
