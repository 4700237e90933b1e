"""Seconds, bytes and rates as people read them. Formatting happens only at the edge; inside everything is SI."""

from __future__ import annotations

import math
import re

SIZE_RULE = (
    "write a share of the whole below 100%, such as 8%, or bytes, such as 4GiB, 500MB or 4e9 (from 1e6 on "
    "without a unit)."
)
"""What `size_of` takes. A small number without a unit is rather a share than bytes, so it is refused."""

_SCALES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?) ?(?P<unit>%|[KMGT]?i?B)?", re.ASCII)


def size_of(text: str, whole_bytes: float) -> int | None:
    """Bytes that a text says, as a share of a whole or with a unit; None for a text that says none.

    >>> size_of("8%", 1000), size_of("4GiB", 0), size_of("4e9", 0), size_of("much", 0)
    (80, 4294967296, 4000000000, None)
    """
    if (found := _SIZE.fullmatch(text)) is None:
        return None
    number, unit = float(found["number"]), found["unit"] or ""
    if unit == "%":
        return int(whole_bytes * number / 100) if number < 100 else None
    if unit not in _SCALES or not math.isfinite(number * _SCALES[unit]) or (not unit and 0 < number < 1e6):
        return None
    return int(number * _SCALES[unit])


def format_s(seconds: float) -> str:
    """Four significant digits and the unit that keeps the number above one; from 10,000 s on whole seconds.

    >>> format_s(1.2343), format_s(0.0123), format_s(131600.4)
    ('1.234 s', '12.3 ms', '131,600 s')
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 9999.5:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def format_bytes(count: float) -> str:
    """Binary units: `512 B`, `1.5 KiB`, `61.2 GiB`, `1012 MiB`."""
    for unit, scale in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            number = count / scale
            return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:.0f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Decimal units for parameters, tokens and FLOPs.

    >>> format_count(70.6e9), format_count(512), format_count(0.0622)
    ('70.6 B', '512', '0.0622')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g}" if abs(count) < 100 else f"{count:.0f}"
