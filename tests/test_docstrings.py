"""The examples in docstrings are run, those of every room."""

import doctest
import importlib

import pytest

from helpers.paths import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for room in ("core", "simulator", "viz", "verify", "backend")
    for path in (ROOT / room).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name):
    result = doctest.testmod(importlib.import_module(f"shardproof.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_the_modules_with_examples_are_found():
    found = {tuple(name.split(".")[:: len(name.split(".")) - 1]) for name in MODULES}
    assert {("core", "reduction"), ("core", "write"), ("simulator", "draws"), ("verify", "portions")} <= found
    assert {room for room, _ in found} == {"core", "simulator", "viz", "verify", "backend"}
