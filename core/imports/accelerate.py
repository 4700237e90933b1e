"""accelerate's YAML configurations (`accelerate config`): which files are, and the way to their account, whose
tables are loaded when one is read."""

from __future__ import annotations

from .account import Imported, Request


def recognises(request: Request) -> bool:
    """Whether a YAML file is one that `accelerate config` writes."""
    text = request.text
    marks = ("compute_environment:", "distributed_type:", "num_processes:", "fsdp_config:")
    return (
        request.source.endswith((".yaml", ".yml")) and len(text) < 50_000 and sum(mark in text for mark in marks) >= 2
    )


def read(request: Request) -> Imported:
    """The account of a configuration. Raises `PlanError` for a text that is none, and `MissingExtraError` without
    PyYAML."""
    from .accelerate_meaning import account

    return account(request)
