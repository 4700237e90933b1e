"""Names and texts from outside in what is printed: they begin no line, move no cursor, and give GitHub no command.

The runner of GitHub Actions takes a line for a command that begins with `::` after white space, or has `##[` anywhere
(actions/runner, src/Runner.Common/ActionCommand.cs, `TryParseV2` and `TryParse`).
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

LONGEST_LINE = 1000
"""Characters of a line of an error message; longer ones come from values of a file, and are cut in the middle."""

MOST_LINES = 110
"""Of an error message; a schedule file has up to a hundred cells named, and what a cell is."""

_UNSEEN = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters but tabs, line separators, changes of direction, and halves of characters."""

_ANY = re.compile(f"[{_UNSEEN}]")
_BUT_NEWLINES = re.compile(rf"(?!\n)[{_UNSEEN}]")
_COMMAND = re.compile(r"^(\s*):(?=:)|##(?=\[)", re.MULTILINE)


def is_plain(text: str) -> bool:
    """Whether a text is one line without control characters, as names are."""
    return _ANY.search(text) is None


def is_plain_table(value: Any) -> TypeGuard[dict[str, str]]:
    """Whether a value from outside is a table of such texts by such names."""
    return isinstance(value, dict) and all(
        isinstance(text, str) and is_plain(text) for entry in value.items() for text in entry
    )


def one_line(text: str) -> str:
    r"""A name as it may stand in a sentence: control characters, line breaks among them, as escapes.

    >>> one_line("a\n\x1b[2J")
    'a\\n\\x1b[2J'
    """
    return _ANY.sub(_escape, text)


def printable(text: str) -> str:
    r"""Lines as they may be printed: control characters are escapes, and no line is a command of GitHub's.

    >>> printable("::error::x\na ##[error]y\x07")
    '\\::error::x\na #\\#[error]y\\x07'
    """
    return _COMMAND.sub(
        lambda found: f"{found[1]}\\:" if found[1] is not None else "#\\#", _BUT_NEWLINES.sub(_escape, text)
    )


def shortened(text: str) -> str:
    """`text` as it may be printed: its first `MOST_LINES` lines, and how many follow; of lines of more than
    `LONGEST_LINE` characters the beginning and the end, and how much lies between."""
    if len(text) <= MOST_LINES:
        return text
    lines = printable(text).split("\n")  # now, because escapes are longer
    more = [f"... and {len(lines) - MOST_LINES:,} more lines."] if len(lines) > MOST_LINES else []
    return "\n".join([*map(_cut, lines[:MOST_LINES]), *more])


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _cut(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    first, last = LONGEST_LINE * 6 // 10, LONGEST_LINE * 3 // 10
    return f"{line[:first]} ... {len(line) - first - last} characters ... {line[-last:]}"
