"""Megatron-Bridge's dumped configurations (`run_config.yaml`): which files are, and the way to their account,
whose tables are loaded when one is read."""

from __future__ import annotations

from .account import Imported, Request


def recognises(request: Request) -> bool:
    """Whether a YAML or JSON file is a dumped configuration of Megatron-Bridge."""
    return (
        request.source.endswith((".yaml", ".yml", ".json"))
        and "_target_" in request.text
        and "megatron.bridge" in request.text
    )


def read(request: Request) -> Imported:
    """The account of a configuration. Raises `PlanError` for a text that is none, and `MissingExtraError` without
    PyYAML."""
    from .bridge_meaning import account

    return account(request)
