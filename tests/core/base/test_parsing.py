"""JSON and TOML from outside: what is refused instead of running out of stack, digits or memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.errors import FileError
from shardproof.core.base.parsing import MOST_NESTED, MOST_VALUES, parse_json, parse_toml
from shardproof.core.plan.toml import read_values
from shardproof.core.plan.write import toml_value


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 500, 100_000])
def test_json_that_nests_too_deep_is_refused(opening, depth):
    closing = "".join("]" if each == "[" else "}" for each in reversed(opening.replace('"a":', "")))
    with pytest.raises(FileError, match=r"x\.json: lists or tables are nested deeper than 64"):
        parse_json(opening * depth + "1" + closing * depth, "x.json")


@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 500, 100_000])
def test_toml_that_nests_too_deep_is_refused(depth):
    for text in (
        "a = " + "[" * depth + "]" * depth,
        "a = " + "{ b = " * depth + "1" + " }" * depth,
        "a" + ".b" * depth + " = 1",
    ):
        with pytest.raises(FileError, match=r"x\.toml: lists or tables are nested deeper than 64"):
            parse_toml(text, "x.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("9" * 5000, "4,300 digits"),
        ("NaN", "NaN is no number"),
        ("-Infinity", "no number"),
        ("{", "Expecting property name"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(text, words):
    with pytest.raises(FileError, match=rf"^x: this is not JSON: .*{words}"):
        parse_json(text, "x")


def test_toml_is_refused_at_its_line():
    for text, words in (("a = 1\nb = " + "9" * 5000, "4,300 digits"), ("a = 1\nb = 2 3\n", "line 2")):
        with pytest.raises(FileError, match=rf"^x:2: this is not TOML: .*{words}"):
            parse_toml(text, "x")


def test_half_a_character_is_no_text_and_two_halves_are():
    with pytest.raises(FileError, match="without its other half"):
        parse_json('{"a": ["\\udc80"]}', "x")
    assert parse_json('"\\ud83d\\ude00"', "x") == "\N{GRINNING FACE}"


def test_more_values_than_fit_are_refused_before_they_are_made():
    with pytest.raises(FileError, match="more than 12,000,000 values"):
        parse_json("[" + "[]," * (MOST_VALUES // 2) + "1]", "x")


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_json_writes_is_read(value):
    assert parse_json(json.dumps(value), "x") == value


@given(st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=6))
def test_every_key_has_the_line_of_its_statement(rows):
    """Strings with brackets and comments in them, values over several lines."""
    lines, starts = ["[s]"], []
    for number, (value, is_long) in enumerate(rows):
        starts.append(len(lines) + 1)
        written = toml_value(value)
        long = [f"k{number} = [", '  "]#", # ]', "  '''", "[", "''',", f"  {written},", "]"]
        lines += long if is_long else [f"k{number} = {written}"]
    found = read_values("\n".join(lines) + "\n", "x.toml")["s"]
    assert [found[f"k{number}"].line for number in range(len(rows))] == starts


def test_a_value_of_many_lines_is_read_once():
    lines = "\n".join(f"  {number}," for number in range(100_000))
    found = read_values(f"[s]\na = [\n{lines}\n]\nb = 1\n", "x.toml")["s"]
    assert len(found["a"].value) == 100_000 and found["b"].line == 100_004
