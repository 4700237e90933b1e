"""The YAML files of Megatron-LM's functional tests (`MODEL_ARGS`), by PyYAML where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

from ..base.errors import PlanError
from .account import Request
from .megatron_flags import Flag, all_flags
from .megatron_occurrences import Occurrence, TrainingCommand


def command_of_yaml(request: Request) -> TrainingCommand:
    """The arguments under `MODEL_ARGS`, or those that the file has at its top. Raises `PlanError` without PyYAML."""
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise PlanError(
            f"{request.source}: YAML is read by PyYAML, which is not installed. Install shardproof[import]."
        ) from None
    try:
        root = yaml.compose(request.text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PlanError(f"{request.source}: this is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        raise PlanError(f"{request.source}: this YAML file is no mapping. Give one with MODEL_ARGS.")
    tables = {key.value: value for key, value in root.value}
    arguments = tables.get("MODEL_ARGS", root)
    if not isinstance(arguments, yaml.MappingNode):
        raise PlanError(f"{request.source}: MODEL_ARGS is no mapping of arguments to values.")
    command = TrainingCommand([])
    command.devices_unknown = "the file names no launcher"
    for key, value in arguments.value:
        values = _values(value)
        if values and all_flags().get(key.value, _ONE).arity in "+*":  # a list that the file has as text
            values = tuple(text.strip("[]") for text in values)
        if str(key.value).startswith("--") and values is not None:
            unknown = next((f"{text} is not set in the file" for text in values if "${" in text), "")
            line = key.start_mark.line + 1
            command.occurrences.append(Occurrence(key.value, key.value, values, line, unknown))
    return command


_ONE = Flag("", "1")


def _values(node: Any) -> tuple[str, ...] | None:
    """The values of one argument: none for true, None for one that is not given."""
    if isinstance(node.value, str):
        if node.tag.endswith(":bool"):
            return () if node.value.lower() in ("true", "yes", "on") else None
        return (
            None
            if node.tag.endswith(":null")
            else tuple(node.value.split())
            if node.tag.endswith(":str")
            else (node.value,)
        )
    return tuple(str(getattr(each, "value", each)) for each in node.value)
