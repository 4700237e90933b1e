"""Seconds, bytes and rates as people read them. Formatting happens only at the edge; inside everything is SI."""

from __future__ import annotations


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
