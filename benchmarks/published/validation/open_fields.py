"""Fields that a source does not publish and public evidence leaves open: what the bias of the
source is with each value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..row import Row
from ..stacks import stack_of
from .predictions import predict_row
from .statistics import time_spread
from .table import Table, percent


@dataclass(frozen=True)
class OpenField:
    """Biases of a source by the value of a field; `default` is the value that the predictions have."""

    source: str
    name: str
    default: Any
    biases: tuple[tuple[Any, float], ...]


def open_fields(rows: Iterable[Row]) -> list[OpenField]:
    """Every field that a stack leaves open, on the rows that do not publish it."""
    found: dict[tuple[str, str], list[Row]] = {}
    values: dict[tuple[str, str], tuple[Any, tuple[Any, ...]]] = {}
    for row in rows:
        stack = stack_of(row)
        for name, others in (stack.left_open if stack else {}).items():
            assert stack is not None
            if row[name] is None:
                found.setdefault((row.source, name), []).append(row)
                values[row.source, name] = stack.defaults[name], others
    return [OpenField(*key, values[key][0], _biases(members, key[1], values[key][1])) for key, members in found.items()]


def _biases(rows: list[Row], name: str, values: tuple[Any, ...]) -> tuple[tuple[Any, float], ...]:
    spreads = [(value, time_spread(predict_row(row, {name: value}) for row in rows)) for value in values]
    return tuple((value, spread.bias) for value, spread in spreads if spread is not None)


def open_table(found: Iterable[OpenField]) -> Table:
    """Sources with their open fields, and the bias with each value."""
    rows = tuple(
        (
            one.source,
            one.name,
            str(one.default),
            ", ".join(f"{value}: {percent(bias, True)}" for value, bias in one.biases),
        )
        for one in found
    )
    note = (
        "Bias of a source with each value of a field that it does not publish, where public evidence admits more "
        "than one."
    )
    return Table("What unpublished fields leave open", note, ("source", "field", "predicted with", "bias with"), rows)
