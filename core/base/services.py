"""The registry that rooms call each other by: packages register entry points, and nobody imports a sibling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def service(name: str) -> Callable[..., Any]:
    """A function another package offers (`simulate`, `run_schedule`, `draw`, `check`), resolved at call time."""
    return load("shardproof.services", "service", name)


def load(group: str, what: str, name: str) -> Any:
    """What a group of entry points has under a name, loaded now. Raises `UnknownNameError` for a name that it has not,
    which `what` describes, and `MissingExtraError` where that needs torch and there is none."""
    # half of what the command line takes to start, where a verb needs none of it
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        raise UnknownNameError(what, name, found)
    return _import(found[name])


def _import(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingExtraError(
                f"{point.name} needs torch, which is not installed. Run `pip install 'shardproof[train]'`."
            ) from error
        raise
