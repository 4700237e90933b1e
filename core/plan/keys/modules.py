"""The keys of one of [[modules]], besides its [modules.model] and [modules.layout]."""

from __future__ import annotations

from .key import Key

MODULE_KEYS: tuple[Key, ...] = (
    Key("modules", "name", "str", "what begins the names of its parameters", "core.plan.module"),
    Key("modules", "ranks", "str", "its first and last rank: 0-3, or 0", "core.plan.module", attribute="first_rank"),
    Key(
        "modules",
        "inputs",
        "list of texts",
        "modules whose hidden states it takes, added up",
        "core.plan.module",
        default_note="the one before",
    ),
)
"""Every key of a module of its own; those of its model and layout are in `KEYS`."""
