"""The table of rooms in docs/design.md: every folder, its rule, and the folders that it imports, read from the code.

Usage: python docs/make_rooms.py     writes the table of today into docs/design.md

The rule of a folder is the first paragraph of its `__init__.py`. Rows of a room stand from the ground up: a folder
imports only folders above it in the table. tests/test_architecture.py holds both.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
ROOMS = ("core", "simulator", "viz", "backend", "verify")
HEADER = "| folder | what lives there | imports |\n|---|---|---|\n"
Module = tuple[str, ...]
"""A dotted name below the package, `("core", "plan", "sections")`."""


def files() -> dict[Module, str]:
    """Every module of the rooms and its path from the root."""
    found = {}
    for room in ROOMS:
        for path in sorted([*(ROOT / room).rglob("*.py"), *(ROOT / room).rglob("*.pyi")]):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[parts[:-1] if parts[-1] == "__init__" else parts] = path.relative_to(ROOT).as_posix()
    return found


@functools.cache
def graph() -> networkx.DiGraph:
    """File to file it imports. Imports in functions and for types alone count; a name that a package hands on counts as
    an import of the file that defines it, and of the package."""
    modules = files()
    arrows = networkx.DiGraph()
    arrows.add_nodes_from(modules.values())
    for name in modules.values():
        arrows.add_edges_from((name, target) for target in _targets(name, modules) if target != name)
    return arrows


def _targets(name: str, modules: dict[Module, str]) -> Iterator[str]:
    package = tuple(name.split("/")[:-1])
    for node in _statements(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue  # the library imports itself relatively: tests/test_architecture.py
        base = package[: len(package) - (node.level - 1)] + tuple(node.module.split(".") if node.module else ())
        for alias in node.names:
            module = modules.get((*base, alias.name)) or modules.get(base)
            if module is not None:
                yield module


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements in one, or in a module: expressions, nine nodes in ten, are not looked into."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, block, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from _statements(inner)


def folder_of(name: str) -> str:
    """The folder that a file belongs to: its room's where it lies deeper, `core/plan` for
    `core/plan/rules/table.py`."""
    parts = name.split("/")
    return parts[0] if len(parts) == 2 else "/".join(parts[:2])


def folders() -> networkx.DiGraph:
    """Folder to folder it imports."""
    arrows = networkx.DiGraph()
    arrows.add_nodes_from(folder_of(name) for name in graph())
    arrows.add_edges_from(
        (folder_of(one), folder_of(other)) for one, other in graph().edges if folder_of(one) != folder_of(other)
    )
    return arrows


def circles(arrows: networkx.DiGraph) -> list[list[str]]:
    """Files, or folders, that import each other in a circle."""
    return sorted(sorted(circle) for circle in networkx.strongly_connected_components(arrows) if len(circle) > 1)


def rule_of(folder: str) -> str:
    """The first paragraph of the folder's `__init__.py`."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def _imports(folder: str, arrows: networkx.DiGraph) -> str:
    """`base, model; core: plan, program`: folders of the same room, then those of others, a
    room's own files as `top`."""
    room = folder.split("/")[0]
    by_room: dict[str, list[str]] = {}
    for target in sorted(arrows.successors(folder)):
        there, _, inside = target.partition("/")
        by_room.setdefault(there, []).append(inside or "top")
    parts = [", ".join(by_room.pop(room, []))]
    parts += [f"{there}: {', '.join(inside)}" for there, inside in sorted(by_room.items())]
    return "; ".join(filter(None, parts)) or "nothing"


def table() -> str:
    """The table as it stands in docs/design.md."""
    arrows = folders()
    order = list(
        networkx.lexicographical_topological_sort(
            arrows.reverse(), key=lambda name: (ROOMS.index(name.split("/")[0]), name)
        )
    )
    rows = [name for room in ROOMS for name in order if name.split("/")[0] == room]
    return HEADER + "".join(f"| {name} | {rule_of(name)} | {_imports(name, arrows)} |\n" for name in rows)


def printed() -> str:
    """The table that docs/design.md prints."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(HEADER)
    return text[start : text.index("\n\n", start) + 1]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(printed(), table()), encoding="utf-8")
