"""Hybrid sharding on expressions: sums over some copies of a stage that keep a part each, and over
those that keep equal parts.

Arrays are [tp, dp, replica] as in `symbolic_reduction`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ...core.plan.plan import Plan
from ...core.program import Collective
from .tensors import MisfitError

Level = Literal["", "shard", "replicate"]
Cell = tuple[int, ...]
"""(tp rank, dp rank with its cp rank as the fastest axis, replica)."""
Place = Callable[[Cell], tuple[tuple[int, ...], int]]
"""What distinguishes a cell's group of copies from others, and the cell's place in it."""


def split_axis(axis: str) -> tuple[str, Level]:
    """An axis over copies, and which of them are meant.

    >>> split_axis("dp"), split_axis("expert_replica_shard")
    (('dp', ''), ('expert_replica', 'shard'))
    """
    levels: tuple[Level, ...] = ("shard", "replicate")
    for level in levels:
        if axis.endswith(f"_{level}"):
            return axis.removesuffix(f"_{level}"), level
    return axis, ""


def dense_place(plan: Plan, num_replicas: int) -> Place:
    """Copies of dense parameters, in the order of `Plan.copy_of`."""

    def place(cell: Cell) -> tuple[tuple[int, ...], int]:
        t, d, r = cell
        dp_rank, cp_rank = divmod(d, plan.layout.cp)
        return (t,), (dp_rank * num_replicas + r) * plan.layout.cp + cp_rank

    return place


def dense_members(plan: Plan, shape: tuple[int, ...]) -> np.ndarray:
    """The place of every cell among the copies of its stage, as `dense_place` has it."""
    _, num_d, num_replicas = shape
    dp_rank, cp_rank = np.divmod(np.arange(num_d), plan.layout.cp)
    members = (dp_rank[:, None] * num_replicas + np.arange(num_replicas)) * plan.layout.cp + cp_rank[:, None]
    return np.broadcast_to(members, shape)


def summed(
    operation: Collective, level: Level, own: np.ndarray, place: Place, *, size: int, parts: int, apart: int = 1
) -> np.ndarray:
    """The sums over the groups of a level. There are `size` copies, of which `parts` keep a part each; of these every
    `apart`-th have parts of the same elements to begin with (context parallelism). Raises `MisfitError` where the
    operation joins other groups."""
    wanted = parts if level == "shard" else size // parts
    if operation.group_size != wanted:
        raise MisfitError(
            f"{operation.op} over {operation.axis} names {operation.group_size} ranks, but there are {wanted}"
        )
    groups: dict[tuple[int, ...], list[Cell]] = {}
    for cell in np.ndindex(own.shape):
        group, member = place(cell)
        index = (member // parts, member % apart) if level == "shard" else (member % parts,)
        groups.setdefault((*group, *index), []).append(cell)
    result = np.empty_like(own)
    for cells in groups.values():
        at = tuple(np.array(cells).T)
        result[at] = own[at].sum(dtype=np.uint64)
    return result
