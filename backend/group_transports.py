"""How the ranks of a plan would talk: which transport each of its groups gets, and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..core.plan.plan import AnyPlan, Plan
from .transport.symmetric.heap import why_not_here
from .watch.rank_messages import TransportName

GRIDS = {"tp": "tp", "cp": "cp", "dp": "cp-dp", "pp": "pp"}
"""What is cut, and the axes of the layout that its groups span. Along pp neighbours have channels."""

EXPERT_GRIDS = {"etp": "tp", "ep": "ep", "edp": "dp"}
"""The same for experts, in their own grid."""


@dataclass(frozen=True)
class GroupTransport:
    """Groups of one kind and size with one transport. `why` goes on after "since". `buffers` says what becomes of
    those that the plan wants registered; empty where it wants none."""

    module: str | None
    axis: str
    group_size: int
    num_groups: int
    transport: str
    why: str
    buffers: str = ""

    def __str__(self) -> str:
        groups = f"{self.num_groups:,} group{'s' * (self.num_groups > 1)} of {self.group_size:,}"
        module = "" if self.module is None else f"module {self.module}, "
        buffers = f"; {self.buffers}" if self.buffers else ""
        return f"{module}{self.axis}: {groups} over {self.transport}, since {self.why}{buffers}"


def group_transports(plan: AnyPlan, transport: TransportName, environment: Mapping[str, str]) -> list[GroupTransport]:
    """The transport of every group of more than one rank. Ranks are all on this host, or where `environment` is that of
    a rank of torchrun on hosts with `LOCAL_WORLD_SIZE` of them."""
    per_host = int(environment.get("LOCAL_WORLD_SIZE", plan.world_size))
    found = []
    for part in plan.parts:
        for axis, groups in _groups(part):
            chosen = sorted(_chosen(ranks, transport, per_host) for ranks in groups)
            for (name, why), equal in groupby(chosen):
                count = len(list(equal))
                buffers = _buffers(name) if axis in part.communicators.registered else ""
                found.append(GroupTransport(part.name or None, axis, len(groups[0]), count, name, why, buffers))
    return found


def _buffers(transport: str) -> str:
    """What becomes of buffers that are to be registered, as far as this machine's torch says."""
    if transport not in ("NCCL", "our kernels"):
        return "its buffers are not registered, since only NCCL does that"
    if importlib.util.find_spec("torch") is None:
        return "its buffers are registered with NCCL, if torch and the GPUs can, which is not seen without torch"
    from .transport.registered import why_not_here  # imports torch

    why = why_not_here()
    if why:
        return f"its buffers are not registered, since {why}"
    return "its buffers are registered with NCCL, if the GPUs of its ranks have multicast"


def _groups(plan: Plan) -> Iterator[tuple[str, list[list[int]]]]:
    """The groups by what is cut, as global ranks; those of one rank are none."""
    layout, first = plan.layout, plan.first_rank
    grids = [(axis, layout.groups(axes)) for axis, axes in GRIDS.items()]
    if plan.model.is_moe:
        grids += [(axis, layout.expert_groups(axes)) for axis, axes in EXPERT_GRIDS.items()]
    for axis, groups in grids:
        if len(groups[0]) > 1:
            yield axis, [[first + rank for rank in ranks] for ranks in groups]


def _chosen(ranks: Sequence[int], transport: TransportName, per_host: int) -> tuple[str, str]:
    """The transport of a group and why, as its members would agree on it."""
    if transport == "memory":
        return "memory", "ranks are threads of one process"
    if transport == "nccl":
        return "NCCL", "each rank has a GPU"
    if transport == "kernels":
        if len({rank // per_host for rank in ranks}) > 1:
            return "NCCL", "their ranks are on several hosts"
        return "our kernels", "all their ranks are on one host; NCCL, if its GPUs do not reach each other's memory"
    if transport == "gloo":
        return "gloo", "--transport or cluster.collective_library says so"
    if len({rank // per_host for rank in ranks}) > 1:
        return "gloo", "their ranks are on several hosts"
    why = why_not_here(len(ranks))
    return ("gloo", why) if why else ("shared memory", "all their ranks are on one host")
