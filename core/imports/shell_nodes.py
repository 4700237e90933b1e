"""What a shell script is made of: words with their parts, and commands. Parts keep the line they are written on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Characters as they stand, all of one line."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$name` or `${...}`: `index` is that of an array (`@`, `*` or a number), `operator` such as `:-`, and `argument`
    the word behind it. `written` is how it is spelled."""

    name: str
    line: int
    quoted: bool
    written: str
    index: str = ""
    operator: str = ""
    argument: Word = ()


@dataclass(frozen=True)
class Arithmetic:
    """`$(( ))`."""

    expression: Word
    line: int
    quoted: bool
    written: str


@dataclass(frozen=True)
class Opaque:
    """What would have to be executed to be known: `$( )`, backticks. `number` is set where an outer text has such a
    part."""

    written: str
    line: int
    quoted: bool
    number: int | None = None


Part = Text | Parameter | Arithmetic | Opaque
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value`, or with words in brackets an array."""

    name: str
    appends: bool
    value: Word | None
    array: tuple[Word, ...] | None
    line: int


@dataclass(frozen=True)
class Simple:
    """Assignments, then words; a here-document's words where it has one."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    here: Word = ()


@dataclass(frozen=True)
class AndOr:
    """Two commands joined by `&&` or `||`."""

    left: Command
    operator: str
    right: Command


@dataclass(frozen=True)
class Negated:
    """`! command`."""

    command: Command


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`."""

    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Group:
    """`{ }`, or in a shell of its own `( )`."""

    body: tuple[Command, ...]
    is_subshell: bool


@dataclass(frozen=True)
class If:
    """Pairs of condition and body, and the body of `else`."""

    branches: tuple[tuple[tuple[Command, ...], tuple[Command, ...]], ...]
    orelse: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class Case:
    """A word, and pairs of patterns and body."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Command, ...]], ...]
    line: int


@dataclass(frozen=True)
class For:
    """`for name in words`; without words it is not known over what it goes."""

    name: str
    words: tuple[Word, ...] | None
    body: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class While:
    """`while` and `until`."""

    condition: tuple[Command, ...]
    body: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class Function:
    """A definition."""

    name: str
    body: tuple[Command, ...]


Command = Simple | AndOr | Negated | Pipeline | Group | If | Case | For | While | Function

DECLARING = ("export", "declare", "local", "readonly", "typeset")
"""Commands whose arguments may be assignments."""

OPAQUE = "\0"
"""Opens and closes the number of a part that an outer text could not tell (`Opaque.number`)."""


class ShellSyntaxError(ValueError):
    """The text is not of the part of bash that is known."""

    def __init__(self, what: str, line: int):
        super().__init__(what)
        self.line = line
