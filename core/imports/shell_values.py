"""Values in a shell script: characters with their lines, and why some of them are not known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Piece:
    """Characters of one line. `unknown` says why they are not known, and `text` is then how they are written; of pieces
    that branches set differently, `alternatives` are what each sets."""

    text: str
    line: int
    quoted: bool = False
    unknown: str = ""
    alternatives: tuple[Pieces, ...] = ()


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Argument:
    """One argument of a command."""

    pieces: Pieces

    @property
    def text(self) -> str:
        """As far as it is known; what is not is as the script has it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def line(self) -> int:
        """The line where it begins."""
        return next((piece.line for piece in self.pieces if piece.text), self.pieces[0].line if self.pieces else 0)

    @property
    def unknown(self) -> str:
        """Why it is not known; empty where it is."""
        return next((piece.unknown for piece in self.pieces if piece.unknown), "")

    @property
    def alternatives(self) -> tuple[Pieces, ...]:
        """What the branches of an undecided condition make of it, where it is nothing else."""
        return self.pieces[0].alternatives if len(self.pieces) == 1 else ()


Array = list[Pieces]
Environment = dict[str, "Pieces | Array"]
"""Variable -> its value: one, or those of an array."""


def words_of(pieces: Iterable[Piece]) -> tuple[Argument, ...]:
    """Text that is split at its blanks; what is not known stays whole."""
    found: list[list[Piece]] = [[]]
    for piece in pieces:
        if piece.unknown:
            found[-1].append(piece)
            continue
        for letters in re.findall(r"\s+|\S+", piece.text):
            if letters.isspace():
                found.append([])
            else:
                found[-1].append(Piece(letters, piece.line))
    return tuple(Argument(tuple(each)) for each in found if each)


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def spaced(values: Sequence[Pieces]) -> Pieces:
    """Values with a blank between them."""
    joined: list[Piece] = []
    for number, pieces in enumerate(values):
        if number:
            joined.append(Piece(" ", pieces[0].line if pieces else 0))
        joined += pieces
    return tuple(joined)


def differs(name: str, where: str, why: str) -> Piece:
    """The piece that stands for a variable which branches set differently."""
    cause = (
        f"{why}, and {where} sets ${name} by it" if why else f"${name} is set by {where}, whose condition is not known"
    )
    return Piece(f"${name}", int(where.split()[1]), unknown=cause)


def common_array(values: Sequence[Array], piece: Piece) -> Array:
    """The elements that all begin with, and one for what they differ in."""
    same = _common_length(values)
    rest = tuple(spaced(value[same:]) for value in values)
    return [*values[0][:same], (replace(piece, alternatives=rest),)]


def common_text(values: Sequence[Pieces], piece: Piece, unset: Sequence[bool]) -> Pieces:
    same = _common_length(values) if not any(unset) else 0
    rest = tuple(tuple(value[same:]) for value in values)
    return (*values[0][:same], replace(piece, alternatives=rest))


def _common_length(values: Sequence[Sequence[object]]) -> int:
    shortest = min(map(len, values))
    return next(
        (number for number in range(shortest) if any(value[number] != values[0][number] for value in values)), shortest
    )
