"""Every key of a plan has the reader that the key table names, so no key can be accepted and then ignored."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shardproof
from shardproof.core.plan.keys import KEYS, NOUNS, Key

ROOT = Path(shardproof.__file__).parent
PARSERS = ("core.plan.keys", "core.plan.rules", "core.plan.toml", "core.commands.options")
"""Modules that handle every key in one way; reading a key there changes nothing but its own check."""

HOMES = {
    "core.model.model_fields": "model",
    "core.machine.cluster": "cluster",
    "core.layout.layout": "layout",
    "core.plan.optimizer": "optimizer",
}
"""Modules of one noun, where its own fields are read from `self`."""


@cache
def reads(module: str) -> frozenset[tuple[str, str]]:
    """`(section, field)` of every field of a noun that a module reads, and `("", key)` of every constant
    key it takes from a mapping.

    The noun is recognised by name (`plan.layout.tp`, `layout.tp`), by the annotation of a parameter (`spec: ModelSpec`)
    or by a local name given to it (`choice = plan.schedule`).
    """
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    aliases = dict(_aliases(tree))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = _last_name(node.value)
            found.add((HOMES.get(module, owner) if owner == "self" else aliases.get(owner, owner), node.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            found |= {("", argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)}
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.add(("", node.slice.value))
    return frozenset(found)


def _last_name(node: ast.expr) -> str:
    return node.attr.strip("_") if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    sections = {noun.__name__: section for section, noun in NOUNS.items()}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.arg | ast.AnnAssign)
            and isinstance(node.annotation, ast.Name)
            and node.annotation.id in sections
        ):
            yield node.arg if isinstance(node, ast.arg) else _last_name(node.target), sections[node.annotation.id]
        elif isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target, value in zip(targets, values, strict=False):
                if isinstance(value, ast.Attribute) and value.attr in NOUNS:
                    yield _last_name(target), value.attr


def is_read(key: Key, module: str) -> bool:
    """True when `module` reads the key's field from its section's noun, or, for keys without a field, takes it
    from the values given."""
    return (("", key.name) if key.attribute is None else (key.section, key.attribute)) in reads(module)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_the_module_that_the_table_names_reads_the_key(key):
    assert not key.read_by.startswith(PARSERS)
    assert is_read(key, key.read_by), f"{key.read_by} does not read {key.section}.{key.attribute}"


def test_a_key_without_a_reader_would_be_found():
    assert not is_read(Key("layout", "tpx", "int", "no such key", "core.layout.layout"), "core.layout.layout")
    assert not is_read(Key("train", "steps", "int", "read elsewhere", "core.layout.layout"), "core.layout.layout")
    assert not is_read(
        Key("model", "presett", "str", "no such key", "core.plan.build", attribute=None), "core.plan.build"
    )
