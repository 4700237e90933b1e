"""`examined`: a plan's steps on pretended CUDA, their bits against one device, the races between streams, and the order
of the calls that ranks give NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.base.errors import InternalError, PlanError, RankFailure
from ...core.plan.plan import Plan
from .calls import RankCalls, calls_of
from .circles import AtOnce, at_once, order_faults
from .environment import MOST_DEVICES, environment
from .labelled import CHANGE_VARIABLE
from .log import read_log
from .order import OrderFault
from .order_changes import ORDER_CHANGES
from .races import Race, races

STEPS = 2
PATIENCE_S = 180.0
STALL_S = 120.0
"""How long ranks with a change may come no further."""
PATIENCE_VARIABLE = "SHARDPROOF_PRETENDED_PATIENCE_S"
BAD_PLAN = 2
"""Exit code of the process that proves, where the plan is at fault."""


@dataclass(frozen=True)
class Examined:
    """What was found: bits that differ (None where the proof came to no run), what the proof says besides, races of
    each rank, and faults in the order of calls. `at_once` are the calls of each rank that may have to run together,
    `calls` all."""

    bits_different: int | None
    findings: tuple[str, ...]
    races: dict[int, list[Race]]
    order: tuple[OrderFault, ...] = ()
    at_once: tuple[AtOnce, ...] = ()
    calls: tuple[RankCalls, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return self.bits_different == 0 and not self.findings and not any(self.races.values()) and not self.order

    def text(self) -> str:
        """For a terminal."""
        bits = "no run" if self.bits_different is None else f"{self.bits_different} different bits against one device"
        lines = [f"{bits}.", *self.findings]
        for rank, found in sorted(self.races.items()):
            lines += [f"rank {rank}: {len(found)} races", *(f"  {race}" for race in found)]
        lines += [f"order of calls: {len(self.order)} faults", *(f"  {fault}" for fault in self.order)]
        lines += map(str, self.at_once)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        found = {str(rank): list(map(str, of_rank)) for rank, of_rank in sorted(self.races.items())}
        return {
            "ok": self.ok,
            "bits_different": self.bits_different,
            "findings": list(self.findings),
            "races": found,
            "order": [asdict(fault) for fault in self.order],
            "at_once": [asdict(each) for each in self.at_once],
        }


def examined(plan: Plan, *, steps: int = STEPS, change: str = "", patience_s: float = PATIENCE_S) -> Examined:
    """Runs a plan, or its twin, over NCCL in processes of their own; `change` is made wrong in the ranks (`changes`).
    A call whose peers have not come for `patience_s` is given up.

    Raises `PlanError` for a plan that the backend does not run, and where there is no C++ compiler; `InternalError`
    where the run fails otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        devices = min(plan.world_size, MOST_DEVICES)
        program = "run_here" if change in ORDER_CHANGES else "prove_here"
        command = [sys.executable, "-c", f"from {__name__} import {program}; {program}({steps})"]
        variables = {CHANGE_VARIABLE: change, PATIENCE_VARIABLE: str(patience_s)}
        done = subprocess.run(
            command,
            env={**environment(folder, devices=devices, log=True), **variables},
            input=plan.to_toml(),
            capture_output=True,
            text=True,
        )
        if done.returncode == BAD_PLAN:
            raise PlanError(done.stdout.strip())
        if done.returncode:
            raise InternalError(f"the run on pretended CUDA failed: {done.stderr[-3000:]}")
        report = json.loads(done.stdout.splitlines()[-1])
        logs = [list(read_log(path)) for path in sorted((Path(folder) / "logs").glob("*.log"), key=_age)]
    found: dict[int, tuple[list[Race], RankCalls]] = {}
    for entries in logs:  # those of a second run, which a proof makes to describe what differs, come later
        if (calls := calls_of(entries)) is not None and calls.rank not in found:
            found[calls.rank] = races(entries), calls
    calls_by_rank = [calls for _, (_, calls) in sorted(found.items())]
    return Examined(
        report["bits_different"],
        tuple(report["findings"]),
        {rank: of_rank for rank, (of_rank, _) in found.items()},
        tuple(order_faults(calls_by_rank)),
        tuple(each for each in map(at_once, calls_by_rank) if each is not None),
        tuple(calls_by_rank),
    )


def _age(log: Path) -> int:
    """The number of the process, which ascends."""
    return int(log.stem)


def prove_here(steps: int) -> None:
    """The process of `examined`: the plan comes on standard input, what the proof found goes to standard output."""
    from ..dynamic.proof import prove
    from .labelled import labelled_steps

    try:
        proof = prove(Plan.from_toml(sys.stdin.read()), transport="nccl", steps=steps, scenario=labelled_steps)
    except PlanError as error:
        print(error, flush=True)
        sys.exit(BAD_PLAN)
    except RankFailure as failure:  # its log says what came before
        _say(None, [str(failure)])
        return
    _say(proof.report.get("bits_different"), proof.findings)


def run_here(steps: int) -> None:
    """The same without a proof: the ranks alone, of a plan that is known to be right."""
    from ..run.proof_run import ProofJob, run_ledger
    from .labelled import labelled_steps

    found = []
    job = ProofJob(
        Plan.from_toml(sys.stdin.read()), steps, scenario=labelled_steps, skips_not_finite=True, stall_s=STALL_S
    )
    try:
        run_ledger(job, "nccl")
    except RankFailure as failure:
        found.append(str(failure))
    _say(None, found)


def _say(bits_different: int | None, findings: Iterable[object]) -> None:
    print(json.dumps({"bits_different": bits_different, "findings": list(map(str, findings))}), flush=True)
