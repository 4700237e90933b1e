"""The JSON Schema of a plan file, by which editors complete keys, explain them and mark values that are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..base.bounds import bound_of
from .keys import KEYS, MODULE_KEYS, NOUNS, Key
from .module import OWN_SECTIONS
from .toml import MODULES

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def plan_schema() -> dict[str, Any]:
    """The schema of a plan file, draft 2020-12: every section and key, with types, limits, meanings and defaults.

    It holds for one key at a time. Rules across keys, and what a key with a preset's default needs, are those of
    `core.plan.rules` and of the sections.
    """
    sections = {section: _table(key for key in KEYS if key.section == section) for section in NOUNS}
    own = {section: {"$ref": f"#/$defs/{section}"} for section in OWN_SECTIONS}
    module = _table(MODULE_KEYS)
    module["properties"] |= own
    module["required"] = [key.name for key in MODULE_KEYS if key.required]
    return {
        "$schema": DRAFT,
        "title": "A plan of shardproof",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{section: {"$ref": f"#/$defs/{section}"} for section in NOUNS},
            MODULES: {"type": "array", "items": module},
        },
        "$defs": sections,
    }


def _table(keys: Iterable[Key]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {key.name: _value(key) for key in keys},
    }


def _value(key: Key) -> dict[str, Any]:
    """The schema of a key's value."""
    doc = f"{key.doc[0].upper()}{key.doc[1:]}."
    usual = f"Default: {key.default_note}." if key.default_note else ""
    return {
        **_type(key),
        "description": " ".join(filter(None, (doc, key.more, usual))),
        **({} if key.default is None else {"default": _plain(key.default)}),
    }


def _type(key: Key) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string", "minLength": 1} | ({"enum": [*key.choices]} if key.choices else {})
    whole, real = ({"type": kind} | _limits(key, whole=kind == "integer") for kind in ("integer", "number"))
    rate = {**real, "exclusiveMinimum": 0}
    types: dict[str, dict[str, Any]] = {
        "int": whole,
        "float": real,
        "size": {"type": ["string", "number"]},
        "bool": {"type": "boolean"},
        "str": text,
        "path": text,
        "data": text,
        "two floats": {"type": "array", "items": real, "minItems": 2, "maxItems": 2},
        "list of ints": {"type": "array", "items": whole},
        "list of texts": {"type": "array", "items": text},
        "list of groups": {"type": "array", "items": _GROUP},
        "table of rates": {"type": "object", "additionalProperties": rate},
        "table of texts": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    return types[key.type]


_GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["match"],
    "properties": {
        "match": {"type": "string", "minLength": 1},
        "weight_decay": {"type": "number", "minimum": 0},
        "learning_rate_multiplier": {"type": "number", "minimum": 0},
        "frozen": {"type": "boolean"},
    },
}
"""One of `optimizer.groups`."""


def _limits(key: Key, *, whole: bool) -> dict[str, float]:
    most = (key.bound or bound_of(key.attribute or key.name, whole=whole)).most
    limits = {
        "minimum": key.minimum,
        "exclusiveMinimum": key.above,
        "maximum": most if key.maximum is None else min(key.maximum, most),
        "exclusiveMaximum": key.below,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
