"""The pytest plugin: proofs as fixtures, and, in GitHub Actions, what failed ones found as annotations.

Every pytest run of an environment loads this module: it loads nothing of the package before a test asks, and suites
that use no proof run as they would without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

from ..base.findings import Location, ProofFailed
from .commands import service
from .github import annotation

ANNOTATIONS = "shardproof_annotations"
"""The attribute of a report that holds its lines; pytest-xdist brings it from its workers."""


@pytest.fixture(scope="session")
def assert_bitwise() -> Callable[..., None]:
    """`assert_bitwise(plan)` fails unless the plan computes, to the last bit, what one device computes."""
    return service("assert_bitwise")


@pytest.fixture(scope="session")
def assert_schedule() -> Callable[..., None]:
    """`assert_schedule(schedule)` fails unless the schedule, or that of a plan, is right and cannot hang."""
    return service("assert_schedule")


@pytest.fixture(scope="session")
def assert_fits() -> Callable[..., None]:
    """`assert_fits(plan)` fails unless the plan fits the memory of its devices."""
    return service("assert_fits")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Gives the report of a test whose proof failed its annotations: at the plan's lines, or else at the test."""
    report = yield
    if call.excinfo is not None and isinstance(error := call.excinfo.value, ProofFailed):
        path, line, _ = item.reportinfo()
        test = Location(os.fspath(path), None if line is None else line + 1)
        lines = [
            annotation(finding, test if location.file is None else location) for finding, location in error.findings
        ]
        setattr(report, ANNOTATIONS, lines)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """In GitHub Actions prints the annotations of failed tests."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for report in terminalreporter.getreports("failed"):
            for line in getattr(report, ANNOTATIONS, ()):
                terminalreporter.write_line(line)
