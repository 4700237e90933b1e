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

ROOT = Path(shardproof.__file__).parent
ROOMS = ("core", "simulator", "viz", "backend", "verify")
KNOWS = {room: {room, "core"} for room in ROOMS}
MUTATIONS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "verify/mutations").glob("*.py")}
MAY_USE_BACKEND = {
    *("verify/dynamic/proof.py", "verify/matrix/matrix.py", "verify/matrix/layouts.py", "verify/run/proof_run.py", "verify/run/record.py"),
    *MUTATIONS,
    "verify/run/contributions.py",
    "verify/foreign/recorder.py",
}
COMPILED = {"_digest", "_exact", "_kernel"}
LIGHT_PACKAGES = {"numpy", "shardproof"}
LOADED_BY_PYTEST = "core/commands/pytest_plugin.py"
FILES = sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))


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
    return [(node, id(node) not in deferred) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def room_of(name: str, node: ast.ImportFrom) -> str:
    """The room that a relative import reaches into ("" is the root package)."""
    here = name.split("/")[:-1]
    base = here[: len(here) - (node.level - 1)]
    return [*base, *(node.module.split(".") if node.module else ()), *(alias.name for alias in node.names)][0]


@pytest.mark.parametrize("name", FILES)
def test_file_imports_only_what_its_room_may_know(name: str) -> None:
    room = name.split("/")[0]
    allowed = KNOWS[room] | ({"backend"} if name in MAY_USE_BACKEND else set())
    for node, _ in imports_of(name):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = room_of(name, node)
            assert target in allowed or target == "__version__", f"{name}:{node.lineno} imports from {target}"


def file_of(module: tuple[str, ...], name: str) -> str | None:
    """The file that `from module import name` takes the name from; `module` is a path below the package.

    A name that an `__init__` passes on comes from the file that it is passed on from. None for what is no file of a room,
    such as a compiled module.
    """
    folder = "/".join(module)
    if f"{folder}.py" in FILES:
        return f"{folder}.py"
    if f"{folder}/__init__.py" in FILES:
        for node, _ in imports_of(f"{folder}/__init__.py"):
            if isinstance(node, ast.ImportFrom) and node.level and name in (alias.asname or alias.name for alias in node.names):
                passed_on = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
                return file_of(module_of(f"{folder}/__init__.py", node), passed_on)
    inside = [f"{folder}/{name}.py", f"{folder}/{name}/__init__.py", *([] if name in COMPILED else [f"{folder}/__init__.py"])]
    return next((path for path in inside if path in FILES), None)


def module_of(name: str, node: ast.ImportFrom) -> tuple[str, ...]:
    """The module that a relative import in a file names, as a path below the package."""
    here = name.split("/")[:-1]
    return (*here[: len(here) - (node.level - 1)], *(node.module.split(".") if node.module else ()))


@functools.cache
def arrows_of(name: str) -> tuple[str, ...]:
    """The files that a file takes names from, in any import of it: at load, inside a function, or for types only."""
    found = [
        file_of(module_of(name, node), alias.name)
        for node, _ in imports_of(name)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    ]
    return tuple(sorted({target for target in found if target is not None} - {name}))


def way(start: str, end: str) -> list[str] | None:
    """A shortest way along the arrows from one file to another, without the first; None where there is none."""
    came_from: dict[str, str] = {}
    reached = [start]
    for here in reached:
        for target in arrows_of(here):
            if target not in came_from:
                came_from[target] = here
                reached.append(target)
    if end not in came_from:
        return None
    back = [end]
    while (before := came_from[back[-1]]) != start:
        back.append(before)
    return back[::-1]


@pytest.mark.parametrize("room", ROOMS)
def test_no_circle_of_files(room: str) -> None:
    """No file needs, over others, itself. Imports inside functions and for types only count as all others do."""
    in_circles: set[str] = set()
    circles = []
    for name in FILES:
        if name.startswith(f"{room}/") and name not in in_circles and (circle := way(name, name)) is not None:
            in_circles.update(circle)
            circles.append(" -> ".join([name, *circle]))
    assert not circles, "\n".join(circles)


@pytest.mark.parametrize(
    "back",
    [
        "from .worker import work\n",
        "def late():\n    from .worker import work\n",
        "if TYPE_CHECKING:\n    from .worker import Work\n",
        "from ..room import work\n",
    ],
    ids=["at load", "in a function", "for types only", "through the package"],
)
def test_a_circle_is_found_by_whichever_import_closes_it(back: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "core/room/__init__.py": "from .noun import Noun\nfrom .worker import work\n",
        "core/room/noun.py": back,
        "core/room/worker.py": "from .noun import Noun\n",
        "core/room/user.py": "from ..room import Noun, work\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "FILES", list(files))
    for function in (imports_of, arrows_of):
        monkeypatch.setattr(here, function.__name__, function.__wrapped__)  # what is remembered is of the real files
    assert way("core/room/noun.py", "core/room/noun.py") == ["core/room/worker.py", "core/room/noun.py"]
    assert arrows_of("core/room/user.py") == ("core/room/noun.py", "core/room/worker.py")
    assert way("core/room/user.py", "core/room/user.py") is None
    with pytest.raises(AssertionError, match=r"noun\.py -> core/room/worker\.py -> core/room/noun\.py"):
        test_no_circle_of_files("core")


@pytest.mark.parametrize("name", FILES)
def test_library_imports_itself_relatively(name: str) -> None:
    for node, _ in imports_of(name):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if not node.level else []
        for module in modules:
            assert module.split(".")[0] not in {*ROOMS, "shardproof"}, f"{name}:{node.lineno} imports {module} absolutely"


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("backend/") and name not in MAY_USE_BACKEND])
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
        if not name.startswith("backend/") and name not in MAY_USE_BACKEND
    ]
    heavy = "{'torch', 'matplotlib', 'networkx', 'triton'}"
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_pytest_plugin_brings_nothing_that_pytest_has_not_loaded() -> None:
    heavy = "{'numpy', 'torch', 'shardproof.verify'}"
    code = f"import pytest, sys; import shardproof.core.commands.pytest_plugin; print(sorted({heavy} & set(sys.modules)))"
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
    "names", [*([name] for name in ALSO_MODULES), [name for name in PUBLIC if name not in ALSO_MODULES]], ids=lambda names: names[0]
)
def test_a_public_name_is_the_same_object_in_its_room_whatever_was_imported_before(names: list[str]) -> None:
    """`simulate`, `search`, `fit`, `check` and `draw` are also names of modules, which Python binds in the room when it loads them: each
    gets an interpreter that nothing else was imported in."""
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
