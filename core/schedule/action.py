"""`Action`: one token of a schedule. The text form is that of torch.distributed.pipelining's CSV cells."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, overload

import numpy as np

from ..base.errors import ScheduleError


class Kind(enum.IntEnum):
    """What an action does. The name is the token that is printed."""

    F = 0  # forward
    B = 1  # full backward: input and weight gradients
    I = 2  # noqa: E741 - the field's letter for the input gradient
    W = 3  # weight gradient
    SEND_F = 4  # send this stage's output to the next stage
    RECV_F = 5  # receive this stage's input from the previous stage
    SEND_B = 6  # send the gradient of this stage's input to the previous stage
    RECV_B = 7  # receive the gradient of this stage's output from the next stage
    UNSHARD = 8  # gather this stage's parameters (ZeRO-3)
    RESHARD = 9  # free them
    REDUCE_GRAD = 10  # reduce this stage's gradients over data parallelism
    STEP = 11  # optimizer step of all of a rank's stages, written with the lowest of them
    OVERLAP_F_B = 12  # a forward and a full backward run together


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
PER_MICROBATCH = COMPUTE | SENDS | RECEIVES

_NUMBER = "([0-9]{1,9})"  # nine digits fit the int32 columns of an ActionArray
_SIMPLE = re.compile(_NUMBER + "(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|STEP|F|B|I|W)" + _NUMBER + "?")
_PAIR = re.compile(rf"\({_NUMBER}F{_NUMBER};{_NUMBER}B{_NUMBER}\)OVERLAP_F_B")
_KIND_OF_TOKEN = {kind.name: kind for kind in Kind}
_TAKES_MICROBATCH = {kind.name: kind in PER_MICROBATCH for kind in Kind}


CELL_FORM = "Write <stage><kind><microbatch>, such as 2F0, 1SEND_B3 or 0REDUCE_GRAD, or (2F3;5B1)OVERLAP_F_B."
"""How an action is written, for error messages."""


def parse_cell(text: str) -> tuple[int, int, int, int, int] | None:
    """The five columns of an `ActionArray` (-1 for None) that one cell stands for, or None when it is not an action.

    >>> parse_cell("2SEND_F5"), parse_cell("1STEP"), parse_cell("2F")
    ((2, 4, 5, -1, -1), (1, 11, -1, -1, -1), None)
    """
    cell = text.strip()
    if match := _SIMPLE.fullmatch(cell):
        stage, token, microbatch = match.groups()
        if (microbatch is not None) == _TAKES_MICROBATCH[token]:
            return int(stage), _KIND_OF_TOKEN[token].value, -1 if microbatch is None else int(microbatch), -1, -1
    elif match := _PAIR.fullmatch(cell):
        forward_stage, forward_microbatch, backward_stage, backward_microbatch = map(int, match.groups())
        return forward_stage, Kind.OVERLAP_F_B.value, forward_microbatch, backward_stage, backward_microbatch
    return None


@dataclass(frozen=True, slots=True)
class Action:
    """`(stage, kind, microbatch)`; `microbatch` is None for UNSHARD, RESHARD, REDUCE_GRAD and STEP.

    For OVERLAP_F_B `stage` and `microbatch` are those of the forward, `pair_stage` and
    `pair_microbatch` of the backward.

    >>> str(Action(2, Kind.SEND_F, 5)), str(Action(1, Kind.STEP)), str(Action.overlap(2, 3, 5, 1))
    ('2SEND_F5', '1STEP', '(2F3;5B1)OVERLAP_F_B')
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    pair_stage: int | None = None
    pair_microbatch: int | None = None

    @classmethod
    def overlap(
        cls, forward_stage: int, forward_microbatch: int, backward_stage: int, backward_microbatch: int
    ) -> Action:
        """A forward and a full backward that run together."""
        return cls(forward_stage, Kind.OVERLAP_F_B, forward_microbatch, backward_stage, backward_microbatch)

    @classmethod
    def from_str(cls, text: str) -> Action:
        """The inverse of `str`. Raises `ScheduleError` for anything that is not one action."""
        fields = parse_cell(text)
        if fields is None:
            raise ScheduleError(f"{text!r} is not an action. {CELL_FORM}")
        stage, kind, *rest = fields
        return cls(stage, Kind(kind), *(None if value < 0 else value for value in rest))

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward of an overlapped pair, or the action itself."""
        if self.kind is not Kind.OVERLAP_F_B:
            return (self,)
        assert self.pair_stage is not None
        return (Action(self.stage, Kind.F, self.microbatch), Action(self.pair_stage, Kind.B, self.pair_microbatch))

    def __str__(self) -> str:
        if self.kind is Kind.OVERLAP_F_B:
            forward, backward = self.parts
            return f"({forward};{backward})OVERLAP_F_B"
        return f"{self.stage}{self.kind.name}{'' if self.microbatch is None else self.microbatch}"


class ActionArray(Sequence[Action]):
    """Actions stored as five integer columns, because 25 million Python objects would not fit;
    `Action` is a view of one row.

    `stage`, `kind`, `microbatch`, `pair_stage`, `pair_microbatch` are int32 (kind int8) arrays of one
    length; -1 stands for None.
    """

    __slots__ = ("kind", "microbatch", "pair_microbatch", "pair_stage", "stage")

    def __init__(
        self,
        stage: np.ndarray,
        kind: np.ndarray,
        microbatch: np.ndarray,
        pair_stage: np.ndarray,
        pair_microbatch: np.ndarray,
    ):
        self.stage = _frozen(stage, np.int32)
        self.kind = _frozen(kind, np.int8)
        self.microbatch = _frozen(microbatch, np.int32)
        self.pair_stage = _frozen(pair_stage, np.int32)
        self.pair_microbatch = _frozen(pair_microbatch, np.int32)

    @classmethod
    def from_actions(cls, actions: Sequence[Action]) -> ActionArray:
        """Columns from objects."""

        def column(name: str) -> np.ndarray:
            return np.array(
                [-1 if (value := getattr(action, name)) is None else value for action in actions], dtype=np.int32
            )

        return cls(
            column("stage"), column("kind"), column("microbatch"), column("pair_stage"), column("pair_microbatch")
        )

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """The five columns in the order of the constructor."""
        return self.stage, self.kind, self.microbatch, self.pair_stage, self.pair_microbatch

    def take(self, index: np.ndarray | slice) -> ActionArray:
        """The rows that a numpy index selects."""
        return ActionArray(*(column[index] for column in self.columns))

    def __len__(self) -> int:
        return len(self.stage)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> ActionArray: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Action | ActionArray:
        if isinstance(index, slice):
            return self.take(index)
        kind = Kind(int(self.kind[index]))
        return Action(int(self.stage[index]), kind, *(_none(column[index]) for column in self.columns[2:]))

    def __iter__(self) -> Iterator[Action]:
        for stage, kind, *rest in zip(*(column.tolist() for column in self.columns), strict=True):
            yield Action(stage, Kind(kind), *(None if value < 0 else value for value in rest))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActionArray):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _frozen(column: np.ndarray, dtype: type) -> np.ndarray:
    column = np.ascontiguousarray(column, dtype=dtype)
    if column.flags.writeable:
        column = column.view()
        column.flags.writeable = False
    return column


def _none(value: np.integer) -> int | None:
    return None if value < 0 else int(value)
