"""A table: values first, then text or markdown from the same rows."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.base import terminal


@dataclass(frozen=True)
class Table:
    """A title, a paragraph, a header and rows of cells."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def percent(value: float, signed: bool = False) -> str:
    """A share as a percentage with one decimal."""
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def to_text(table: Table, width: int | None = None) -> str:
    """A table for a terminal of `width` columns."""
    return "\n".join(
        [table.title, *([table.note] if table.note else []), *terminal.table([table.header, *table.rows], width)]
    )


def to_markdown(table: Table) -> str:
    """A table for the documentation."""
    lines = [
        " | ".join(cell.replace("|", "\\|") for cell in row)
        for row in (table.header, ("---",) * len(table.header), *table.rows)
    ]
    return "\n".join(
        [f"## {table.title}", "", *([table.note, ""] if table.note else []), *(f"| {line} |" for line in lines)]
    )
