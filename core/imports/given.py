"""The door for PLAN: a plan.toml, or somebody else's configuration, as the values of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ..base.errors import PlanError
from ..base.files import read_text
from ..plan.toml import Values, read_values
from .account import Imported, Request
from .readers import READERS, reader_of


def import_file(request: Request, named: str | None = None) -> Imported | None:
    """What the file says, by the reader that is `named` (`megatron`, or with a version `megatron:0.8`), else by the one
    that recognises it; None for a plan.toml. Refused settings are not raised yet.

    Raises `PlanError` for a file that its reader cannot read, `UnknownNameError` for a format that there is not.
    """
    name, _, version = (named or "").partition(":")
    reader = reader_of(request, name or None)
    return None if reader is None else reader.read(replace(request, version=version or None))


def values_of(
    source: str,
    *,
    named: str | None = None,
    num_devices: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Values, Imported | None]:
    """The values of the plan that a file describes, and its account where it is somebody else's. Raises `PlanError`
    with every problem, refused settings among them."""
    text = read_text(source)
    imported = import_file(Request(text, source, num_devices, variables), named)
    if imported is None:
        return read_values(text, source), None
    imported.raise_refused()
    return imported.values, imported


def known_formats() -> str:
    """The formats that are read, in words."""
    return ", ".join(f"{each.name} ({each.title})" for each in READERS)


def unknown_format(source: str) -> PlanError:
    """The error for a file that no reader knows."""
    return PlanError(
        f"{source}: this is the file of no format that is read. Known: {known_formats()}. Name it by --from."
    )
