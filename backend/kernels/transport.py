"""`KernelTransport`: NCCL, and our kernels through symmetric memory for groups whose GPUs reach each other's memory."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.base.errors import named
from ..transport.base import Group, TransportError, check_members
from ..transport.process_group import ProcessGroupTransport
from ..transport.symmetric.device_heap import group_memory
from ..transport.symmetric.heap import this_host
from ..transport.symmetric.view import SymmetricMemory

BUFFER_BYTES = 1 << 24
"""Of a group's memory on each rank; larger tensors take several calls."""

AT_ONCE = 8
"""Groups of a rank whose kernels may wait for peers at the same time, each on a stream of its own."""

LEAST_CAPABILITY = (8, 0)


class KernelTransport(ProcessGroupTransport):
    """A process's way to the others over NCCL, and through memory of GPUs where all members of a group reach it.

    The members of a group agree on it when it is opened. `reasons` says of those that go over NCCL why they do.
    """

    def __init__(self, store: dist.Store, global_rank: int, world_size: int, **others: Any):
        super().__init__(store, global_rank, world_size, backend="nccl", **others)
        self.reasons: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Why what this rank opened goes over NCCL, a sentence for each reason."""
        names: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            names.setdefault(reason, []).append(name)
        over_nccl = (f"{self}: {named(found)} over NCCL, not our kernels: {why}." for why, found in names.items())
        return (*over_nccl, *super().notes)

    def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group:
        members = check_members(name, ranks, self.global_rank)
        if len(members) == 1:
            return super()._group(name, axis, members)
        agreement = Agreement(self._store, f"kernels/{name}", members, self.global_rank, self._timeout.total_seconds())
        memory = agreement.memory(self.device)
        if isinstance(memory, str):
            self.reasons[name] = memory
            return super()._group(name, axis, members)
        from .group import KernelGroup
        from .launch import DeviceLauncher

        launch = DeviceLauncher(memory, agreement.gathered, sharing=AT_ONCE)
        return KernelGroup(self, name, axis, members, memory, launch)


class Agreement:
    """How the members of a group come to share memory of their GPUs, or agree that they do not: through `store`, by
    what each says in turn. All members make the same calls."""

    def __init__(self, store: dist.Store, name: str, ranks: Sequence[int], global_rank: int, timeout_s: float):
        self._store, self._name, self._ranks = store, name, tuple(ranks)
        self._rank, self._timeout_s = self._ranks.index(global_rank), timeout_s
        self._turns = itertools.count()

    def memory(self, device: torch.device) -> SymmetricMemory | str:
        """This rank's view, or why there is none, the same on all members. Raises `TransportError` where one does not
        come."""
        answers = self._said({"why": why_not_on(device), "host": this_host(), "device": device.index})
        if why := self._why(answers):
            return why
        if len({each["host"] for each in answers}) > 1:
            return "the ranks are on several hosts, or of several users"
        far = [each["device"] for each in answers if not _reaches(device, each["device"])]
        if why := self._why(self._said({"why": f"GPU {device.index} does not reach GPU {far[0]}" if far else ""})):
            return why
        made, own = None, ""
        try:
            store = dist.PrefixStore(self._name, self._store)
            made = group_memory(self._name, self._rank, len(self._ranks), store, device, BUFFER_BYTES)
        except RuntimeError as error:
            own = f"no symmetric memory: {str(error).splitlines()[0]}"
        if why := self._why(self._said({"why": own})):
            return why
        assert made is not None
        return made

    def gathered(self, number: int) -> list[int]:
        """What every member gives, by member."""
        return [int(each["number"]) for each in self._said({"number": number})]

    def _said(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What all members say in this turn, in their order."""
        turn = next(self._turns)
        keys = [f"{self._name}/{turn}/{rank}" for rank in self._ranks]
        try:
            self._store.set(keys[self._rank], json.dumps(own))
            return [json.loads(self._store.get(key)) for key in keys]  # waits for it
        except RuntimeError as error:  # DistStoreError is one
            first = str(error).splitlines()[0]
            raise TransportError(
                f"rank {self._ranks[self._rank]}, agreeing on {self._name!r} failed: {first}"
            ) from error

    def _why(self, answers: Sequence[Mapping[str, Any]]) -> str:
        """The first reason that a member has, with its rank; empty where none has."""
        whys = ((rank, each["why"]) for rank, each in zip(self._ranks, answers, strict=True))
        return next((f"rank {rank}: {why}" for rank, why in whys if why), "")


def why_not_on(device: torch.device) -> str:
    """Why our kernels do not run on a device; empty where they do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        return f"compute capability {major}.{minor} is below {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return ""


def _reaches(device: torch.device, other: int) -> bool:
    return device.index == other or bool(torch.cuda.can_device_access_peer(device.index, other))
