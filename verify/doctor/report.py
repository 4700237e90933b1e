"""`Report`: what the doctor found, as text and as the file that a user sends back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...core.base.errors import FileError
from ...core.base.files import read_text
from ...core.base.terminal import table
from .checks import Result, result_from

VERSION = 1
MOST_BYTES = 1 << 20
MOST_ENTRIES = 1000
OF_KERNELS = ("kernels", "gpu-kernels")
"""Checks whose tables say of kernels on which floors they hold."""


@dataclass(frozen=True)
class Report:
    """Results by check, on which machine and with which versions."""

    device: str
    versions: Mapping[str, str]
    results: Mapping[str, Result]
    asked_for_gpus: bool = False

    @property
    def ok(self) -> bool:
        """No check has failed, and where GPUs were asked for one was checked."""
        states = [result.status for result in self.results.values()]
        return "failed" not in states and (not self.asked_for_gpus or self.has_gpu)

    @property
    def has_gpu(self) -> bool:
        """Whether a check of GPUs has run."""
        return any(name.startswith("gpu-") and each.status != "skipped" for name, each in self.results.items())

    @property
    def kernels(self) -> dict[str, dict[str, str]]:
        """Kernel -> floor -> what holds, from the tables of the checks of kernels, on CPUs and on GPUs."""
        found: dict[str, dict[str, str]] = {}
        tables = [each for check in OF_KERNELS if check in self.results for each in self.results[check].tables]
        for kernel, floor, what in (row for each in tables for row in each.rows):
            found.setdefault(str(kernel), {})[str(floor)] = str(what)
        return found

    def to_json(self) -> dict[str, Any]:
        """The keys of `doctor --json`."""
        return {
            "doctor": VERSION,
            "ok": self.ok,
            "gpus": self.asked_for_gpus,
            "device": self.device,
            "versions": dict(self.versions),
            "checks": [{"name": name, **asdict(result)} for name, result in self.results.items()],
            "kernels": self.kernels,
        }

    def text(self, width: int | None = None) -> str:
        """The report for people."""
        lines = [self.device, ", ".join(f"{name} {version}" for name, version in self.versions.items()), ""]
        lines += table([(name, *cells(result)) for name, result in self.results.items()], width, indent=0)
        for each in (one for result in self.results.values() for one in result.tables):
            rows = [
                each.columns,
                *(tuple(f"{cell:,}" if isinstance(cell, float | int) else cell for cell in row) for row in each.rows),
            ]
            lines += ["", f"{each.title}:", *table(rows, width)]
        states = [result.status for result in self.results.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "failed", "skipped") if state in states)
        return "\n".join([*lines, "", f"{counts}." if states else "no check was asked for."])


def cells(result: Result) -> tuple[str, str, str]:
    """Status, figure and reason of a result."""
    figure = "" if result.value is None else f"{result.value:g} {result.unit}"
    return result.status, figure, result.why


def read_report(path: str) -> Report:
    """A report that somebody sent. Raises `FileError` for anything else than what `to_json` makes."""
    try:
        value = json.loads(read_text(path, most_bytes=MOST_BYTES), parse_constant=_no_number)
        return _parsed(value)
    except RecursionError as error:
        raise FileError(f"{path}: this is no report of the doctor: nested too deeply.") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, FileError):
            raise
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise FileError(
            f"{path}: this is no report of the doctor: {what}. Write one with `shardproof doctor -o report.json`."
        ) from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _parsed(value: Any) -> Report:
    """Raises `ValueError`, `KeyError` or `TypeError` with what is wrong."""
    _keys(value, {"doctor", "ok", "gpus", "device", "versions", "checks", "kernels"}, "the file")
    if value["doctor"] != VERSION:
        raise ValueError(f"it has version {value['doctor']!r:.20}, and this shardproof reads {VERSION}")
    results = {}
    for check in _list(value["checks"]):
        _keys(check, {"name", "status", "why", "value", "unit", "tables"}, "a check")
        if check["status"] not in ("ok", "failed", "skipped"):
            raise ValueError(f"{check['status']!r:.40} is no status")
        for each in _list(check["tables"]):
            _keys(each, {"title", "columns", "rows"}, "a table")
            _text(each["title"])
            if check["name"] == "kernels" and len(_list(each["columns"])) != 3:
                raise ValueError("the table of kernels has three columns")
            width = len([_text(column) for column in _list(each["columns"])])
            for row in _list(each["rows"]):
                if len(_list(row)) != width or not all(isinstance(cell, str) or _is_number(cell) for cell in row):
                    raise ValueError(f"a row of {each['title']!r:.40} does not fit its columns")
        if check["value"] is not None and not _is_number(check["value"]):
            raise ValueError(f"{check['value']!r:.40} is no number")
        for key in ("name", "why", "unit"):
            _text(check[key])
        if check["name"] in results:
            raise ValueError(f"{check['name']!r:.40} is there twice")
        results[check["name"]] = result_from(check)
    if not isinstance(value["gpus"], bool):
        raise ValueError("gpus is neither true nor false")
    report = Report(_text(value["device"]), _texts(value["versions"]), results, value["gpus"])
    if value["kernels"] != report.kernels:
        raise ValueError("kernels are not those of the check of kernels")
    if value["ok"] is not report.ok:
        raise ValueError(f"its checks say ok is {str(report.ok).lower()}")
    return report


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MOST_ENTRIES:
        raise ValueError(f"{value!r:.40} is no object of at most {MOST_ENTRIES} keys")
    return value


def _keys(value: Any, known: set[str], where: str) -> None:
    if unknown := set(_object(value)) - known:
        raise ValueError(f"{where} has an unknown key {min(unknown)!r:.40}")
    if missing := known - set(value):
        raise KeyError(min(missing))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_ENTRIES:
        raise ValueError(f"{value!r:.40} is no list of at most {MOST_ENTRIES}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _texts(value: Any) -> dict[str, str]:
    return {name: _text(text) for name, text in _object(value).items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
