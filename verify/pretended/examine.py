"""`examined`: a plan's steps on pretended CUDA: bits against one device, races between streams, waits of the host."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.base.errors import InternalError, PlanError
from ...core.plan.plan import Plan
from .environment import MOST_DEVICES, environment
from .labelled import CHANGE_VARIABLE
from .log import Entry, read_log
from .races import Race, races
from .waits import RULE as WAITS_RULE
from .waits import too_many, waits

STEPS = 2
BAD_PLAN = 2
"""Exit code of the process that proves, where the plan is at fault."""


@dataclass(frozen=True)
class Examined:
    """What was found: bits that differ (None where the proof came to no run), what the proof says besides, the races of
    each rank, and what is wrong with its waits for the device in fast numerics."""

    bits_different: int | None
    findings: tuple[str, ...]
    races: dict[int, list[Race]]
    waits: dict[int, list[str]]

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        found = self.findings, *self.races.values(), *self.waits.values()
        return self.bits_different == 0 and not any(found)

    @property
    def rules(self) -> set[str]:
        """The rules that something breaks."""
        waits = {WAITS_RULE} if any(self.waits.values()) else set()
        return waits | {race.rule for of_rank in self.races.values() for race in of_rank}

    def text(self) -> str:
        """For a terminal."""
        bits = "no run" if self.bits_different is None else f"{self.bits_different} different bits against one device"
        lines = [f"{bits}.", *self.findings]
        for rank, found in sorted(self.races.items()):
            lines += [f"rank {rank}: {len(found)} races", *(f"  {race}" for race in found)]
        for rank, wrong in sorted(self.waits.items()):
            lines += [f"rank {rank}: {each}" for each in wrong]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return {
            "ok": self.ok,
            "bits_different": self.bits_different,
            "findings": list(self.findings),
            "races": {str(rank): list(map(str, of_rank)) for rank, of_rank in sorted(self.races.items())},
            "waits": {str(rank): of_rank for rank, of_rank in sorted(self.waits.items())},
        }


def examined(plan: Plan, *, steps: int = STEPS, change: str = "") -> Examined:
    """Runs a plan, or its twin, over NCCL in processes of their own: against one device, and then as training does, in
    fast numerics. `change` is made wrong in the ranks (`changes`).

    Raises `PlanError` for a plan that the backend does not run, and where there is no C++ compiler; `InternalError`
    where the run fails otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        devices = min(plan.world_size, MOST_DEVICES)
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import run_here; run_here({steps})"],
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
    found: defaultdict[int, list[Race]] = defaultdict(list)
    wrong = {}
    for entries in logs:
        if (rank := _rank_of(entries)) is not None:
            found[rank] += races(entries)
            if any(entry.kind == "step" for entry in entries):
                wrong[rank] = too_many(waits(entries))
    return Examined(report["bits_different"], tuple(report["findings"]), dict(found), wrong)


def _rank_of(entries: Iterable[Entry]) -> int | None:
    """The rank whose log it is; None for the process that starts them, and for one device."""
    return next((int(entry.name) for entry in entries if entry.kind == "rank"), None)


def run_here(steps: int) -> None:
    """The plan comes on standard input, what the proof found goes to standard output. In fast numerics it trains a step
    more, for the first makes what lasts."""
    from ...backend.launching.launch import run_ranks
    from ..dynamic.proof import prove
    from ..dynamic.twin import twin
    from .labelled import labelled_steps, plain_steps

    plan = Plan.from_toml(sys.stdin.read())
    try:
        proof = prove(plan, transport="nccl", steps=steps, scenario=labelled_steps)
    except PlanError as error:
        print(error, flush=True)
        sys.exit(BAD_PLAN)
    small, _ = twin(plan)
    fast = replace(small, numerics=replace(small.numerics, mode="fast"))
    run_ranks(plain_steps, (fast, steps + 1), world_size=fast.world_size, transport="nccl")
    found = {"bits_different": proof.report.get("bits_different"), "findings": list(map(str, proof.findings))}
    print(json.dumps(found), flush=True)
