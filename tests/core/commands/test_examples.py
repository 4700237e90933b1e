"""The examples in the docstrings of the vocabulary are run."""

import doctest
import importlib
from pathlib import Path

import pytest

import shardproof.core

ROOM = Path(shardproof.core.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOM).with_suffix("").parts)
    for path in ROOM.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name):
    result = doctest.testmod(importlib.import_module(f"shardproof.core.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_the_modules_with_examples_are_found():
    assert {"layout", "reduction", "microbatches", "write", "catalog"} <= {name.rpartition(".")[2] for name in MODULES}
