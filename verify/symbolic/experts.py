"""Experts in gradient reductions and the optimizer step on expressions: the same ranks on the expert grid;
see `symbolic_reduction`.

Arrays are [tp, dp, ...] as there. A *copy* of the experts is the ranks of one etp x ep grid: a rank's expert gradients
are of the tokens of all ranks of its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ...core.layout.layout import Layout
from ...core.program import Collective
from .expressions import MODULUS, digest
from .tensors import MisfitError

EXPERT_AXES = ("edp", "expert_replica")
"""Axes over which REDUCE_GRAD adds and gathers what experts have."""

Digest = Callable[[tuple[object, ...], int], int]
"""`digest(name, tp_rank)`: what a tensor-parallel rank's tokens give to a gradient of that name."""


class ExpertGrid:
    """The tensor-, context- and data-parallel ranks of a pipeline rank, by their place on the expert grid.

    Data-parallel ranks are counted with their context-parallel ones as the fastest axis, as in `symbolic_reduction`.
    """

    def __init__(self, layout: Layout):
        self.layout = layout

    @property
    def num_parts(self) -> int:
        """Parts into which data and context parallelism cut the tokens."""
        return self.layout.dp * self.layout.cp

    @cached_property
    def places(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """(tp rank, dp rank) -> (copy, ep rank, etp rank)."""
        found = {}
        for t, d in np.ndindex(self.layout.tp, self.num_parts):
            dp_rank, cp_rank = divmod(d, self.layout.cp)
            place = self.layout.expert_coordinates(self.layout.global_rank(tp=t, cp=cp_rank, dp=dp_rank))
            found[t, d] = place["dp"], place["ep"], place["tp"]
        return found

    def summed(self, values: np.ndarray, equal_indices: Sequence[int]) -> np.ndarray:
        """[tp, dp, ...] the sums over the ranks that agree in these places, on every one of them."""
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for cell, place in self.places.items():
            groups.setdefault(tuple(place[index] for index in equal_indices), []).append(cell)
        result = np.empty_like(values)
        for cells in groups.values():
            at = tuple(np.array(cells).T)
            result[at] = values[at].sum(0, dtype=np.uint64)
        return result

    def contributions(self, name: tuple[object, ...], num_replicas: int, *, cut: bool, part: Digest) -> np.ndarray:
        """[tp, dp, replica] what each rank has of a gradient of its experts: that of the tokens of
        all ranks of its copy."""
        members: dict[int, list[tuple[int, int]]] = {}
        for cell, (copy, _, _) in self.places.items():
            members.setdefault(copy, []).append(cell)
        own = np.zeros((self.layout.tp, self.num_parts, num_replicas), dtype=np.uint64)
        for cell, (copy, ep_rank, etp_rank) in self.places.items():
            here = (*name, ep_rank, etp_rank if cut else "")
            for r in range(num_replicas):
                own[(*cell, r)] = sum(part((*here, d, r), t) for t, d in members[copy]) % MODULUS
        return own

    def wanted(
        self, name: tuple[object, ...], replicas: Sequence[int], shape: tuple[int, ...], *, cut: bool, whole: Digest
    ) -> np.ndarray:
        """[tp, dp, replica] the sum over all tokens of all samples."""
        totals: dict[tuple[object, ...], int] = {}
        found = np.zeros(shape, dtype=np.uint64)
        for cell, (_, ep_rank, etp_rank) in self.places.items():
            here = (*name, ep_rank, etp_rank if cut else "")
            if here not in totals:
                totals[here] = sum(whole((*here, d, r), 0) for d in range(self.num_parts) for r in replicas) % MODULUS
            found[cell] = totals[here]
        return found

    def reduced(self, operation: Collective, own: np.ndarray) -> np.ndarray:
        """The sum over the copies of each rank's experts."""
        replicas = own.shape[2] if operation.axis == "expert_replica" else 1
        if operation.group_size != (size := self.layout.expert_dp * replicas):
            raise MisfitError(
                f"{operation.op} over {operation.axis} names {operation.group_size} ranks, but there are {size}"
            )
        total = self.summed(own, (1, 2))
        return np.broadcast_to(total.sum(2, keepdims=True, dtype=np.uint64), own.shape) if replicas > 1 else total

    def copy_of(self, cell: tuple[int, ...], num_replicas: int) -> tuple[tuple[int, ...], int]:
        """The experts that a rank (tp, dp, replica) has, and which of their copies."""
        copy, ep_rank, etp_rank = self.places[cell[0], cell[1]]
        return (ep_rank, etp_rank), copy * num_replicas + cell[2]

    def with_squares(
        self, calls: Sequence[Collective], own: np.ndarray, wanted: np.uint64, stages: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.uint64]:
        """The sums of squares [pipeline rank, tp, dp] of all other gradients with those of experts, which are first
        added over their grid by `calls`; the first tensor-parallel rank counts them. `stages` are those with experts,
        and the place of their pipeline rank."""
        own = own.copy()
        for stage, rank in stages:
            squares = np.zeros(own.shape[1:], dtype=np.uint64)
            parts = {
                place[1:]: np.uint64(digest("expert squares", stage, *place[1:])) for place in self.places.values()
            }
            for cell, place in self.places.items():
                squares[cell] = parts[place[1:]]
            for call in calls:
                squares = self.summed(squares, (0, 2) if call.axis == "ep" else (0, 1))
            own[rank, 0] += squares[0]
            wanted = np.array([wanted, *parts.values()], dtype=np.uint64).sum(dtype=np.uint64)
        return own, wanted
