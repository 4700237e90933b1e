"""The door for PLAN: a plan.toml, or somebody else's configuration, as the values of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from ..base.errors import FileError, PlanError
from ..base.files import read_text
from ..plan.toml import Given, Values, read_values
from .account import Imported, Request
from .megatron_command import LINE_VARIABLE
from .readers import READERS, reader_of
from .torchtitan_python import VARIABLE as FUNCTION_VARIABLE


def import_file(request: Request, named: str | None = None) -> Imported | None:
    """What the file says, by the reader that is `named` (`megatron`, or with a version `megatron:0.8`), else by the one
    that recognises it; None for a plan.toml. Refused settings are not raised yet.

    Raises `PlanError` for a file that its reader cannot read, `UnknownNameError` for a format that there is not.
    """
    name, _, version = (named or "").partition(":")
    reader = reader_of(request, name or None)
    if reader is None:
        return None
    _check_variables(request)
    return reader.read(replace(request, version=version or None))


_OF_READERS = re.compile(rf"{LINE_VARIABLE}|{FUNCTION_VARIABLE}|SLURM_\w+")
"""Variables that readers ask for, whatever a file says."""

_TAKES_IN = re.compile(r"^\s*(\.|source)\s", re.MULTILINE)


def _check_variables(request: Request) -> None:
    """Raises `PlanError` for a variable that the file does not name: mistyped, it would leave a default as it is. A
    script that takes in others may mean one of theirs."""
    if _TAKES_IN.search(request.text):
        return
    for name in request.variables:
        used = rf"\$\{{?({name}\b|[@*#])" if name.isdigit() else rf"(?<!\w){name}(?!\w)"
        if not _OF_READERS.fullmatch(name) and not re.search(used, request.text):
            raise PlanError(
                f"--variable {name}: {request.source} has no variable of this name. Mend it, or leave it out."
            )


def request_of(
    text: str, source: str, options: Mapping[str, Mapping[str, Given]], variables: Mapping[str, str]
) -> Request:
    """What a reader is given: a file, and what the command line's keys of a plan (section -> key) add to it."""
    devices = options.get("cluster", {}).get("num_devices")
    model = options.get("model", {})
    given = model if {"preset", "config"} & model.keys() else {}
    return Request(text, source, None if devices is None else devices.value, given, variables)


def values_of(
    source: str,
    *,
    named: str | None = None,
    options: Mapping[str, Mapping[str, Given]] = MappingProxyType({}),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Values, Imported | None]:
    """The values of the plan that a file describes, and its account where it is somebody else's. `options` are the keys
    of a plan that the command line gives. Raises `PlanError` with every problem, refused settings among them."""
    text = read_text(source)
    imported = import_file(request_of(text, source, options, variables), named)
    if imported is None:
        return _plan_values(text, source), None
    imported.raise_refused()
    return imported.values, imported


def _plan_values(text: str, source: str) -> Values:
    """The values of a file that no reader recognises, which is a plan. Where it is no TOML and not called so, the error
    names the formats that there are."""
    try:
        return read_values(text, source)
    except FileError as error:
        if source.endswith(".toml"):
            raise
        raise unknown_format(source) from error


class Reading(NamedTuple):
    """How a file was asked to be read: the reader that was named, and what the variables of a script are."""

    named: str | None = None
    variables: Mapping[str, str] = MappingProxyType({})


UNASKED = Reading()


def places_of(source: str, reading: Reading = UNASKED) -> Values:
    """The values of a file for the sake of their lines: those of somebody else's as far as they follow from the file
    and `reading` alone, whatever of it is refused. Raises `PlanError` for a file that cannot be read."""
    text = read_text(source)
    imported = import_file(Request(text, source, variables=reading.variables), reading.named)
    return read_values(text, source) if imported is None else imported.values


def known_formats() -> str:
    """The formats that are read, in words."""
    return ", ".join(f"{each.name} ({each.title})" for each in READERS)


def unknown_format(source: str) -> PlanError:
    """The error for a file that no reader knows."""
    return PlanError(
        f"{source}: this is in none of the formats that are imported, {known_formats()}. Name its format by --from, or "
        "give a plan.toml to a verb that takes plans."
    )
