"""Seconds, bytes and rates as people read them. Formatting happens only at the edge; inside everything is SI."""

from __future__ import annotations

import math
import re

SIZE_RULE = "write a share of the whole below 100%, such as 8%, or bytes of at least 0, such as 4GiB, 500MB or 4e9."
"""What `size_of` takes."""

_SCALES = {"": 1, "B": 1, **{f"{letter}{'iB' if binary else 'B'}": (1024 if binary else 1000) ** power
                             for power, letter in enumerate("KMGT", start=1) for binary in (False, True)}}
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
    return int(number * _SCALES[unit]) if unit in _SCALES and math.isfinite(number) else None


def format_s(seconds: float) -> str:
    """`1.234 s`, `12.3 ms`, `4.5 us`: three significant digits and the unit that keeps the number above one."""
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def format_bytes(count: float) -> str:
    """Binary units: `512 B`, `1.50 KiB`, `61.2 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Decimal units for parameters, tokens and FLOPs: `70.6 B`, `512`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f}"
