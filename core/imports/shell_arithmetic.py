"""Arithmetic of whole numbers in a shell script, and what `${ }` makes of a value."""

from __future__ import annotations

import fnmatch
import re

from .shell_values import Environment, text_of

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(\*\*|<=|>=|==|!=|&&|\|\||[-+*/%()<>!?:]))")

_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%"))


def evaluate(text: str, environment: Environment) -> int:
    """The value of an arithmetic expression. Raises ValueError for what is not known, or no expression."""
    tokens: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"{text} is no arithmetic that is understood")
        tokens.append(found[0].strip())
        position = found.end()
    value = _level(tokens, 0, environment, text)
    if tokens:
        raise ValueError(f"{text} is no arithmetic that is understood")
    return value


def _level(tokens: list[str], level: int, environment: Environment, text: str) -> int:
    if level == len(_LEVELS):
        return _atom(tokens, environment, text)
    left = _level(tokens, level + 1, environment, text)
    while tokens and tokens[0] in _LEVELS[level]:
        operator = tokens.pop(0)
        right = _level(tokens, level + 1, environment, text)
        if operator in "/%" and right == 0:
            raise ValueError(f"{text} divides by zero")
        left = _operated(operator, left, right)
    return left


def _operated(operator: str, left: int, right: int) -> int:
    """Whole numbers as bash computes with them, which rounds quotients towards zero."""
    if operator in "/%":
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if operator == "/" else left - right * quotient
    return int(
        {
            "||": bool(left or right),
            "&&": bool(left and right),
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            "<=": left <= right,
            ">": left > right,
            ">=": left >= right,
            "+": left + right,
            "-": left - right,
            "*": left * right,
        }[operator]
    )


def _atom(tokens: list[str], environment: Environment, text: str) -> int:
    token = tokens.pop(0) if tokens else ""
    if token in ("-", "+", "!"):
        value = _atom(tokens, environment, text)
        return -value if token == "-" else value if token == "+" else int(not value)
    if token == "(":
        value = _level(tokens, 0, environment, text)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError(f"{text} is no arithmetic that is understood")
    elif token.isdigit():
        value = int(token)
    else:
        value = _variable(token, environment, text)
    if tokens and tokens[0] == "**":
        tokens.pop(0)
        power = _atom(tokens, environment, text)
        if not 0 <= power <= 64 or abs(value) > 2**32:
            raise ValueError(f"{text} is too large")
        return value**power
    return value


def _variable(name: str, environment: Environment, text: str) -> int:
    value = environment.get(name)
    if not name.isidentifier() or value is None:
        raise ValueError(f"${name} is not set in the script" if name.isidentifier() else f"{text} is no arithmetic")
    pieces = value if isinstance(value, tuple) else value[0] if value else ()
    if why := next((piece.unknown for piece in pieces if piece.unknown), ""):
        raise ValueError(why)
    written = text_of(pieces).strip()
    if not re.fullmatch(r"-?\d{1,18}", written):
        raise ValueError(f"${name} is {written!r}, which is no whole number")
    return int(written)


def changed(operator: str, value: str, argument: str, environment: Environment) -> str | None:
    """A value behind an operator of `${ }`; None for one that is not known."""
    if operator == "#" and not argument:
        return str(len(value))
    if operator in ("#", "##", "%", "%%"):
        return _trimmed(operator, value, argument)
    if operator in ("/", "//"):
        pattern, _, new = argument.partition("/")
        if set("*?[") & {*pattern} or not pattern:
            return None
        return value.replace(pattern, new, -1 if operator == "//" else 1)
    if operator == ":":
        start, _, length = argument.partition(":")
        try:
            first = evaluate(start, environment)
            return value[first:] if not length else value[first:][: evaluate(length, environment)]
        except ValueError:
            return None
    cases = {"^^": value.upper(), ",,": value.lower(), "^": value[:1].upper() + value[1:]}
    return cases.get(operator) if not argument else None


def _trimmed(operator: str, value: str, pattern: str) -> str:
    """The value without the shortest or longest beginning or end that a pattern matches."""
    ends = range(len(value) + 1)
    lengths = ends if len(operator) == 1 else reversed(ends)
    for length in lengths:
        part = value[:length] if operator[0] == "#" else value[len(value) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return value[length:] if operator[0] == "#" else value[: len(value) - length]
    return value
