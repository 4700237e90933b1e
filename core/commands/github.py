"""Findings and errors as annotations of GitHub Actions: lines that a workflow prints, and GitHub
shows at the file they name.

The form is that of the workflow commands (docs.github.com, "Workflow commands for GitHub Actions",
Setting an error message).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..base.errors import ShardproofError
from ..base.findings import DEGREES, NOWHERE, Finding, Location
from ..base.names import shortened
from ..imports.given import UNASKED, Reading, places_of
from ..plan.toml import Given, Values

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}
"""Severity of a finding -> the command that shows it."""

WORKSPACE = "GITHUB_WORKSPACE"
"""The variable with the folder of the checkout, from which the paths of annotations count."""


def annotation(finding: Finding, location: Location = NOWHERE) -> str:
    """One line for a finding: its rule is the title; place, text and hint are the message.

    >>> annotation(Finding("missing-step", "error", "rank 1", "there is no STEP.", "Add it."), Location("plan.toml", 3))
    '::error file=plan.toml,line=3,title=shardproof%3A missing-step::rank 1: there is no STEP.%0AAdd it.'
    """
    text = f"{finding.where}: {finding.what}" + (f"\n{finding.hint}" if finding.hint else "")
    return _command(LEVELS[finding.severity], f"shardproof: {finding.rule}", text, location)


def error_annotations(verb: str, error: ShardproofError) -> Iterator[str]:
    """One line for every problem of bad input, at its file and line."""
    return (_command("error", f"shardproof {verb}", problem, problem.place) for problem in error.problems)


_SAID_BY = {
    "cluster.device_memory_bytes": (
        *("cluster.device_memory_bytes", "cluster.headroom", "cluster.preset", "cluster.file"),
    ),
    "schedule.name": ("schedule.file", "schedule.name", "layout.pp"),
    "layout.stages": ("layout.stages", "layout.pp"),
    "numerics.mode": ("numerics.mode", "precision.dtype"),
}
"""Key -> the keys by which a plan may say the same, the nearest first."""


def location_of_key(source: str | None, key: str | None, reading: Reading = UNASKED) -> Location:
    """The place of a dotted key in a plan file, which has been read before as `reading` says; without a file, none."""
    return NOWHERE if source is None else Location(source, line_about(places_of(source, reading), key))


def line_about(values: Values, key: str | None) -> int | None:
    """The line where a plan says what a key does, or of a degree of parallelism for one of [layout] and where no key
    is known."""
    keys = _SAID_BY.get(key or "", () if key is None else (key,))
    of_layout = key is None or (key.startswith("layout.") and key not in _SAID_BY)
    return line_of(values, (*keys, *(f"layout.{axis}" for axis in DEGREES)) if of_layout else keys)


def line_of(values: Values, keys: Iterable[str]) -> int | None:
    """The line of the first of some keys that a plan gives, else of the first key in one of their sections;
    None where there is none."""
    sections = []
    for key in keys:
        section, _, name = key.partition(".")
        sections.append(section)
        if (given := values.get(section, {}).get(name)) is not None and _says_something(section, given):
            return given.line
    return next((given.line for section in sections for given in values.get(section, {}).values()), None)


def _says_something(section: str, given: Given) -> bool:
    return section != "layout" or given.value != 1  # a degree of 1 cuts nothing


def _command(level: str, title: str, text: str, location: Location) -> str:
    known: Mapping[str, str | None] = {
        "file": None if location.file is None else _in_checkout(location.file),
        "line": None if location.line is None else str(location.line),
        "title": title,
    }
    properties = ",".join(f"{name}={_escaped_property(value)}" for name, value in known.items() if value is not None)
    return f"::{level} {properties}::{_escaped(shortened(text))}"


def _in_checkout(file: str) -> str:
    """A path as GitHub takes it: from the root of the checkout, which is this folder where no variable names it."""
    root, path = (Path(os.path.realpath(each)) for each in (os.environ.get(WORKSPACE, ""), file))
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else file


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
