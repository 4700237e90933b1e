"""The conditions of a shell script, in three values: None is not known."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from .shell_values import Argument


@dataclass
class Condition:
    """A condition, in three values: None is not known."""

    words: list[Argument]

    def disjunction(self) -> bool | None:
        left = self.conjunction()
        while self._takes("||", "-o"):
            right = self.conjunction()
            left = True if True in (left, right) else None if None in (left, right) else False
        return left

    def conjunction(self) -> bool | None:
        left = self.term()
        while self._takes("&&", "-a"):
            right = self.term()
            left = False if False in (left, right) else None if None in (left, right) else True
        return left

    def _takes(self, *operators: str) -> bool:
        if self.words and self.words[0].text in operators:
            self.words.pop(0)
            return True
        return False

    def term(self) -> bool | None:
        if self._takes("!"):
            truth = self.term()
            return None if truth is None else not truth
        if self._takes("("):
            truth = self.disjunction()
            self._takes(")")
            return truth
        if not self.words:
            return False
        first = self.words.pop(0)
        if re.fullmatch(r"-[a-zA-Z]", first.text) and self.words and self.words[0].text not in ("&&", "||", ")"):
            return _unary(first.text, self.words.pop(0))
        if len(self.words) >= 2 and self.words[0].text in _COMPARISONS:
            operator, second = self.words.pop(0).text, self.words.pop(0)
            return _compared(operator, first, second)
        return None if first.unknown else bool(first.text)


def _unary(operator: str, operand: Argument) -> bool | None:
    if operator not in ("-z", "-n"):
        return None
    if any(piece.text and not piece.unknown for piece in operand.pieces):
        return operator == "-n"
    return None if operand.unknown else operator == "-z"


_COMPARISONS = ("==", "=", "!=", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "<", ">", "=~")


def _compared(operator: str, left: Argument, right: Argument) -> bool | None:
    if left.unknown or right.unknown or operator == "=~":
        return None
    if operator in ("==", "=", "!="):
        return fnmatch.fnmatchcase(left.text, right.text) == (operator != "!=")
    try:
        difference = int(left.text) - int(right.text)
    except ValueError:
        return None
    return {
        "-eq": difference == 0,
        "-ne": difference != 0,
        "-lt": difference < 0,
        "-le": difference <= 0,
        "-gt": difference > 0,
        "-ge": difference >= 0,
        "<": difference < 0,
        ">": difference > 0,
    }[operator]
