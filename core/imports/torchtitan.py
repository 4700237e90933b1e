"""torchtitan's configurations: TOML of its releases up to v0.2.2, exported JSON, and the literals of the Python files
that later ones have."""

from __future__ import annotations

import re

from ..base.errors import FileError
from ..base.parsing import parse_toml
from .account import Imported, Request

OWN_SECTIONS = frozenset(
    [
        "job",
        "profiling",
        "metrics",
        "lr_scheduler",
        "training",
        "parallelism",
        "experimental",
        "activation_checkpoint",
        "float8",
        "mx",
        "quantize",
        "compile",
        "comm",
        "validation",
        "memory_estimation",
        "fault_tolerance",
        "debug",
    ]
)
"""Sections of torchtitan that a plan does not have."""

PLAN_SECTIONS = frozenset(
    [
        "cluster",
        "runtime",
        "layout",
        "batch",
        "precision",
        "recompute",
        "offload",
        "schedule",
        "numerics",
        "data_parallel",
        "communicators",
        "train",
        "variation",
        "modules",
    ]
)
"""Sections of a plan that torchtitan does not have; a file with one of them is a plan."""

_HEADER = re.compile(r"^\s*(?:\[+\s*[\"']?)?(\w+)(?=[\"'.\]]|\s*=\s*\{)", re.MULTILINE)
"""The first name of a table's header, of a dotted key, or of an inline table."""

_FLAVOR = re.compile(r"^\s*flavor\s*=", re.MULTILINE)


def recognises(request: Request) -> bool:
    """Whether a file is a configuration of torchtitan, by its name and its sections."""
    text, name = request.text, request.source
    if name.endswith(".json"):
        return '"parallelism"' in text and '"training"' in text and '"activation_checkpoint"' in text
    if name.endswith(".py"):
        return "torchtitan" in text and ("Trainer.Config(" in text or "ParallelismConfig(" in text)
    headers = set(_HEADER.findall(text))
    if not (OWN_SECTIONS & headers or _FLAVOR.search(text)):
        return False
    try:
        tables = parse_toml(text, name)
    except FileError:
        return not headers & PLAN_SECTIONS
    model = tables.get("model")
    is_own = OWN_SECTIONS & tables.keys() or (isinstance(model, dict) and "flavor" in model)
    return bool(is_own) and not tables.keys() & PLAN_SECTIONS


def read(request: Request) -> Imported:
    """The account of a configuration. Raises `PlanError` for a text that is none."""
    from .torchtitan_meaning import account

    return account(request)
