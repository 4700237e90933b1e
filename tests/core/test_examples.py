"""The examples in the docstrings of the vocabulary are run."""

import doctest
import importlib
from pathlib import Path

import pytest

import shardproof.core

MODULES = sorted(path.stem for path in Path(shardproof.core.__file__).parent.glob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name):
    result = doctest.testmod(importlib.import_module(f"shardproof.core.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_the_modules_with_examples_are_found():
    assert {"layout", "reduction", "microbatches", "plan_toml"} <= set(MODULES)
