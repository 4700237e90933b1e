"""`WholeMatrices`: matrices that ranks hold in parts, each brought to one rank whole, changed there and sent back.

All ranks of a group know who holds what, exchanged once as JSON. Every matrix has an owner (`core.program.orthogonal`).
In a round every rank is the owner of one matrix at most, so that what is there besides the parts is one matrix a rank.
Ranks with equal parts send one of them and get all.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.program.orthogonal import Matrix, owned_matrices
from ..transport.base import Group
from ..transport.gather_values import gather_values
from .held import Held

Box = tuple[int, int, int, int]
"""First row and the one behind the last, first column and the one behind the last."""


@dataclass(frozen=True)
class Place:
    """A box of a matrix in what a rank holds: the tensor with a number there, of experts one of them."""

    box: Box
    number: int
    expert: int | None

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        first_row, last_row, first_column, last_column = self.box
        return (last_row - first_row) * (last_column - first_column)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The box in the tensors that the rank holds."""
        tensor = tensors[self.number]
        return tensor if self.expert is None else tensor[self.expert]

    def within(self, whole: Tensor) -> Tensor:
        """The box in the whole matrix."""
        first_row, last_row, first_column, last_column = self.box
        return whole[first_row:last_row, first_column:last_column]


@dataclass
class _Spread:
    """Who holds a matrix: by member what it has; by box the members that have it and count, the first first; and by
    member what it sends to the owner."""

    shape: tuple[int, int]
    places: dict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))
    counted: dict[Box, int] = field(default_factory=dict)
    sent: dict[int, list[Place]] = field(default_factory=dict)

    def send_to(self, owner: int) -> None:
        """Every box is sent once: by the owner where it has it, which is no sending, else by the first that counts."""
        own = {place.box for place in self.places.get(owner, ())}
        senders = {box: owner if box in own else member for box, member in self.counted.items()}
        for member, places in self.places.items():
            self.sent[member] = [place for place in places if senders.get(place.box) == member]


class WholeMatrices:
    """What the members of a group hold of matrices. All members make the same calls together."""

    def __init__(self, group: Group, held: Sequence[Held], cost: Callable[[str], int], device: torch.device):
        """`held` are this rank's parts; `cost` says what changing a matrix of the parameter of a name costs its owner.
        Raises `ValueError` when parts overlap or leave some of a matrix out."""
        self.group = group
        self._device = device
        everyone = gather_values(group, [_described(one) for one in held], device)
        self._spreads = _spreads(everyone)
        self._owned = owned_matrices({matrix: cost(matrix[0]) for matrix in self._spreads}, group.size)
        for member, matrices in enumerate(self._owned):
            for matrix in matrices:
                self._spreads[matrix].send_to(member)

    @property
    def rounds(self) -> Iterator[tuple[Matrix | None, ...]]:
        """By round the matrix of each member."""
        return itertools.zip_longest(*self._owned)

    def changed(self, tensors: Sequence[Tensor], change: Callable[[str, Tensor], Tensor]) -> None:
        """Writes into `tensors`, this rank's parts in the order of `held`, what `change(name, whole matrix)` makes of
        each matrix."""
        for matrices in self.rounds:
            own = matrices[self.group.rank]
            whole = self._gathered(tensors, matrices)
            made = None if own is None or whole is None else change(own[0], whole)
            self._sent_back(tensors, matrices, made)

    def _gathered(self, tensors: Sequence[Tensor], matrices: Sequence[Matrix | None]) -> Tensor | None:
        here, own = self.group.rank, matrices[self.group.rank]
        parts = [
            self._flat([] if matrix is None else [each.of(tensors) for each in self._sent(matrix, here)])
            for matrix in matrices
        ]
        senders = [[] if own is None else self._sent(own, member) for member in range(self.group.size)]
        arrived = self.group.all_to_all(parts, _shapes(senders))
        if own is None:
            return None
        whole = parts[here].new_empty(self._spreads[own].shape)
        for places, values in zip(senders, arrived, strict=True):
            for place, part in zip(places, values.split([each.num_elements for each in places]), strict=True):
                target = place.within(whole)
                target.copy_(part.view(target.shape))
        return whole

    def _sent_back(self, tensors: Sequence[Tensor], matrices: Sequence[Matrix | None], made: Tensor | None) -> None:
        here, own = self.group.rank, matrices[self.group.rank]
        members = range(self.group.size)
        holders = [[] if own is None else self._spreads[own].places.get(member, []) for member in members]
        parts = [self._flat([each.within(made) for each in places] if made is not None else []) for places in holders]
        wanted = [[] if matrix is None else self._spreads[matrix].places.get(here, []) for matrix in matrices]
        arrived = self.group.all_to_all(parts, _shapes(wanted))
        for places, values in zip(wanted, arrived, strict=True):
            for place, part in zip(places, values.split([each.num_elements for each in places]), strict=True):
                target = place.of(tensors)
                target.copy_(part.view(target.shape))

    def _flat(self, boxes: Sequence[Tensor]) -> Tensor:
        return torch.cat([box.reshape(-1) for box in boxes]) if boxes else torch.empty(0, device=self._device)

    def _sent(self, matrix: Matrix, member: int) -> list[Place]:
        return self._spreads[matrix].sent.get(member, [])


Described = tuple[str, Sequence[int], Sequence[Sequence[int]], bool]
"""Of a part: its parameter and that one's shape, where the part begins and ends in each dimension, and whether it is
the one that counts where ranks cut in different places."""


def _described(one: Held) -> Described:
    return one.name, one.parameter.shape, [[part.start, part.stop] for part in one.slices], one.counts


def _spreads(everyone: Sequence[Sequence[Described]]) -> dict[Matrix, _Spread]:
    found: dict[Matrix, _Spread] = {}
    for member, described in enumerate(everyone):
        for number, (name, shape, slices, counts) in enumerate(described):
            *stack, rows, columns = slices
            box = rows[0], rows[1], columns[0], columns[1]
            for expert in range(*stack[0]) if stack else (0,):
                spread = found.setdefault((name, expert), _Spread((shape[-2], shape[-1])))
                place = Place(box, number, expert - stack[0][0] if stack else None)
                spread.places[member].append(place)
                if counts:
                    spread.counted.setdefault(box, member)
    for (name, _), spread in found.items():
        num_elements = sum((last - first) * (end - begin) for first, last, begin, end in spread.counted)
        if num_elements != math.prod(spread.shape):
            raise ValueError(f"a matrix of {name} has {math.prod(spread.shape)} elements, and parts {num_elements}.")
    return found


def _shapes(by_member: Sequence[Sequence[Place]]) -> list[tuple[int, ...]]:
    return [(_count(places),) for places in by_member]


def _count(places: Sequence[Place]) -> int:
    return sum(each.num_elements for each in places)
