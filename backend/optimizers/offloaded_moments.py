"""`OffloadedMoments`: the moments that an update keeps of some tensors in host memory (`offload.optimizer`), Adam's two
or SGD's one, and with them the fp32 weights of those that rest there too (`offload.masters`).

Moments lie one behind the other, and come to the device in pieces: while one is updated, the next is on its way there
and the one before on its way back. The update is the device's own, on the same values, so its bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from ...core.program.offload import PIECE_ELEMENTS
from ..base.host_copies import HostCopies
from ..base.streams import Moment, wait_for

ALIGNED_ELEMENTS = 64
"""Every tensor begins at a multiple of this, and is cut at one."""


@dataclass(frozen=True)
class Part:
    """The elements `[lo, hi)` of a tensor, which lie at `place` in a piece."""

    tensor: int
    lo: int
    hi: int
    place: int


@dataclass(frozen=True)
class Piece:
    """The elements `[lo, hi)` of all moments, and which tensors' they are, of one group."""

    lo: int
    hi: int
    group: object
    parts: tuple[Part, ...]


class OffloadedMoments:
    """Zero at first."""

    def __init__(
        self,
        copies: HostCopies,
        shapes: Sequence[tuple[int, ...]],
        groups: Sequence[object],
        *,
        num_moments: int = 2,
        masters: Mapping[int, Tensor] = MappingProxyType({}),
        piece_elements: int | None = None,
    ):
        """`shapes` of the tensors; a piece has tensors of one group only, equal ones of which follow each other, and at
        most `piece_elements`, by default `PIECE_ELEMENTS`. `masters` has the fp32 weights, [n], of tensors whose
        weights come with the moments: of a group those of all or of none."""
        self._copies = copies
        self._masters = masters
        lengths = [math.prod(shape) for shape in shapes]
        padded = [-(-length // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for length in lengths]
        *begins, total = accumulate(padded, initial=0)
        self._host = [copies.empty(total, torch.float32).zero_() for _ in range(num_moments)]
        self._views = [
            tuple(row[begin : begin + length].view(shape) for row in self._host)
            for begin, length, shape in zip(begins, lengths, shapes, strict=True)
        ]
        self.pieces = _pieces(lengths, begins, groups, piece_elements or PIECE_ELEMENTS)
        self._sent: Moment = None

    def moments(self, tensor: int) -> tuple[Tensor, ...]:
        """Those of a tensor, in host memory, which the host may read after `settle`."""
        return self._views[tensor]

    def settle(self) -> None:
        """The host waits until all that was updated is there."""
        if self._sent is not None:
            self._sent.synchronize()

    def brought(self) -> Iterator[tuple[Piece, Tensor]]:
        """Every piece with its moments, and its weights where they come too as one row more, [rows, n] on the device,
        which go back as the caller leaves them. In the end the current stream comes after that."""
        coming = self._bring(self.pieces[0])
        leaving: list[tuple[Tensor, Moment]] = []  # held until the current stream comes after their copies
        for number, piece in enumerate(self.pieces):
            staged, moment = coming
            if number + 1 < len(self.pieces):
                coming = self._bring(self.pieces[number + 1])
            wait_for(moment, self._copies.device)
            yield piece, staged
            self._sent = self._copies.send(self._places(piece, staged))
            self._let_go(leaving)
            leaving.append((staged, self._sent))
            del staged
        self._let_go(leaving)

    def _let_go(self, leaving: list[tuple[Tensor, Moment]]) -> None:
        for _, moment in leaving:
            wait_for(moment, self._copies.device)
        leaving.clear()

    def _bring(self, piece: Piece) -> tuple[Tensor, Moment]:
        num_rows = len(self._host) + (piece.parts[0].tensor in self._masters)
        staged = torch.empty(num_rows, piece.hi - piece.lo, device=self._copies.device)
        return staged, self._copies.bring([(there, here) for here, there in self._places(piece, staged)])

    def _places(self, piece: Piece, staged: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where a piece lies in host memory and on the device."""
        places = [(row[piece.lo : piece.hi], each) for row, each in zip(self._host, staged, strict=False)]
        for part in piece.parts if len(staged) > len(self._host) else ():
            there = staged[-1, part.place : part.place + part.hi - part.lo]
            places.append((self._masters[part.tensor][part.lo : part.hi], there))
        return places


def _pieces(
    lengths: Sequence[int], begins: Sequence[int], groups: Sequence[object], piece_elements: int
) -> tuple[Piece, ...]:
    """All tensors in pieces of at most so many elements."""
    size = max(ALIGNED_ELEMENTS, piece_elements // ALIGNED_ELEMENTS * ALIGNED_ELEMENTS)
    pieces: list[list[Part]] = []
    first = 0
    for tensor, (length, begin) in enumerate(zip(lengths, begins, strict=True)):
        lo = 0
        while lo < length:
            if not pieces or begin + lo - first >= size or groups[pieces[-1][-1].tensor] != groups[tensor]:
                pieces.append([])
                first = begin + lo
            place = begin + lo - first
            hi = min(length, lo + size - place)
            pieces[-1].append(Part(tensor, lo, hi, place))
            lo = hi
    return tuple(
        Piece(begins[own[0].tensor] + own[0].lo, begins[own[-1].tensor] + own[-1].hi, groups[own[0].tensor], tuple(own))
        for own in pieces
    )


def num_offloaded(sizes: Sequence[int], share: float) -> int:
    """Of how many of the first tensors the bytes are at least this share of all.

    >>> num_offloaded([4, 4, 2], 0.5), num_offloaded([4, 4, 2], 0.0), num_offloaded([4, 4, 2], 1.0)
    (2, 0, 3)
    """
    wanted = share * sum(sizes)
    return next((number for number, before in enumerate(accumulate(sizes, initial=0)) if before >= wanted), len(sizes))
