"""`ledger_observers`: what `train --ledger` gives the ranks of a run, so that each writes what it
computes to its file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...core.plan.plan import AnyPlan, recorded_numerics
from ..ledger.file import FileLedger, prepare_folder


@dataclass(frozen=True)
class LedgerObservers:
    """Makes the observer of a rank, in that rank's process. Can be pickled."""

    plan: AnyPlan
    folder: Path

    def of_run(self, plan: AnyPlan) -> LedgerObservers:
        """Those of the plan as it is run, which is what a ledger records."""
        return LedgerObservers(plan, self.folder)

    def __call__(self, global_rank: int) -> FileLedger:
        """The writer of one rank's file."""
        import torch

        from ...backend.base.determinism import make_exact
        from ...backend.base.environment import environment

        plan = self.plan
        # a rank on a GPU has chosen it by now, and others leave CUDA alone
        device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
        )
        if any(part.numerics.mode == "exact" for part in plan.parts):
            make_exact(device)  # what is recorded is what the steps have
        header = {
            "world_size": plan.world_size,
            "environment": environment(device),
            "numerics": recorded_numerics(plan).to_json(),
            "plan": plan.to_toml(),
        }
        part = plan.part_of(global_rank)
        return FileLedger(global_rank, plan.named_shapes, cp=part.layout.cp, target=self.folder, header=header)


def ledger_observers(plan: AnyPlan, folder: str) -> LedgerObservers:
    """For a new ledger in `folder`, which is made. Raises `PlanError` where something is in it."""
    if os.environ.get("RANK", "0") == "0":  # torchrun's other ranks find it made
        prepare_folder(Path(folder))
    return LedgerObservers(plan, Path(folder).absolute())
