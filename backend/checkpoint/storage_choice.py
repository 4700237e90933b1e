"""Which storage a plan's checkpoints go to."""

from __future__ import annotations

import torch

from ...core.base.errors import PlanError
from ...core.plan.train import Checkpoint
from ..base.urls import UrlPath, check_writable, place_of
from ..transport.base import Group
from .host_storage import HostStorage
from .storage import FolderStorage, Storage, UrlStorage


def storage_of(chosen: Checkpoint, world: Group, device: torch.device) -> Storage:
    """What keeps checkpoints in `checkpoint.folder` for the ranks of `world`, which call this together. Raises
    `PlanError` where it cannot be written to, or has no room for copies."""
    assert chosen.folder is not None, "who has no folder saves nothing"
    place = place_of(chosen.folder)
    check_writable(place, "checkpoint.folder")
    if chosen.copies is not None:
        if isinstance(place, UrlPath):
            raise PlanError(
                f"checkpoint.copies={chosen.copies} is for folders on the hosts' own disks, and checkpoint.folder="
                f"{chosen.folder!r} is a URL, which all see. Leave checkpoint.copies out."
            )
        return HostStorage(place, chosen.keep, chosen.copies, world, device)
    made = UrlStorage(place, chosen.keep) if isinstance(place, UrlPath) else FolderStorage(place, chosen.keep)
    made.leads = world.rank == 0
    return made
