"""`groups_brought`: a rank of a proof over process groups that the user brings, as `Trainer(plan, groups=...)` does.

The user is this rank: it initialises torch.distributed, and makes the groups of every axis that torch can make, in an
order that is not that of the mesh: the last axis first, and of each axis the last group first. torch sorts the members
of a group that it makes (`torch.distributed.new_group`), so an axis whose members come in another order in the layout
(`layout.order`) has groups of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...core.layout.layout import Layout
from ...core.plan.plan import AnyPlan, Plan

if TYPE_CHECKING:
    from ...backend.transport.process_group import ProcessGroupTransport

DENSE = {"tp": "tp", "cp": "cp", "dp": "cp-dp", "model": "tp-pp"}
"""The axes whose groups may be brought (`backend.transport.given.AXES`), and those of the layout that they span."""
OF_EXPERTS = {"ep": "ep", "etp": "tp", "edp": "dp"}
"""The same in the grid of experts."""


def groups_by_axis(plan: Plan) -> dict[str, list[list[int]]]:
    """The groups of more than one rank that torch can make, by axis, as lists of global ranks: those whose members
    ascend in the layout."""
    layout: Layout = plan.layout
    found = {axis: layout.groups(axes) for axis, axes in DENSE.items()}
    found["dp"] = [sorted(members, key=lambda rank: _data_place(layout, rank)) for members in found["dp"]]
    if plan.model.is_moe:
        found |= {axis: layout.expert_groups(axes) for axis, axes in OF_EXPERTS.items()}
    return {
        axis: groups
        for axis, groups in found.items()
        if len(groups[0]) > 1 and all(members == sorted(members) for members in groups)
    }


def _data_place(layout: Layout, global_rank: int) -> tuple[int, int]:
    """Where a rank stands among those of its data-parallel group, whose fastest axis is cp in every order."""
    at = layout.coordinates(global_rank)
    return at["dp"], at["cp"]


def can_be_given(plan: AnyPlan) -> bool:
    """Whether a user can bring any group of a plan."""
    return isinstance(plan, Plan) and bool(groups_by_axis(plan))


@contextmanager
def groups_brought(transport: ProcessGroupTransport, plan: Plan) -> Iterator[None]:
    """Inside, a rank that is a process opens its mesh with groups of its own. Raises `AssertionError` where one of them
    was not used."""
    import torch.distributed as dist

    from ...backend.transport.base import Group
    from ...backend.transport.given import GivenGroups

    transport.open_default_group()
    groups: dict[str, Any] = {}
    for axis, by_rank in reversed(groups_by_axis(plan).items()):
        for members in reversed(by_rank):
            made = dist.new_group(members)  # a call of all ranks
            if transport.global_rank in members:
                groups[axis] = made
    store = dist.distributed_c10d._get_default_store()
    transport.given = GivenGroups(groups, store, transport.global_rank, transport.world_size)
    yield
    brought = {each.axis for each in transport.opened if isinstance(each, Group) and each.is_brought}
    assert brought == set(groups), f"groups of {sorted(groups)} are given, those of {sorted(brought)} used"
