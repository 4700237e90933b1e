"""The import table of docs/design.md, the completeness of the package list, and what a light import may cost."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

import shardproof
from shardproof.core.commands.commands import QUESTIONS, Command, command
from shardproof.docs import make_rooms

ROOT = Path(shardproof.__file__).parent
ROOMS = make_rooms.ROOMS
MAY_USE_BACKEND = {
    name for name, targets in make_rooms.folders().adj.items() if any(each.startswith("backend") for each in targets)
}
"""Folders of which the table says that they import the backend."""

LIGHT_PACKAGES = {"numpy", "shardproof"}
LOADED_BY_PYTEST = "core/commands/pytest_plugin.py"
FILES = sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def uses_backend(name: str) -> bool:
    return name.startswith("backend/") or make_rooms.folder_of(name) in MAY_USE_BACKEND


@functools.cache
def imports_of(name: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import of a file, with True for those that run when the module is loaded."""
    tree = ast.parse((ROOT / name).read_text())
    deferred = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for node in ast.walk(outer)
    }
    return [
        (node, id(node) not in deferred) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def test_the_table_of_the_design_is_what_files_import() -> None:
    assert make_rooms.printed() == make_rooms.table(), (
        "python docs/make_rooms.py writes the table of today; look at what has changed"
    )


def test_a_room_imports_core_alone_but_for_the_folders_of_verify_that_run_the_backend() -> None:
    rooms = {(one.split("/")[0], other.split("/")[0]) for one, other in make_rooms.folders().edges}
    assert {pair for pair in rooms if pair[0] != pair[1]} == {
        *((room, "core") for room in ROOMS if room != "core"),
        ("verify", "backend"),
    }


def test_no_files_and_no_folders_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types alone count as all others do."""
    assert make_rooms.circles(make_rooms.graph()) == []
    assert make_rooms.circles(make_rooms.folders()) == []


@pytest.mark.parametrize(
    "back",
    [
        "from .worker import work\n",
        "def late():\n    from .worker import work\n",
        "if TYPE_CHECKING:\n    from .worker import Work\n",
        "from ..room import work\n",
        "from ..room import worker\n",
    ],
    ids=["at load", "in a function", "for types alone", "through the package", "a module"],
)
def test_a_circle_is_found_by_whichever_import_closes_it(
    back: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "core/room/__init__.py": "from .worker import work\n",
        "core/room/noun.py": back,
        "core/room/worker.py": "from .noun import Noun\n",
        "core/room/user.py": "from ..room import work\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(make_rooms, "ROOT", tmp_path)
    (circle,) = make_rooms.circles(make_rooms.graph.__wrapped__())
    assert {"core/room/noun.py", "core/room/worker.py"} <= set(circle) and "core/room/user.py" not in circle


@pytest.mark.parametrize("folder", sorted(make_rooms.folders()))
def test_a_folder_says_what_lives_there_and_what_may_not(folder: str) -> None:
    assert make_rooms.rule_of(folder).count(". ") >= 1


@pytest.mark.parametrize("name", FILES)
def test_library_imports_itself_relatively(name: str) -> None:
    for node, _ in imports_of(name):
        modules = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if not node.level
            else []
        )
        for module in modules:
            assert module.split(".")[0] not in {*ROOMS, "shardproof"}, (
                f"{name}:{node.lineno} imports {module} absolutely"
            )


@pytest.mark.parametrize("name", [name for name in FILES if not uses_backend(name)])
def test_planning_rooms_load_nothing_heavy(name: str) -> None:
    for node, at_load in imports_of(name):
        if not at_load or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        for module in [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]:
            package = module.split(".")[0]
            allowed = package in LIGHT_PACKAGES or (package == "pytest" and name == LOADED_BY_PYTEST)
            assert package in sys.stdlib_module_names or allowed, f"{name}:{node.lineno} loads {module} at import"


def test_package_list_in_pyproject_is_complete() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent.relative_to(ROOT).parts for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    assert set(listed) == {"shardproof", *(".".join(("shardproof", *parts)) for parts in folders)}


def test_every_folder_with_code_is_a_package() -> None:
    for name in FILES:
        assert (ROOT / name).parent.joinpath("__init__.py").exists(), name


def test_importing_every_light_module_leaves_torch_and_matplotlib_unloaded() -> None:
    modules = [
        "shardproof." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in FILES
        if not uses_backend(name)
    ]
    heavy = "{'torch', 'matplotlib', 'networkx', 'triton'}"
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(sorted({heavy} & "
        "set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_pytest_plugin_brings_nothing_that_pytest_has_not_loaded() -> None:
    heavy = "{'numpy', 'torch', 'shardproof.verify'}"
    code = (
        f"import pytest, sys; import shardproof.core.commands.pytest_plugin; print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verbs_of_the_help_are_the_registered_ones() -> None:
    assert {point.name for point in entry_points(group="shardproof.commands")} == set(QUESTIONS)


@pytest.mark.parametrize("verb", sorted(QUESTIONS))
def test_every_verb_loads_and_has_an_example(verb: str) -> None:
    loaded = command(verb)
    assert isinstance(loaded, Command)
    assert loaded.name == verb
    assert loaded.example.startswith(f"shardproof {verb}")


@pytest.mark.parametrize("point", entry_points(group="shardproof.services"), ids=lambda point: point.name)
def test_every_service_resolves(point: EntryPoint) -> None:
    assert callable(point.load())


PUBLIC = [name for name in shardproof.__all__ if name != "__version__"]
ALSO_MODULES = [name for name in PUBLIC if (ROOT / shardproof._HOMES[name] / f"{name}.py").exists()]


@pytest.mark.parametrize(
    "names",
    [*([name] for name in ALSO_MODULES), [name for name in PUBLIC if name not in ALSO_MODULES]],
    ids=lambda names: names[0],
)
def test_a_public_name_is_the_same_object_in_its_room_whatever_was_imported_before(names: list[str]) -> None:
    """`simulate`, `search`, `fit`, `check` and `draw` are also names of modules, which Python binds in the room when it
    loads them: each gets an interpreter that nothing else was imported in."""
    homes = [(shardproof._HOMES[name], name) for name in names]
    modules = sorted({getattr(shardproof, name).__module__ for name in names})
    code = f"""
import importlib, shardproof
for room, name in {homes!r}:
    same = getattr(importlib.import_module(f"shardproof.{{room}}"), name) is getattr(shardproof, name)
    print(name, same, callable(getattr(shardproof, name)))
"""
    for first in ("", f"import {', '.join(modules)}"):
        done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, check=False)
        assert done.stdout.splitlines() == [f"{name} True True" for name in names], done.stderr


def test_public_names_resolve_and_are_listed() -> None:
    for name in shardproof.__all__:
        assert getattr(shardproof, name) is not None
        assert name in dir(shardproof)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = shardproof.no_such_name
    assert importlib.import_module("shardproof") is shardproof
