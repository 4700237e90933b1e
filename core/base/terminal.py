"""Text within the terminal's width: sentences wrapped, tables laid out again. Nothing is cut: what does not
fit goes on the next line.

The width is COLUMNS where it is set, else that of the terminal that a stream writes to, 80 where the terminal does not
say. A pipe and a file have none: `grep` finds whole sentences and rows there, and what is written does not depend on
who looks. Scripts have --json.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TextIO

from .names import printable

Text = str | Callable[[int | None], str]
"""What is said: sentences, which are wrapped, or what makes the text for a width (None: as wide as it comes)."""

Row = Sequence[str]

USUAL = 80
"""Columns of a terminal that does not say how many it has."""

NARROWEST = 40
"""Narrower text is harder to read than lines that the terminal breaks."""

GAP = 2
"""Spaces between the columns of a table."""

LEAST_PROSE = 24
"""Columns that sentences in a table are wrapped to at least; with fewer they go on lines of their own."""


_COMMAND = re.compile("`[^`]+`")
"""What is copied as a whole, a command in a sentence, and not wrapped where it fits a line."""

_NO_BREAK = "\x1f"
"""Stands for the spaces in it meanwhile."""


def width_of(stream: TextIO) -> int | None:
    """Characters that a line written to `stream` may have; None for a pipe or a file, where
    lines may have any length."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and len(columns) < 6 and int(columns) > 0:
        return max(int(columns), NARROWEST)
    try:
        return max(os.get_terminal_size(stream.fileno()).columns or USUAL, NARROWEST) if stream.isatty() else None
    except (OSError, ValueError):  # a terminal that was closed, or a stream that only says it is one
        return USUAL


def say(text: Text, stream: TextIO | None = None, *, flush: bool = False) -> None:
    """Prints `text` within the width of `stream`, which is standard output if left out. What names from outside hold of
    control characters and commands is escaped (`names.printable`)."""
    stream = sys.stdout if stream is None else stream
    print(printable(fitted(text, width_of(stream))), file=stream, flush=flush)


def fitted(text: Text, width: int | None) -> str:
    """`text` in lines of at most `width` characters; words that are longer, such as paths and addresses, stay whole."""
    made = text if isinstance(text, str) else text(width)
    return made if width is None else "\n".join(part for line in made.split("\n") for part in _wrapped(line, width))


def command_text(command: str, width: int | None, indent: str = "  ") -> str:
    """A command to copy: its lines end in a backslash where it goes on."""
    if width is None or len(indent) + len(command) <= width:
        return indent + command
    return " \\\n".join(_wrapped(indent + command, width - 2, hang=4))


def table(rows: Sequence[Row], width: int | None, *, indent: int = 2) -> list[str]:
    """Rows as aligned lines. Where they are too wide, sentences are wrapped within their column, and if that is not
    enough the last columns go on lines of their own below the first."""
    if not rows:
        return []
    natural = _natural(rows)
    if width is None or _total(natural) <= width - indent:
        return [line for row in rows for line in _cells(row, natural, indent)]
    widths = _squeezed(rows, natural, width - indent)
    if _total(widths) <= width - indent:
        return [line for row in rows for line in _cells(row, widths, indent)]
    widths = [min(each, width - 2 * GAP - indent) for each in natural]
    first, *others = _groups(widths, width - 2 * GAP - indent)
    lines = []
    for row in rows:
        lines += _cells(row[first], widths[first], indent)
        for below in others:
            lines += _cells(row[below], widths[below], indent + 2 * GAP) if any(row[below]) else []
    return lines


def ranking(header: Row, rows: Sequence[Row], width: int | None) -> list[str]:
    """A table of alternatives. Where it is too wide, what all of them have in common is said once below it instead, and
    if that is not enough its columns are nearer to each other."""
    whole = [header, *rows]
    if width is None or _total(_natural(whole)) <= width - 2:
        return table(whole, width)
    constant = {i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) == 1 and len(rows) > 1}
    shown = [[cell for i, cell in enumerate(row) if i not in constant] for row in whole]
    common = ", ".join(f"{header[i]} {rows[0][i]}" for i in sorted(constant))
    said = ["", *_wrapped(f"All of them: {common}.", width)] if constant else []
    widths = _natural(shown)
    if _total(widths) > width - 2 >= _total(widths, 1):
        return [*(line for row in shown for line in _cells(row, widths, 2, 1)), *said]
    return [*table(shown, width), *said]


def _natural(rows: Sequence[Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _total(widths: Sequence[int], gap: int = GAP) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _squeezed(rows: Sequence[Row], natural: Sequence[int], room: int) -> list[int]:
    """The widths of columns, the widest with sentences made narrower until all have room, or no column
    can be made narrower."""
    least = [
        min(whole, max(LEAST_PROSE, *(len(word) for cell in column for word in cell.split(" "))))
        for whole, column in zip(natural, zip(*rows, strict=True), strict=True)
    ]
    widths = list(natural)
    while _total(widths) > room:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[widest] <= least[widest]:
            break
        widths[widest] -= 1
    return widths


def _groups(widths: Sequence[int], room: int) -> list[slice]:
    """The columns that stand on one line, line by line."""
    starts = [0]
    for i in range(1, len(widths)):
        if _total(widths[starts[-1] : i + 1]) > room:
            starts.append(i)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(widths)], strict=True)]


def _cells(row: Row, widths: Sequence[int], indent: int, gap: int = GAP) -> list[str]:
    """One row, on as many lines as its longest cell takes."""
    parts = [_wrapped(cell, width, hang=0) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for i in range(max(map(len, parts))):
        cells = (part[i] if i < len(part) else "" for part in parts)
        padded = (" " * gap).join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(" " * indent + padded)
    return [line.rstrip() for line in lines]


def _wrapped(line: str, width: int, hang: int = 2) -> list[str]:
    """A line in parts of at most `width` characters, those after the first indented by `hang` more."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip(" "))]
    below = indent + " " * hang
    whole = _COMMAND.sub(
        lambda found: found[0].replace(" ", _NO_BREAK) if len(found[0]) <= width - len(below) else found[0],
        line.strip(" "),
    )
    parts = textwrap.wrap(
        whole, width, initial_indent=indent, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )
    return [part.replace(_NO_BREAK, " ") for part in parts]
