"""The form of a published row: what every field must be, where it is there and not null. Fields that are not
listed are read by nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.base.names import is_plain

Form = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""

LARGEST = 1e18
"""Of any number: FLOPs of a step in units of a teraFLOP stay far below, and what follows from a few of
them still is a float."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_reading(value: object) -> bool:
    return _is_number(value) and value >= 0  # type: ignore[operator]


def _is_readings(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_reading, value))


_TEXT: Form = ("a text of one line", lambda value: isinstance(value, str) and value.strip() != "" and is_plain(value))
_TEXTS: Form = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
)
_SWITCH: Form = ("true or false", lambda value: isinstance(value, bool))
_SIZE: Form = ("a whole number above 0", lambda value: isinstance(value, int) and _is_number(value) and value > 0)
_COUNT: Form = (
    "a whole number of at least 0",
    lambda value: isinstance(value, int) and _is_number(value) and value >= 0,
)
_AMOUNT: Form = ("a number above 0", lambda value: _is_number(value) and value > 0)
_READING: Form = ("a number of at least 0", _is_reading)
_PERCENT: Form = ("a number", _is_number)
_TABLE: Form = ("an object", lambda value: isinstance(value, Mapping))

SECTIONS = ("model", "model.moe", "hardware", "parallel", "batch", "measured", "flags")
NEEDED = ("id", "source", "family", "kind")
"""Fields that every row has."""

FORMS: Mapping[str, Form] = {
    **dict.fromkeys(SECTIONS, _TABLE),
    **dict.fromkeys(NEEDED, _TEXT),
    **dict.fromkeys(
        ["source_ref", "url", "grade", "measured_type", "tier", "precision", "recompute", "schedule", "notes"], _TEXT
    ),
    **dict.fromkeys(
        ["model.name", "model.moe.attention", "hardware.gpu", "hardware.intra", "hardware.inter", "parallel.sharding"],
        _TEXT,
    ),
    **dict.fromkeys(("missing", "inferred"), _TEXTS),
    **dict.fromkeys(["complete_core", "complete_strict", "has_time", "has_memory", "parallel.sp"], _SWITCH),
    **dict.fromkeys(
        (f"model.{name}" for name in ["layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "seq"]),
        _SIZE,
    ),
    **dict.fromkeys((f"parallel.{name}" for name in ["tp", "pp", "vpp", "dp", "cp", "ep", "etp"]), _SIZE),
    **dict.fromkeys(["batch.micro", "batch.num_microbatches", "batch.global", "hardware.count"], _SIZE),
    **dict.fromkeys((f"model.moe.{name}" for name in ["experts", "topk", "moe_ffn", "shared_ffn"]), _SIZE),
    **dict.fromkeys(("model.moe.shared", "model.moe.dense_layers"), _COUNT),
    "model.params_b": _AMOUNT,
}
MEASURED_TEXTS = ("op", "algorithm", "unit", "shape", "shape_mnk")
"""Readings in words; so are those whose names end in `_text`."""

MEASURED_LISTS: Mapping[str, Form] = {
    "per_rank_max_allocated_mb": ("a list of numbers of at least 0", _is_readings),
    "step_s_per_run": ("a list of numbers of at least 0", _is_readings),
    "points_m_vs_time": (
        "a list of lists of numbers",
        lambda value: isinstance(value, list) and all(map(_is_readings, value)),
    ),
    "oom": _SWITCH,
}
"""Readings that are no single number."""

FLAG_TEXTS = ("fp8_recipe", "framework", "mp_mode", "pp_partition", "vocab_method")


def form_of(field: str) -> Form | None:
    """The form of a field by its dotted name; None for one that is not read."""
    section, _, name = field.partition(".")
    if section == "measured" and name:
        if name in MEASURED_TEXTS or name.endswith("_text"):
            return _TEXT
        return MEASURED_LISTS.get(name) or (_PERCENT if name.endswith("_pct") else _READING)
    if section == "flags" and name:
        return _TEXT if name in FLAG_TEXTS else _SWITCH
    return FORMS.get(field)


def wrong_forms(row: Any) -> list[str]:
    """A sentence for every field of a parsed row that is missing or has another form than it must have."""
    if not isinstance(row, Mapping):
        return [f"a row is one object, this is a {type(row).__name__}."]
    problems = [f"{name} is missing." for name in NEEDED if row.get(name) is None]
    return problems + _wrong(row, "")


def _wrong(table: Mapping[str, Any], before: str) -> list[str]:
    problems = []
    for name, value in table.items():
        form = form_of(f"{before}{name}")
        if form is None or value is None:
            continue
        words, fits = form
        if not fits(value):
            problems.append(f"{before}{name}={value!r} must be {words}.")
        elif isinstance(value, Mapping):
            problems += _wrong(value, f"{before}{name}.")
    return problems
