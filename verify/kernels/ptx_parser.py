"""The text of a PTX kernel as instructions, labels, registers and parameters, for those that carry it out: the reader
of protocols (`ptx_accesses`) and the floor "PTX executed" (`ptx_machine`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


class UnreadPTX(ValueError):
    """The text is not of one kernel, or a line of it is no instruction. The message has the line."""


@dataclass(frozen=True)
class Line:
    """One instruction: `guard` is the predicate under which a thread carries it out, as `%p1`, `!%p1` or empty."""

    guard: str
    opcode: str
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Program:
    """The one kernel of a text. `labels` are indices into `lines`; `registers` says of a register's name without its
    number, or of a whole name, which type it has; `parameters` are the types of the parameters in order, and
    `num_threads` is that of a block, 0 where the text does not say."""

    name: str
    lines: tuple[Line, ...]
    labels: Mapping[str, int]
    registers: Mapping[str, str]
    parameters: tuple[str, ...]
    num_threads: int

    def type_of(self, register: str) -> str | None:
        """The declared type of a register, such as `b32` or `pred`; None where it is not declared."""
        return self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))


_ENTRY = re.compile(r"\.visible \.entry (\w+)(.*?)\n\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)")
_NUM_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_INSTRUCTION = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$?\w+):(?!:)\s*")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_SKIPPED = re.compile(r"\.(loc|file|pragma|extern|shared)\b")


@cache
def parsed(ptx: str) -> Program:
    """The one kernel of a text. Lines of debug information are left out. Raises `UnreadPTX`."""
    entry = _ENTRY.search(ptx)
    if entry is None or ptx.count(".entry") != 1 or ".func" in ptx:
        raise UnreadPTX("no text of one kernel.")
    name, head, body = entry.groups()
    lines: list[Line] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    for text in (line.partition("//")[0].strip() for line in body.splitlines()):
        while found := _LABEL.match(text):
            labels[found.group(1)] = len(lines)
            text = text[found.end() :]
        if _SKIPPED.match(text):
            continue
        *statements, rest = text.split(";")
        for statement in statements:
            _read(statement.strip().removeprefix("{").strip(), lines, registers)
        if rest.strip(" \t{}"):
            raise UnreadPTX(f"{text}: no instruction that the reader knows.")
    num_threads = _NUM_THREADS.search(head)
    return Program(
        name=name,
        lines=tuple(lines),
        labels=labels,
        registers=registers,
        parameters=tuple(_PARAMETER.findall(head)),
        num_threads=int(num_threads.group(1)) if num_threads else 0,
    )


def _read(statement: str, lines: list[Line], registers: dict[str, str]) -> None:
    """One statement without its semicolon: an instruction, or a declaration of registers."""
    if found := _REGISTERS.match(statement):
        registers.update((name.split("<")[0].strip(), found.group(1)) for name in found.group(2).split(","))
    elif found := _INSTRUCTION.fullmatch(statement):
        guard, opcode, operands = found.groups()
        split = tuple(part.strip() for part in _OPERAND.findall(operands))
        lines.append(Line(guard or "", opcode, split, f"{' '.join(statement.split())};"))
    elif statement:
        raise UnreadPTX(f"{statement}: no instruction that the reader knows.")


@cache
def place(operand: str) -> tuple[str, int]:
    """Of `[ %rd1 + 4 ]` the register and the offset in bytes."""
    base, _, offset = operand.strip("[] ").partition("+")
    return base.strip(), int(offset or 0)


@cache
def registers(operand: str) -> tuple[str, ...]:
    """Of `{ %r1, %r2 }` or `%r1|%p1` the names."""
    return tuple(register.strip() for register in re.split(r"[,|]", operand.strip("{} ")))
