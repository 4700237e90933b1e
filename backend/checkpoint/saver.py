"""`Checkpoints`: a run's checkpoints as one rank sees them. All ranks make the same calls together, and all see the same folder.

A checkpoint is written into a folder with another name (`step-00000020.partial`) and renamed when all of it is on the disk. So whatever
ends a run, and whenever, the folders named `step-...` are whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import PlanError
from ...core.files import write_text
from ...core.modules import ModularPlan
from ...core.plan import Plan
from ..data import Corpus
from ..measure import gather_objects
from ..transport.base import Group
from .resume import STATE_FILE, Saved, path_of, problem_of, saved_in
from .state import pieces_of, take_up
from .tensors import Piece, read_tensors, write_tensors

if TYPE_CHECKING:
    from ..training_rank import TrainingRank

PARTIAL, REMOVED = ".partial", ".removed"
"""Ends of the names of checkpoints that are not whole: not yet, or no longer."""


class Checkpoints:
    """Saves to and restores from the plan's `checkpoint.folder`, which is made where it is not there.

    `corpus` is the training text, which rank 0 of `world` must have. `newest` is the folder of the last checkpoint that this run saved
    or went on from.
    """

    newest: Path | None = None

    def __init__(self, plan: Plan | ModularPlan, corpus: Corpus | None, world: Group, device: torch.device):
        assert plan.checkpoint.folder is not None
        assert corpus is not None or world.rank > 0, "rank 0 reads the data"
        self._plan = plan
        self._world = world
        self._device = device
        self._folder = Path(plan.checkpoint.folder)
        self._text = None if corpus is None or world.rank > 0 else {"bytes": len(corpus.train), "sha256": corpus.fingerprint}
        if world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)

    def restore(self, path: Path, rank: TrainingRank) -> int:
        """Makes a rank go on from a checkpoint; the number of steps that were done. Raises `PlanError` on every rank where it is one of
        another model or of another text."""
        steps = int(path.name.rpartition("-")[2])
        state = Saved(path, steps).state
        ours = gather_objects(self._world, self._text, self._device)[0]
        if (theirs := state.get("text", ours)) != ours:
            raise PlanError(
                f"{path} was saved while training on a text of {theirs['bytes']} bytes with SHA-256 {theirs['sha256'][:12]}..., but "
                f"train.data={self._plan.train.data!r} has {ours['bytes']} bytes with {ours['sha256'][:12]}..., so other samples would "
                "follow. Use that text, or another checkpoint.folder."
            )
        pieces = pieces_of(rank)
        read_tensors(path, pieces, self._world, self._device)
        take_up(rank, pieces)
        self.newest = path
        return steps

    def is_due(self, steps: int, *, last: bool) -> bool:
        """Whether there is to be a checkpoint after so many steps."""
        every = self._plan.checkpoint.every
        return last or (every is not None and steps % every == 0)

    def save(self, steps: int, rank: TrainingRank) -> None:
        """Saves what the ranks have after so many steps, then removes what is more than `checkpoint.keep`."""
        self.save_pieces(steps, pieces_of(rank))

    def save_pieces(self, steps: int, pieces: Sequence[Piece]) -> None:
        """`save`, of any tensors."""
        path, leads = path_of(self._folder, steps), self._world.rank == 0
        partial = path.with_name(path.name + PARTIAL)
        if leads:
            self._clear()
            partial.mkdir()
            write_text(partial / STATE_FILE, json.dumps(self._state(steps), indent=1) + "\n")
        self._world.barrier()
        write_tensors(partial, pieces, self._world, self._device)
        if leads:
            _sync(partial / STATE_FILE)
            _sync(partial)
            partial.rename(path)
            _sync(self._folder)
            self._remove_old()
        self._world.barrier()
        self.newest = path

    def _state(self, steps: int) -> dict[str, Any]:
        samples = steps * self._plan.batch.global_size
        return {"steps": steps, "samples": samples, "text": self._text, "problem": problem_of(self._plan)}

    def _clear(self) -> None:
        """Removes what runs that were ended while they saved or removed have left behind."""
        for left in self._folder.glob("step-*"):
            if left.suffix in (PARTIAL, REMOVED):
                shutil.rmtree(left)

    def _remove_old(self) -> None:
        keep = self._plan.checkpoint.keep
        for old in saved_in(self._folder)[: -keep if keep else 0]:
            removed = old.path.with_name(old.path.name + REMOVED)
            old.path.rename(removed)  # first another name: half of it would be no checkpoint
            shutil.rmtree(removed)


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
