"""Ticks at round numbers, and times as people read them: in seconds, or in units where durations are made up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...core.base.units import format_s

TimeUnit = Literal["s", "unit"]
"""`unit`: durations are relative, as in a schedule drawn with unit costs."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: its place in SI units and its text."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from zero to `end` (seconds or bytes) with its ticks and the unit that the tick texts are in."""

    end: float
    unit: str
    ticks: tuple[Tick, ...]


def time_axis(end_s: float, time_unit: TimeUnit = "s", num_ticks: int = 8) -> Axis:
    """About `num_ticks` ticks from 0 to `end_s`, in the largest unit that keeps the end above 1.

    >>> [tick.label for tick in time_axis(0.0033).ticks], time_axis(0.0033).unit
    (['0', '0.5', '1.0', '1.5', '2.0', '2.5', '3.0'], 'ms')
    """
    if time_unit == "unit":
        return _axis(end_s, 1.0, "units", num_ticks)
    scales = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    unit, scale = next(((unit, scale) for unit, scale in scales if end_s >= scale), scales[-1] if end_s else scales[0])
    return _axis(end_s, scale, unit, num_ticks)


def bytes_axis(end_bytes: float, num_ticks: int) -> Axis:
    """Ticks in the largest binary unit that keeps the end above 1."""
    scales = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
    unit, scale = next(((unit, scale) for unit, scale in scales if end_bytes >= scale), scales[-1])
    return _axis(end_bytes, scale, unit, num_ticks)


def _axis(end: float, scale: float, unit: str, num_ticks: int) -> Axis:
    if end <= 0:
        return Axis(end, unit, (Tick(0.0, "0"),))
    mantissa, exponent = round_step(end / scale / num_ticks)
    step = mantissa * 10.0**exponent
    count = math.floor(end / scale / step * (1 + 1e-9))
    decimals = max(0, -exponent)
    return Axis(
        end, unit, tuple(Tick(i * step * scale, f"{i * step:.{decimals}f}" if i else "0") for i in range(count + 1))
    )


def ticks_between(low: float, high: float, count: int) -> tuple[list[Tick], float]:
    """Round numbers from `low` to `high`, about `count`, and their distance."""
    mantissa, exponent = round_step((high - low) / count)
    step = mantissa * 10.0**exponent
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -exponent)
    return [Tick(n * step, f"{n * step:,.{decimals}f}") for n in range(first, last + 1)], step


def round_step(least: float) -> tuple[int, int]:
    """The smallest of 1, 2, 5 times a power of ten that is at least `least`, as (mantissa, exponent)."""
    exponent = math.floor(math.log10(least))
    for mantissa in (1, 2, 5):
        if mantissa * 10.0**exponent >= least * (1 - 1e-9):
            return mantissa, exponent
    return 1, exponent + 1


def format_time(seconds: float, time_unit: TimeUnit = "s") -> str:
    """A duration in words: `12.3 ms`, or `33 units`.

    >>> format_time(33.0, "unit"), format_time(0.0123)
    ('33 units', '12.3 ms')
    """
    if time_unit == "s":
        return format_s(seconds)
    return f"{seconds:.6g} unit{'' if seconds == 1 else 's'}"
