"""Plan files: TOML text to values that know their line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import PlanError, Problem
from ..base.findings import NOWHERE, Location
from ..base.parsing import parse_toml


@dataclasses.dataclass(frozen=True)
class Given:
    """A value with where it was given in words (`plan.toml:12`, `--tp`), its line of a file, and the folder that its
    relative paths start from."""

    value: Any
    origin: str
    place: Location = NOWHERE
    folder: Path | None = None

    @property
    def line(self) -> int:
        """The line in its file; 0 for an option, and what is derived."""
        return self.place.line or 0


Values = dict[str, dict[str, Given]]
"""Section -> key -> value as given, not yet checked. What a module says of its own is under sections of its
own (`module_section`)."""

MODULES = "modules"
"""The name of [[modules]]."""


MOST_KEYS = 1000
"""Sections, keys in them and modules of a file together: there are some 200 keys. What is wrong with
each takes time to say."""


def module_section(number: int, section: str = "") -> str:
    """The section of `Values` that holds a section of a module, or its own keys: `modules.0.layout`, `modules.0`."""
    return f"{MODULES}.{number}.{section}" if section else f"{MODULES}.{number}"


def num_modules(values: Values) -> int:
    """How many [[modules]] there are."""
    return sum(section.count(".") == 1 for section in values if section.startswith(f"{MODULES}."))


def read_values(text: str, source: str) -> Values:
    """The sections of a plan file. Raises `PlanError` with the line for text that is no TOML or has
    keys outside sections."""
    tables = parse_toml(text, source)
    if (count := sum(1 + len(table) if isinstance(table, dict | list) else 1 for table in tables.values())) > MOST_KEYS:
        raise PlanError(
            f"{source}: this file has {count:,} sections, keys and modules, and a plan has at most "
            f"{MOST_KEYS:,}. Give a plan."
        )
    lines = dict(statement_lines(text))
    folder = Path(source).parent
    values: Values = {}
    for section, table in tables.items():
        line = lines.get((section,), 1)
        if section == MODULES and isinstance(table, list) and all(isinstance(module, Mapping) for module in table):
            values |= _module_values(table, text, source)
            continue
        if not isinstance(table, Mapping):
            what = "a list of sections" if isinstance(table, list) else "a key outside every section"
            sentence = f"{section!r} is {what}. Write [section] once above its keys, such as [layout] above tp."
            raise PlanError([Problem(sentence, place=Location(source, line), origin=f"{source}:{line}")])
        values[section] = {}
        for key, value in table.items():
            line = lines.get((section, key), lines.get((section,), 1))
            values[section][key] = Given(value, f"{source}:{line}", Location(source, line), folder)
    return values


def _module_values(tables: list[Mapping[str, Any]], text: str, source: str) -> Values:
    """The sections of every module, with the lines of the module's own statements."""
    lines: dict[tuple[Any, ...], int] = {}
    number = -1
    for path, line in statement_lines(text):
        if path == (MODULES,):
            number += 1
        if path[0] == MODULES:
            lines[(number, *path[1:])] = line
    values: Values = {}

    def given(value: Any, *path: Any) -> Given:
        line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)
        return Given(value, f"{source}:{line}", Location(source, line), Path(source).parent)

    for number, table in enumerate(tables):
        own = values[module_section(number)] = {}
        for key, value in table.items():
            if isinstance(value, Mapping):
                values[module_section(number, key)] = {
                    name: given(each, number, key, name) for name, each in value.items()
                }
            else:
                own[key] = given(value, number, key)
    return values


_WITHOUT_MEANING = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'{3}.*?\'{3}(?:\'{0,2})|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|\#[^\n]*''', re.DOTALL
)
"""The strings and comments of a TOML text, in which brackets have no meaning (toml.io, v1.0.0,
"String" and "Comment")."""


def statement_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path of every table and key of a valid TOML text, with the line on which its statement starts.

    A statement ends with the first line at whose end no bracket is open, outside strings.
    """
    lines = text.split("\n")
    # what is taken out leaves its newlines, between brackets of their own
    bare = _WITHOUT_MEANING.sub(lambda found: "[" + "\n" * found[0].count("\n") + "]", text).split("\n")
    prefix: tuple[str, ...] = ()
    start = depth = 0
    for end, line in enumerate(bare, start=1):
        depth += line.count("[") + line.count("{") - line.count("]") - line.count("}")
        if depth > 0:
            continue
        statement = "\n".join(lines[start:end])
        parsed = tomllib.loads(statement)
        if parsed and statement.lstrip().startswith("["):
            prefix = _innermost(parsed)
            yield prefix, start + 1
        else:
            for path in _paths(parsed):
                yield prefix + path, start + 1
        start = end


def _innermost(table: Any) -> tuple[str, ...]:
    path: tuple[str, ...] = ()
    while table:
        if isinstance(table, list):
            table = table[0]
            continue
        ((name, table),) = table.items()
        path += (name,)
    return path


def _paths(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        yield (name,)
        if isinstance(value, Mapping):
            for path in _paths(value):
                yield (name, *path)
