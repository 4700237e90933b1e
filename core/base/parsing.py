"""JSON and TOML from outside as values: within limits, so that no text makes the reader run out of
stack, memory or time."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from typing import Any, NoReturn

from .errors import FileError, Problem
from .findings import Location

MOST_NESTED = 64
"""Lists and tables inside each other. Plans nest 4, a `config.json` 5."""

MOST_VALUES = 12_000_000
"""Values of one JSON text: a timeline of two million spans has 10 million. Each takes 64 bytes at most as an
empty list, 0.8 GB in all."""

_LONG_PATH = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MOST_NESTED}}}")
"""Names joined by dots, for which `tomllib` needs the square of their number."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half a character."""


def parse_json(text: str, source: str) -> Any:
    """The value of a JSON text. Raises `FileError`, which begins with `source`, for a text that is none, nests deeper
    than `MOST_NESTED`, or holds more than `MOST_VALUES`; NaN and infinity are no JSON (RFC 8259, section 6)."""
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise FileError(f"{source}: this JSON holds more than {MOST_VALUES:,} values. Give a smaller file.")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as error:  # also an integer of more digits than Python reads
        raise FileError(f"{source}: this is not JSON: {_reason(error)}.") from None
    if text.count("[") + text.count("{") > MOST_NESTED:
        _check_depth(value, source)
    if _HALF.search(text):
        _check_whole_characters(value, source)
    return value


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises `FileError`, which begins with `source` and the line, for a text that is none
    or nests deeper than `MOST_NESTED`."""
    if _LONG_PATH.search(text):
        raise _too_deep(source)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as error:
        place = re.search(r"line (\d+)", str(error)) if isinstance(error, tomllib.TOMLDecodeError) else None
        location = Location(source, int(place[1]) if place else text.count("\n") + 1)
        problem = Problem(f"this is not TOML: {_reason(error)}.", place=location, origin=f"{source}:{location.line}")
        raise FileError([problem]) from None
    _check_depth(tables, source)
    return tables


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _reason(error: ValueError) -> str:
    if "integer string conversion" in str(error):
        return "an integer has more than 4,300 digits"
    return str(error).rstrip(".")


def _too_deep(source: str) -> FileError:
    return FileError(
        f"{source}: lists or tables are nested deeper than {MOST_NESTED}, which no such file is. Look "
        "for a mistyped bracket."
    )


def _check_depth(value: Any, source: str) -> None:
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for outer in level for inner in _held(outer)]
        if not level:
            return
    raise _too_deep(source)


def _held(value: Any) -> Iterable[Any]:
    """The lists and tables directly in one."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def _check_whole_characters(value: Any, source: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise FileError(
            f"{source}: a text has an escape \\ud800 to \\udfff without its other half, so it is no text."
        ) from None
