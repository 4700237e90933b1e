"""`examined`: a plan's steps on pretended CUDA, their bits against one device and the races between streams."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.base.errors import InternalError, PlanError
from ...core.plan.plan import Plan
from .environment import MOST_DEVICES, environment
from .labelled import CHANGE_VARIABLE
from .log import read_log
from .races import Race, races

STEPS = 2
BAD_PLAN = 2
"""Exit code of the process that proves, where the plan is at fault."""


@dataclass(frozen=True)
class Examined:
    """What was found: bits that differ (None where the proof came to no run), what the proof says besides, and the
    races of each rank."""

    bits_different: int | None
    findings: tuple[str, ...]
    races: dict[int, list[Race]]

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return self.bits_different == 0 and not self.findings and not any(self.races.values())

    def text(self) -> str:
        """For a terminal."""
        bits = "no run" if self.bits_different is None else f"{self.bits_different} different bits against one device"
        lines = [f"{bits}.", *self.findings]
        for rank, found in sorted(self.races.items()):
            lines += [f"rank {rank}: {len(found)} races", *(f"  {race}" for race in found)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        found = {str(rank): list(map(str, of_rank)) for rank, of_rank in sorted(self.races.items())}
        return {
            "ok": self.ok,
            "bits_different": self.bits_different,
            "findings": list(self.findings),
            "races": found,
        }


def examined(plan: Plan, *, steps: int = STEPS, change: str = "") -> Examined:
    """Runs a plan, or its twin, over NCCL in processes of their own; `change` is made wrong in the ranks (`changes`).

    Raises `PlanError` for a plan that the backend does not run, and where there is no C++ compiler; `InternalError`
    where the run fails otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        devices = min(plan.world_size, MOST_DEVICES)
        command = [sys.executable, "-c", f"from {__name__} import prove_here; prove_here({steps})"]
        done = subprocess.run(
            command,
            env={**environment(folder, devices=devices, log=True), CHANGE_VARIABLE: change},
            input=plan.to_toml(),
            capture_output=True,
            text=True,
        )
        if done.returncode == BAD_PLAN:
            raise PlanError(done.stdout.strip())
        if done.returncode:
            raise InternalError(f"the run on pretended CUDA failed: {done.stderr[-3000:]}")
        report = json.loads(done.stdout.splitlines()[-1])
        logs = [list(read_log(path)) for path in sorted((Path(folder) / "logs").glob("*.log"))]
    found = {}
    for entries in logs:
        ranks = [int(entry.name) for entry in entries if entry.kind == "rank"]
        if ranks:
            found[ranks[0]] = races(entries)
    return Examined(report["bits_different"], tuple(report["findings"]), found)


def prove_here(steps: int) -> None:
    """The process of `examined`: the plan comes on standard input, what the proof found goes to standard output."""
    from ..dynamic.proof import prove
    from .labelled import labelled_steps

    try:
        proof = prove(Plan.from_toml(sys.stdin.read()), transport="nccl", steps=steps, scenario=labelled_steps)
    except PlanError as error:
        print(error, flush=True)
        sys.exit(BAD_PLAN)
    found = {"bits_different": proof.report.get("bits_different"), "findings": list(map(str, proof.findings))}
    print(json.dumps(found), flush=True)
