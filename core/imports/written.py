"""The settings of a file in a general form (TOML, JSON, YAML), each with its dotted name and its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.bounds import shown
from ..base.errors import FileError, MissingExtraError, Problem
from ..base.findings import Location
from ..base.parsing import MOST_NESTED, parse_json, parse_toml
from ..plan.toml import statement_lines

MOST_SETTINGS = 4000
"""Settings of one file; dumped configurations of Megatron-Bridge have some 600."""


@dataclass(frozen=True)
class Written:
    """One setting as the file has it: its dotted name (`training.seq_len`), its value, its line from 1."""

    flag: str
    value: Any
    line: int


@dataclass(frozen=True)
class NoLiteral:
    """A value of a program's text that is no literal: the text."""

    text: str

    def __str__(self) -> str:
        return self.text


def toml_settings(text: str, source: str) -> list[Written]:
    """The settings of a TOML text. Raises `FileError`."""
    tables = parse_toml(text, source)
    return list(settings_of(tables, dict(statement_lines(text)), source))


def json_settings(text: str, source: str) -> list[Written]:
    """The settings of a JSON object. Raises `FileError`."""
    return list(settings_of(_table(parse_json(text, source), source), dict(_json_lines(text)), source))


def yaml_settings(text: str, source: str) -> list[Written]:
    """The settings of a YAML mapping, which JSON is too. Raises `FileError`, and `MissingExtraError` without PyYAML."""
    tables, lines = parse_yaml(text, source)
    return list(settings_of(tables, lines, source))


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """The mapping of a YAML text, and the line of every path in it; only what `yaml.safe_load` makes. Raises
    `FileError` for a text that is none, or whose aliases unfold to more than `MOST_SETTINGS`."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError(
            f"{source}: reading YAML needs PyYAML, which is not installed. Run `pip install 'shardproof[import]'`."
        ) from None
    if _deepest(text) > MOST_NESTED:  # the parser takes seconds, and the stack
        raise FileError(
            f"{source}: brackets of this YAML are nested deeper than {MOST_NESTED}, which no such file does."
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        lines = dict(_yaml_lines(node, yaml.MappingNode))
        tables = None if node is None else loader.construct_document(node)
    except RecursionError:
        raise FileError(f"{source}: this YAML is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        said = str(getattr(error, "problem", None) or error).splitlines()[0]
        place = Location(source, line)
        raise FileError([Problem(f"this is not YAML: {said}.", place=place, origin=f"{source}:{line}")]) from None
    return _table(tables, source), lines


def _deepest(text: str) -> int:
    """The most brackets open at once, strings counted too."""
    depth = deepest = 0
    for letter in re.findall(r"[\[\]{}]", text):
        depth += 1 if letter in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _yaml_lines(node: Any, mapping: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line of every key of nested mappings, as many as a file may have."""
    pending, found = [(node, path)], 0
    while pending and found <= MOST_SETTINGS:
        node, path = pending.pop()
        if not isinstance(node, mapping) or len(path) > MOST_NESTED:
            continue
        for key, value in node.value:  # type: ignore[attr-defined]  # pairs of nodes
            inner = (*path, str(key.value))
            found += 1
            yield inner, key.start_mark.line + 1
            pending.append((value, inner))


def _table(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{source}: this file holds {type(value).__name__}, where a table of settings is meant.")
    return value


def settings_of(tables: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], source: str) -> Iterator[Written]:
    """The values that are no tables, and empty tables, in file order. A list of tables is one value."""
    pending: list[tuple[tuple[str, ...], Any]] = [
        ((str(name),), value) for name, value in reversed(list(tables.items()))
    ]
    found = 0
    while pending:
        path, value = pending.pop()
        found += 1
        if found > MOST_SETTINGS or len(path) > MOST_NESTED:
            raise FileError(
                f"{source}: this file has more than {MOST_SETTINGS:,} settings, or nests them deeper than "
                f"{MOST_NESTED}, which no such file does."
            )
        if isinstance(value, Mapping) and value:
            pending += [((*path, str(name)), inner) for name, inner in reversed(list(value.items()))]
            continue
        line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)
        yield Written(".".join(path), value, line)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|\n')


def _json_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line of every key of nested objects of a valid JSON text; of keys in lists too, without their number."""
    line, path, last = 1, [""], ""
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token in "{[":
            path.append("")
        elif token in "}]":
            path.pop()
        elif token == ":":
            path[-1] = last[1:-1]
            yield tuple(path[1:]), line
        elif token != ",":
            last = token
            line += token.count("\n")


def written_text(value: Any) -> str:
    """A value as it is shown among the settings."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, int):
        return "none" if value is None else shown(value)
    try:
        return str(value)
    except ValueError:  # a list with a whole number of more than 4,300 digits
        return shown(value)
