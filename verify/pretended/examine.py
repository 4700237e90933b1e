"""`examined`: a plan's steps on pretended CUDA: bits against one device, races between streams, the order of the calls
that ranks give NCCL, and waits of the host."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...core.base.errors import InternalError, PlanError, RankFailure
from ...core.plan.plan import AnyPlan, Plan
from .calls import RankCalls, calls_of
from .circles import AtOnce, at_once, order_faults
from .environment import MOST_DEVICES, environment
from .labelled import CHANGE_VARIABLE
from .log import Entry, read_log
from .order import OrderFault
from .races import Race, races
from .registered_changes import CALL_CHANGES
from .waits import RULE as WAITS_RULE
from .waits import too_many, waits

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
    each rank, what is wrong with its waits for the device in fast numerics, and faults in the order of calls. `at_once`
    are the calls of each rank that may have to run together, `calls` all."""

    bits_different: int | None
    findings: tuple[str, ...]
    races: dict[int, list[Race]]
    waits: dict[int, list[str]]
    order: tuple[OrderFault, ...] = ()
    at_once: tuple[AtOnce, ...] = ()
    calls: tuple[RankCalls, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        found = self.findings, self.order, *self.races.values(), *self.waits.values()
        return self.bits_different == 0 and not any(found)

    @property
    def rules(self) -> set[str]:
        """The rules that something breaks."""
        waits = {WAITS_RULE} if any(self.waits.values()) else set()
        of_order = {fault.rule for fault in self.order}
        return waits | of_order | {race.rule for of_rank in self.races.values() for race in of_rank}

    def text(self) -> str:
        """For a terminal."""
        bits = "no run" if self.bits_different is None else f"{self.bits_different} different bits against one device"
        lines = [f"{bits}.", *self.findings]
        for rank, found in sorted(self.races.items()):
            lines += [f"rank {rank}: {len(found)} races", *(f"  {race}" for race in found)]
        for rank, wrong in sorted(self.waits.items()):
            lines += [f"rank {rank}: {each}" for each in wrong]
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
            "waits": {str(rank): wrong for rank, wrong in sorted(self.waits.items())},
            "order": [asdict(fault) for fault in self.order],
            "at_once": [asdict(each) for each in self.at_once],
        }


def examined(plan: AnyPlan, *, steps: int = STEPS, change: str = "", patience_s: float = PATIENCE_S) -> Examined:
    """Runs a plan, or its twin, over NCCL in processes of their own: against one device, and then as training does, in
    fast numerics. `change` is made wrong in the ranks (`changes`, `order_changes`). A call whose peers do not come for
    `patience_s` is given up.

    Raises `PlanError` for a plan that the backend does not run, and where there is no C++ compiler; `InternalError`
    where the run fails otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        devices = min(plan.world_size, MOST_DEVICES)
        program = "ranks_here" if change in CALL_CHANGES else "run_here"
        command = [sys.executable, "-c", f"from {__name__} import {program}; {program}({steps})"]
        variables = {CHANGE_VARIABLE: change, PATIENCE_VARIABLE: str(patience_s)}
        done = subprocess.run(
            command,
            env={**environment(folder, devices=devices, log=True), **variables},
            input=by_the_library(_saving_in(plan, folder)).to_toml(),
            capture_output=True,
            text=True,
        )
        if done.returncode == BAD_PLAN:
            raise PlanError(done.stdout.strip())
        if done.returncode:
            raise InternalError(f"the run on pretended CUDA failed: {done.stderr[-3000:]}")
        report = json.loads(done.stdout.splitlines()[-1])
        logs = [list(read_log(path)) for path in sorted((Path(folder) / "logs").glob("*.log"), key=_age)]
    found: defaultdict[int, list[Race]] = defaultdict(list)
    wrong: dict[int, list[str]] = {}
    calls: dict[int, RankCalls] = {}
    for entries in logs:  # those of a second run, which a proof makes to describe what differs, come later
        if (of_rank := calls_of(entries)) is None:
            continue
        if _is_plain(entries):
            wrong[of_rank.rank] = too_many(waits(entries))
        elif of_rank.rank not in calls:
            calls[of_rank.rank] = of_rank
        else:
            continue
        found[of_rank.rank] += races(entries)
    in_order = [of_rank for _, of_rank in sorted(calls.items())]
    return Examined(
        report["bits_different"],
        tuple(report["findings"]),
        dict(found),
        wrong,
        tuple(order_faults(in_order)),
        tuple(each for each in map(at_once, in_order) if each is not None),
        tuple(in_order),
    )


def _saving_in(plan: AnyPlan, folder: str) -> AnyPlan:
    """The plan; where it saves, in a folder of the run."""
    if plan.checkpoint.folder is None:
        return plan
    return replace(plan, checkpoint=replace(plan.checkpoint, folder=str(Path(folder) / "saved")))


def by_the_library(plan: AnyPlan) -> AnyPlan:
    """A plan whose exact products are the library's, unless it says whose. What ranks would give to our kernels is
    carried out from its PTX, which takes a step with experts or dropped attention many minutes: kernels have tests of
    their own."""
    if plan.numerics.mode == "fast" or plan.numerics.triton_products is not None:
        return plan
    return replace(plan, numerics=replace(plan.numerics, triton_products=("none",)))


def _is_plain(entries: Iterable[Entry]) -> bool:
    """Whether it is the log of training, without a proof."""
    return any(entry.kind == "step" for entry in entries)


def _age(log: Path) -> int:
    """The number of the process, which ascends."""
    return int(log.stem)


def run_here(steps: int) -> None:
    """The plan comes on standard input, what the proof found goes to standard output. In fast numerics it trains a step
    more, for the first makes what lasts; where it saves, so many that two follow on a checkpoint."""
    from ...backend.launching.launch import run_ranks
    from ..dynamic.proof import prove
    from .labelled import labelled_steps, plain_steps

    plan: AnyPlan = Plan.from_toml(sys.stdin.read())
    try:
        proof = prove(plan, transport="nccl", steps=steps, scenario=labelled_steps)
    except PlanError as error:
        print(error, flush=True)
        sys.exit(BAD_PLAN)
    except RankFailure as failure:  # its log says what came before
        _say(None, [str(failure)])
        return
    if (fast := _fast(plan)) is not None:
        more = 1 if fast.checkpoint.every is None else fast.checkpoint.every
        run_ranks(plain_steps, (fast, steps + more), world_size=fast.world_size, transport="nccl")
    _say(proof.report.get("bits_different"), proof.findings)


def _fast(plan: AnyPlan) -> AnyPlan | None:
    """What is proved of a plan, in fast numerics; None where these do not run its layout."""
    from ...backend.unsupported import unsupported
    from ..dynamic.twin import provable, twin

    small: AnyPlan
    if isinstance(plan, Plan):
        small, _ = twin(plan, captures=True)
    else:
        small, _ = provable(plan, unsupported(plan))
    try:
        return replace(small, numerics=replace(small.numerics, mode="fast", triton_products=None))
    except PlanError:
        return None


def ranks_here(steps: int) -> None:
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
