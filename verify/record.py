"""`ledger_observers`: what `train --ledger` gives the ranks of a run, so that each writes what it computes to its file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..core.parameters import expert_biases, parameters
from ..core.plan import Plan
from .ledger_file import FileLedger, prepare_folder


@dataclass(frozen=True)
class LedgerObservers:
    """Makes the observer of a rank, in that rank's process. Can be pickled."""

    plan: Plan
    folder: Path

    def __call__(self, global_rank: int) -> FileLedger:
        """The writer of one rank's file."""
        import torch

        from ..backend.environment import environment

        plan = self.plan
        shapes = {each.name: each.shape for each in (*parameters(plan.model), *expert_biases(plan.model))}
        header = {
            "world_size": plan.layout.world_size,
            "environment": environment(torch.device("cpu")),
            "plan": plan.to_toml(),
        }
        return FileLedger(global_rank, shapes, cp=plan.layout.cp, target=self.folder, header=header)


def ledger_observers(plan: Plan, folder: str) -> LedgerObservers:
    """For a new ledger in `folder`, which is made. Raises `PlanError` where something is in it."""
    if os.environ.get("RANK", "0") == "0":  # torchrun's other ranks find it made
        prepare_folder(Path(folder))
    return LedgerObservers(plan, Path(folder).absolute())
