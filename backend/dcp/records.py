"""What a pickle describes, read without making any of it: calls and objects become `Record`s, and nothing
is imported or executed.

It knows the instructions that Python writes for the metadata of `torch.distributed.checkpoint` and for single tensors
(pickletools documents them), and refuses all others.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Record:
    """A global `name` such as `torch.Size`, the arguments it would have been called with, and the state it
    would have been given."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


@dataclass(eq=False)
class _Pairs:
    """A dict, as keys may be records: kept in order, and looked up by nobody."""

    items: list[tuple[Any, Any]]


_MARK = object()
_BUILTIN: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
)
_IGNORED = frozenset({"PROTO", "FRAME"})


def read_records(content: bytes | bytearray) -> Any:
    """The value that a pickle describes; a dict is a list of pairs in a `_Pairs`. Raises `ValueError` for one that says
    anything else than metadata and tensors do."""
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(bytes(content)):
        if opcode.name == "STOP":
            if len(machine.stack) != 1:
                raise ValueError("the pickle ends with values left over")
            return machine.stack[0]
        machine.step(opcode.name, argument)
    raise ValueError("the pickle has no end")


def as_dict(value: Any) -> dict[str, Any]:
    """A pickled dict with names as its keys."""
    if not isinstance(value, _Pairs) or not all(isinstance(key, str) for key, _ in value.items):
        raise ValueError("there is no dict of names where one should be")
    return dict(value.items)


def pairs_of(value: Any) -> list[tuple[Any, Any]]:
    """The items of a pickled dict."""
    if not isinstance(value, _Pairs):
        raise ValueError("there is no dict where one should be")
    return value.items


class _Machine:
    """The stack and the memo of a pickle that is read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _LITERALS:
            stack.append(argument)
        elif name in _BUILTIN:
            stack.append(_BUILTIN[name])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise ValueError("the pickle asks for what it has not kept")
            stack.append(self._memo[argument])
        elif name in _MAKES:
            _MAKES[name](self, argument)
        else:
            raise ValueError(f"the pickle has the instruction {name}, which no metadata has")

    def _top(self) -> Any:
        return self.stack[-1] if self.stack and self.stack[-1] is not _MARK else self._refuse()

    def _pop(self, *kinds: type) -> Any:
        if not self.stack or self.stack[-1] is _MARK or (kinds and not isinstance(self.stack[-1], kinds)):
            self._refuse()
        return self.stack.pop()

    def _marked(self) -> list[Any]:
        """What has come since the last mark, which goes too."""
        values: list[Any] = []
        while self.stack and self.stack[-1] is not _MARK:
            values.append(self.stack.pop())
        if not self.stack:
            self._refuse()
        self.stack.pop()
        return values[::-1]

    def _refuse(self) -> Any:
        raise ValueError("the pickle uses values that are not there")

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self.stack.append(tuple(values[::-1]))

    def _global(self, argument: str | None) -> None:
        if argument is None:
            name, module = self._pop(str), self._pop(str)
            argument = f"{module} {name}"
        self.stack.append(Record(argument.replace(" ", ".", 1)))

    def _call(self) -> None:
        args, called = self._pop(tuple), self._pop(Record)
        self.stack.append(Record(called.name, args))

    def _build(self) -> None:
        state = self._pop()
        if not isinstance(record := self._top(), Record):
            self._refuse()
        record.state = state

    def _append(self, values: list[Any]) -> None:
        if not isinstance(into := self._top(), list):
            self._refuse()
        into.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        if not isinstance(into := self._top(), _Pairs) or len(values) % 2:
            self._refuse()
        into.items.extend(zip(values[::2], values[1::2], strict=True))


_MAKES: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "EMPTY_DICT": lambda machine, _: machine.stack.append(_Pairs([])),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine._marked())),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._global,
    "REDUCE": lambda machine, _: machine._call(),
    "NEWOBJ": lambda machine, _: machine._call(),
    "BUILD": lambda machine, _: machine._build(),
    "BINPERSID": lambda machine, _: machine.stack.append(Record("persistent", (machine._pop(),))),
    "APPEND": lambda machine, _: machine._append([machine._pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._marked()),
    "SETITEM": lambda machine, _: machine._set_items([machine._pop(), machine._pop()][::-1]),
    "SETITEMS": lambda machine, _: machine._set_items(machine._marked()),
}
