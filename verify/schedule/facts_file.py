"""Facts about a training stack as a TOML file, for `verify --facts`. Every table is optional:

[memory]       stage_bytes = [8, 8]         capacity_bytes = [32, 16] [messages]     outputs = ["bf16[1,4096,8192]", ""]
inputs = ["", "bf16[1,4096,8192]"] [buffers]      outputs = 2      inputs = [4, 3]      recv_buffers = 2      (also
activations, output_gradients, input_gradients) [layers]       model = 4 or ["embedding", "layers.0", ...]      stages =
[["embedding", "layers.0"], ["layers.1", "head"]] [collectives]  file = "calls.csv"      (one line per global rank, see
`verify.schedule.calls`)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.base.errors import ScheduleError, did_you_mean
from ...core.base.files import TABLE_BYTES, read_text
from ...core.base.names import is_plain
from ...core.base.parsing import parse_toml
from ...core.model.blocks import layer_prefix
from .calls import Calls, calls_from_csv
from .facts import BUFFER_KINDS, ActivationMemory, Buffers, Facts, LayerHoldings, MessageFormats
from .plan_facts import gradient_axes

if TYPE_CHECKING:
    from ...core.plan.plan import Plan
    from ...core.schedule.schedule import Schedule


def read_facts(path: str, schedule: Schedule, plan: Plan | None = None) -> Facts:
    """The facts in a file, for a schedule (and the plan it belongs to, which `[collectives]` needs).

    Raises `ScheduleError` with every problem of the file; `OSError` when it cannot be read.
    """
    return facts_from_toml(read_text(path), schedule, plan, source=path)


def facts_from_toml(text: str, schedule: Schedule, plan: Plan | None = None, *, source: str = "facts.toml") -> Facts:
    """The same from a text; paths in it start at the folder of `source`."""
    tables = parse_toml(text, source)
    problems: list[str] = []
    for name, table in tables.items():
        known = _TABLES.get(name)
        if known is None or not isinstance(table, dict):
            problems.append(
                f"{source}: unknown table [{name}]{did_you_mean(name, list(_TABLES))} Known: {', '.join(_TABLES)}."
            )
            continue
        problems += [
            f"{source}: unknown key {name}.{key}{did_you_mean(key, known)} Known: {', '.join(known)}."
            for key in table
            if key not in known
        ]
        required = () if name == "buffers" else known
        problems += [f"{source}: [{name}] lacks {key}." for key in required if key not in table]
        problems += [
            f"{source}: {name}.{key}={value!r} must be {form}."
            for key, value in table.items()
            for form, fits in [_FORMS.get(f"{name}.{key}", _FORMS[name])]
            if key in known and not fits(value)
        ]
    if problems:
        raise ScheduleError("\n".join(problems))
    return Facts(
        memory=ActivationMemory(**_tuples(tables["memory"])) if "memory" in tables else None,
        messages=MessageFormats(**_tuples(tables["messages"])) if "messages" in tables else None,
        buffers=Buffers(**_tuples(tables["buffers"])) if "buffers" in tables else None,
        layers=_layers(tables["layers"]) if "layers" in tables else None,
        collectives=_calls(tables["collectives"]["file"], schedule, plan, source) if "collectives" in tables else None,
    )


def _layers(table: dict[str, Any]) -> LayerHoldings:
    model = table["model"]
    names = ["embedding", *(layer_prefix(layer) for layer in range(model)), "head"] if isinstance(model, int) else model
    return LayerHoldings(tuple(names), _tuple(table["stages"]))


def _calls(file: str, schedule: Schedule, plan: Plan | None, source: str) -> Calls:
    if plan is None:
        raise ScheduleError(
            f"{source}: [collectives] needs a plan, whose layout says who calls together. Verify a plan.toml."
        )
    path = Path(source).parent / file
    axes = [gradient_axes(plan, stage) for stage in range(schedule.num_stages)]
    return calls_from_csv(
        read_text(path, most_bytes=TABLE_BYTES), plan.layout, schedule.placement, name=str(path), gradient_axes=axes
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62


def _is_count(value: object) -> bool:
    return _is_int(value) and value >= 0  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_plain(value)


def _is_list(value: object, item: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(item(each) for each in value)


def _is_ints(value: object) -> bool:
    return _is_list(value, _is_int)


def _is_texts(value: object) -> bool:
    return _is_list(value, _is_text)


_TABLES: dict[str, tuple[str, ...]] = {
    "memory": ("stage_bytes", "capacity_bytes"),
    "messages": ("outputs", "inputs"),
    "buffers": (*BUFFER_KINDS, "recv_buffers"),
    "layers": ("model", "stages"),
    "collectives": ("file",),
}
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "memory": ("a list of whole numbers", _is_ints),
    "messages": ("a list of texts, one per stage", _is_texts),
    "buffers": (
        "a ring size, one per stage, or for each stage the slot of every microbatch",
        lambda value: _is_int(value) or _is_ints(value) or _is_list(value, _is_ints),
    ),
    "buffers.recv_buffers": ("a whole number of at least 0", _is_count),
    "layers": ("a list of layers for each stage", lambda value: _is_list(value, _is_texts)),
    "layers.model": (
        "a number of transformer layers or a list of names",
        lambda value: _is_count(value) or _is_texts(value),
    ),
    "collectives": ("the name of a CSV file", _is_text),
}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _tuple(value) for key, value in table.items()}
