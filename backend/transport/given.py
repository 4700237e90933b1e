"""Process groups that the user brings: used in place of new communicators, once all ranks know them to be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.base.errors import PlanError, did_you_mean

AXES = ("tp", "cp", "dp", "model", "ep", "etp", "edp")
"""What groups may be brought for: those that each rank opens one of (`Mesh`). Other communicators of these axes
(gradients, backwards) are used by other threads at the same time, and are opened as ever."""


class GivenGroups:
    """Torch's process groups by axis, of which this rank is a member.

    All ranks make one together, over a store that they share. Raises `PlanError` on all of them where an axis is not
    one of `AXES`, and where ranks bring groups for different axes.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], store: dist.Store, global_rank: int, world_size: int):
        self._groups, self._store = dict(groups), dist.PrefixStore("given", store)
        self._rank, self._world_size = global_rank, world_size
        mine = ", ".join(sorted(groups))
        all_axes = self._said_by_all("axes", mine)  # first: who fails alone could come again before others have come
        if unknown := [axis for axis in groups if axis not in AXES]:
            raise PlanError(
                f"groups: no group can be given for {unknown[0]!r}{did_you_mean(unknown[0], AXES)} "
                f"Known: {', '.join(AXES)}."
            )
        for rank, theirs in enumerate(all_axes):
            if theirs != mine:
                raise PlanError(
                    f"groups: rank {rank} gives those of {theirs or 'no axis'}, rank {global_rank} those of "
                    f"{mine or 'no axis'}. Give groups for the same axes on all ranks."
                )

    def of(self, axis: str, ranks: Sequence[int], device: torch.device) -> Any | None:
        """What torch has of the group of an axis for tensors of a device; None where none was given. All ranks ask
        together. Raises `PlanError` on all of them where one's members are not `ranks`, in that order."""
        if axis not in self._groups:
            return None
        group = self._groups[axis]
        for complaint in self._said_by_all(axis, self._complaint(axis, group, tuple(ranks), device)):
            if complaint:
                raise PlanError(complaint)
        return group._get_backend(device)

    def _complaint(self, axis: str, group: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device) -> str:
        members = tuple(dist.get_process_group_ranks(group))
        if members != ranks:
            return (
                f"groups: the group given for {axis} on rank {self._rank} joins ranks {_listed(members)}, but the "
                f"layout's {axis} joins ranks {_listed(ranks)} there, in this order. Give the group of these, or leave "
                f"{axis} out."
            )
        try:
            group._get_backend(device)
        except RuntimeError as error:
            return (
                f"groups: the group given for {axis} on rank {self._rank} moves no tensors of {device.type} "
                f"({str(error).splitlines()[0]}). Give one whose backend does, or leave {axis} out."
            )
        return ""

    def _said_by_all(self, about: str, mine: str) -> list[str]:
        """What every rank says, by rank."""
        self._store.set(f"{about}/{self._rank}", mine)
        return [self._store.get(f"{about}/{rank}").decode() for rank in range(self._world_size)]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
