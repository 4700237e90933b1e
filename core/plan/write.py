"""Plans as TOML text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ..machine.cluster import ClusterSpec
from ..machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from ..model.model import ModelSpec
from ..model.model_fields import REFINEMENTS
from ..model.model_presets import MODEL_PRESETS, model_preset
from .build import SET_IN_PLAN
from .keys import KEYS, NOUNS
from .module import OWN_SECTIONS, Module
from .parameter_groups import ParameterGroup
from .toml import MODULES


def sections_to_toml(nouns: Mapping[str, Any]) -> str:
    """The plan of these sections (name -> noun) as text.

    Sections and keys come in the order of the key table, `modules` last. Values that are defaults are left out.
    """
    sections = [_section(section, nouns[section]) for section in NOUNS if section in nouns]
    modules: tuple[Module, ...] = nouns.get(MODULES, ())
    for number, module in enumerate(modules):
        sections.append(_table(f"[[{MODULES}]]", sparse_module(module, modules[:number])))
        sections += [_section(section, getattr(module, section), under=f"{MODULES}.") for section in OWN_SECTIONS]
    return "\n".join(filter(None, sections))


def _section(section: str, noun: Any, *, under: str = "") -> str:
    """A section as text, below `under`; empty where all its values are defaults."""
    keys = [key for key in KEYS if key.section == section]
    if section == "model":
        given = sparse_model(noun)
    elif section == "cluster":
        given = sparse_cluster(noun)
    else:
        fields = {key: getattr(noun, key.attribute) for key in keys if key.attribute is not None}
        given = {
            key.name: value for key, value in fields.items() if value != key.default or key.dotted in ALWAYS_WRITTEN
        }
    return (
        _table(f"[{under}{section}]", {key.name: given[key.name] for key in keys if key.name in given}) if given else ""
    )


def _table(header: str, given: Mapping[str, Any]) -> str:
    return "\n".join([header, *(f"{name} = {toml_value(value)}" for name, value in given.items())]) + "\n"


ALWAYS_WRITTEN = ("layout.tp", "layout.pp", "layout.dp", "precision.dtype")
"""Keys that readers of a plan look for first, written even when they are the defaults."""


def toml_value(value: Any) -> str:
    """One value as TOML. Floats keep every bit; mappings become inline tables.

    >>> toml_value({"bf16": 3.12e14, "note": 'a "b"'})
    '{ bf16 = 312000000000000.0, note = "a \\\\"b\\\\"" }'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = "".join(
            _ESCAPES.get(letter, letter) if letter >= " " and letter != "\x7f" else _escape(letter) for letter in value
        )
        return f'"{escaped}"'
    if isinstance(value, ParameterGroup):
        return toml_value(value.given)
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items()) + " }"
            if value
            else "{}"
        )
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def _escape(letter: str) -> str:
    return f"\\u{ord(letter):04x}"


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def sparse_model(model: ModelSpec) -> dict[str, Any]:
    """Key -> value, as few as describe the model: a preset and what differs from it, or every field."""
    fields = _fields(model)
    full = {name: value for name, value in fields.items() if name not in _REFINEMENTS or value != _REFINEMENTS[name]}
    if model.name not in MODEL_PRESETS:
        return full
    base = _fields(model_preset(model.name))
    changed = {name: value for name, value in fields.items() if value != base[name]}
    # a file cannot say None over a preset's number
    return full if None in changed.values() else {"preset": model.name, **changed}


_REFINEMENTS = {field.name: field.default for field in dataclasses.fields(ModelSpec) if field.name in REFINEMENTS}
"""Fields that a file leaves out where they are off, and their defaults."""


def sparse_cluster(cluster: ClusterSpec) -> dict[str, Any]:
    """Key -> value, as few as describe the cluster: a preset and what differs from it, or every field."""
    fields = _fields(cluster)
    if cluster.name not in CLUSTER_PRESETS:
        return fields
    base = _fields(cluster_preset(cluster.name, cluster.num_devices))
    changed = {name: value for name, value in fields.items() if value != base[name] and name != "sources"}
    own_sources = {
        name: text
        for name, text in cluster.sources.items()
        if base["sources"].get(name) != text and text != SET_IN_PLAN
    }
    sources = {**base["sources"], **dict.fromkeys(changed, SET_IN_PLAN), **own_sources}
    if sources != dict(cluster.sources):
        return {**fields}
    return {
        "preset": cluster.name,
        "num_devices": cluster.num_devices,
        **changed,
        **({"sources": own_sources} if own_sources else {}),
    }


def _fields(noun: Any) -> dict[str, Any]:
    return {field.name: getattr(noun, field.name) for field in dataclasses.fields(noun)}


def sparse_module(module: Module, earlier: tuple[Module, ...]) -> dict[str, Any]:
    """Key -> value, as few as describe what a module has of its own, but for its model and layout."""
    usual = (earlier[-1].name,) if earlier else ()
    inputs = {} if module.inputs == usual else {"inputs": list(module.inputs)}
    return {"name": module.name, "ranks": module.ranks, **inputs}
