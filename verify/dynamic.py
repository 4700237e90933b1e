"""The dynamic proof: a plan on the real backend against the same steps on one device, every canonical tensor, bit for bit.

The first runs keep digests only. Where digests differ both programs run once more and keep the values of those tensors, so a proof
that succeeds stores nothing and one that fails can say which elements differ, and how. This process needs numpy only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..backend.launch import run_ranks
from ..backend.unsupported import unsupported
from ..core.errors import MissingExtraError, PlanError, RankFailure
from ..core.findings import Finding
from ..core.layout import Layout
from ..core.modules import ModularPlan, uncut
from ..core.plan import Batch, DataParallel, Plan, Recompute, ScheduleChoice
from ..core.variation import NO_VARIATION
from .compare import Difference, action_of, compare, explain, name_of, places, ranks_listed
from .digest import to_hex
from .fast_run import FastCheck, check_fast, state_files
from .ledger import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, OPTIMIZER, WEIGHT, Key, LedgerWriter, RankLedger, RunLedger
from .modules import leaf_sizes, parts_of, plan_of_rank, provable, tensor_shapes
from .mutations import DropReduction, drop_reduction
from .twin import twin

if TYPE_CHECKING:
    from ..backend.model.block import BlockFactory

CAPTURE_BYTES = 2**28
"""Values of differing tensors that a second run keeps, over all ranks: the first ones in dataflow order."""

Progress = Callable[[str], None]
TransportName = Literal["gloo", "memory", "nccl"]


@dataclass(frozen=True)
class Proof:
    """What a dynamic proof found. `report` has the JSON keys of `verify --json`; `changes` says how the twin differs from the plan."""

    report: dict[str, Any]
    findings: tuple[Finding, ...]
    changes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when no bit differs and every assumption about the library holds here."""
        return bool(self.report["ok"])

    def text(self) -> str:
        """The proof for people: what was shrunk, what was compared, and the findings."""
        report = self.report
        lines = [f"  {change}" for change in self.changes]
        if lines:
            lines.insert(0, f"What runs here is a twin of the plan with {_count(len(lines), 'change')}:")
        held = [name for name, holds in report["assumptions"].items() if holds]
        lines.append(f"Assumptions about the library measured here, with these shapes: {', '.join(held)} hold.")
        losses = " ".join(f"{loss:.6f}" for loss in report["losses"])
        ranks, devices = f"{report['world_size']} ranks over {report['transport']}", _devices(report["num_modules"])
        lines.append(f"{ranks} against {devices}, {_count(report['steps'], 'step')}, loss {losses}.")
        compared = _count(report["tensors_compared"], "tensor")
        if report["tensors_different"]:
            lines.append(f"NOT EQUAL: {report['tensors_different']} of {compared} differ.")
        else:
            what = "activations and their gradients, loss, parameter gradients, gradient norm, optimizer state and weights of every rank"
            lines.append(f"0 different bits in {compared}: {what}. Fingerprint {report['fingerprint']}.")
        if report["fast"] is not None:
            lines.append(_fast_words(report["fast"]))
        lines += map(str, self.findings)
        return "\n".join(lines)


@dataclass(frozen=True)
class ProofJob:
    """What every rank of one run needs to know."""

    plan: Plan | ModularPlan
    steps: int
    capture: frozenset[Key] = frozenset()
    folder: Path | None = None
    fault: DropReduction | None = None
    block: BlockFactory | None = None
    start: Mapping[Key, str] = field(default_factory=dict)
    """Files of weights and moments that every step but the first starts from; none to go on from the step before."""
    core: int | None = None
    """The core that the ranks keep to, where they are threads that would only wake each other on several; None for any."""


def prove(
    plan: Plan | ModularPlan,
    *,
    block: BlockFactory | None = None,
    transport: TransportName = "gloo",
    steps: int = 3,
    fault: DropReduction | None = None,
    progress: Progress = lambda line: None,
) -> Proof:
    """Runs `steps` steps of the plan (or of its twin) and of one device, and compares every tensor of every rank.

    A plan in fast numerics is proved in exact ones first, and then run as it is, by torch's `fully_shard` where it says so and ranks are
    processes, and held to the derived bounds (`bounds`); not in fp16, because bounds of rounding say nothing where numbers leave its range.

    `block` makes a user's own transformer layers instead of ours, in both runs: a function or class of a module, as for `Trainer`.
    `fault` is injected into the sharded run only. Raises `PlanError` for a fault that the run cannot have, `RankFailure` when a rank
    dies, `MissingExtraError` without torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("--dynamic runs the backend, which needs torch. Run: pip install 'shardproof[train]'.")
    small: Plan | ModularPlan
    small, changes = twin(plan) if isinstance(plan, Plan) else provable(plan, unsupported(plan))
    if fault is not None:
        if not isinstance(small, Plan):
            raise PlanError("--inject breaks a reduction of one model, and this plan has [[modules]]. Leave it out.")
        fault.check(small)
    one = one_device(small)
    assumptions = probed(one)
    progress(f"one device: {steps} steps")
    reference = run_ledger(ProofJob(one, steps, block=block), "memory")
    progress(f"{small.world_size} ranks over {transport}: {steps} steps")
    run, differences = run_against(reference, ProofJob(small, steps, fault=fault, block=block), transport, progress=progress)
    proof = _proof(small, steps, transport, changes, reference, run, differences, assumptions)
    if plan.numerics.mode == "exact" or not proof.ok or small.precision.dtype == "fp16" or not isinstance(small, Plan):
        return proof
    progress(f"{small.layout.world_size} ranks over {transport} in fast numerics: {steps} steps, each from the weights of one device")
    fast = replace(small, numerics=replace(small.numerics, mode="fast"), precision=replace(small.precision, gradient_dtype=None))
    if isinstance(plan, Plan) and plan.data_parallel.library == "torch" and transport != "memory":
        own = replace(fast, data_parallel=plan.data_parallel, schedule=replace(fast.schedule, max_active_stages=None))
        fast = fast if unsupported(own) else own
    check = run_fast(ProofJob(fast, steps, frozenset(reference.pieces), block=block), transport)
    findings = (*proof.findings, *_fast_findings(fast, check))
    report = {**proof.report, "ok": not findings, "findings": [each.to_dict() for each in findings], "fast": check.report}
    return Proof(report, findings, proof.changes)


def run_fast(job: ProofJob, transport: TransportName) -> FastCheck:
    """A job of a plan in fast numerics against one device in exact ones, which keep all values: every step starts from the weights and
    moments of one device, so that errors are those of one step."""
    assert isinstance(job.plan, Plan), "modules are not proved in fast numerics"
    exact = one_device(replace(job.plan, numerics=replace(job.plan.numerics, mode="exact"), data_parallel=DataParallel()))
    with tempfile.TemporaryDirectory(prefix="shardproof-fast-") as name:
        one, many = Path(name, "one"), Path(name, "many")
        for folder in (one, many):
            folder.mkdir()
        reference = run_ledger(replace(job, plan=exact, folder=one, fault=None), "memory")
        return check_fast(job.plan, reference, run_ledger(replace(job, folder=many, start=state_files(reference)), transport))


@overload
def one_device(plan: Plan) -> Plan: ...
@overload
def one_device(plan: ModularPlan) -> ModularPlan: ...
def one_device(plan: Plan | ModularPlan) -> Plan | ModularPlan:
    """The same problem on one device: layout 1, one sample per microbatch, one after the other, every activation kept. Of several modules
    each has such a device."""
    if not isinstance(plan, Plan):
        return uncut(plan)
    return replace(
        plan,
        layout=Layout(),
        cluster=replace(plan.cluster, num_devices=1),
        batch=Batch(plan.batch.global_size, 1, plan.batch.sequence),
        runtime=replace(plan.runtime, tp_comm_overlap=None, ep_comm_overlap=None, p2p_overlap=None, p2p_batched=None, trim_padding=False),
        schedule=ScheduleChoice("1F1B"),
        recompute=Recompute("none"),
        data_parallel=DataParallel(),
        variation=NO_VARIATION,
    )


def probe_rank(transport: Any, plan: Plan) -> dict[str, Finding | None]:
    """Every assumption of exact numerics about the library by name, with a finding where it does not hold for the plan's shapes here."""
    from ..backend.numerics.probe import PROBES, probe

    broken = {finding.rule: finding for finding in probe(plan, transport.device)}
    return {entry.name: broken.get(entry.name) for entry in PROBES}


def probed(one: Plan | ModularPlan) -> dict[str, Finding | None]:
    """`probe_rank` of every model of a plan, in a process that has torch."""
    found: dict[str, Finding | None] = {}
    for part in {part.model: part for part in parts_of(one)}.values():
        for name, finding in run_ranks(probe_rank, part, world_size=1, transport="memory")[0].items():
            found[name] = found.get(name) or finding
    return found


def prove_rank(transport: Any, job: ProofJob) -> RankLedger:
    """What one rank does, in a process that has torch: the trainer's steps with a ledger as observer."""
    from ..backend.modules import training_rank
    from ..backend.numerics import make_numerics

    if job.core is not None:
        os.sched_setaffinity(0, {job.core})  # of this thread, and of those that it starts
    part = plan_of_rank(job.plan, transport.global_rank)
    numerics = make_numerics(part, transport.device, global_rank=transport.global_rank)
    if job.fault is not None and job.fault.global_rank == transport.global_rank:
        numerics = drop_reduction(numerics, job.fault, lambda: transport.recorder.current_layer)
    writer = LedgerWriter(transport.global_rank, tensor_shapes(job.plan), job.capture, job.folder, cp=part.layout.cp)
    rank = training_rank(transport, job.plan, model=job.block, numerics=numerics, observer=writer)
    for step in range(job.steps):
        if step and job.start:
            _restore(rank, job.start, step - 1)
        rank.step(step)
    return writer.finish()


def _restore(rank: Any, files: Mapping[Key, str], step: int) -> None:
    """Gives a training rank the weights and moments that are in `files` as they were after a step."""
    import torch

    def load(key: Key, target: Any, slices: tuple[slice, ...]) -> None:
        with torch.no_grad():
            target.copy_(torch.from_numpy(np.load(files[key])[slices]))

    for held in rank.optimizer.held:
        load(Key(step, WEIGHT, held.name), held.tensor, held.slices)
        for moment, tensor in zip(("exp_avg", "exp_avg_sq"), rank.optimizer.moments(held), strict=True):
            load(Key(step, OPTIMIZER, f"{held.name}.{moment}"), tensor, held.slices)
    rank.refresh()


def run_ledger(job: ProofJob, transport: TransportName) -> RunLedger:
    """What all ranks of a job's plan computed. Raises `RankFailure` when one dies, `PlanError` for what only a rank could find."""
    try:
        return RunLedger.merge(run_ranks(prove_rank, job, world_size=job.plan.world_size, transport=transport))
    except RankFailure as failure:
        if isinstance(failure.__cause__, PlanError):  # the user's problem, found by a rank: no fault of that rank
            raise failure.__cause__ from None
        raise


def run_against(
    reference: RunLedger, job: ProofJob, transport: TransportName, *, progress: Progress = lambda line: None
) -> tuple[RunLedger, list[Difference]]:
    """What the ranks of a job's plan computed, and every tensor of it that is not that of the reference, `one_device` of the same plan."""
    run = run_ledger(job, transport)
    differences = compare(reference, run, job.plan.model if isinstance(job.plan, Plan) else job.plan)
    if differences:
        progress(f"{len(differences)} tensors differ: both run again and keep the values of the first of them")
        one = ProofJob(one_device(job.plan), job.steps, block=job.block)
        differences = _look_closer(differences, reference, one, job, transport)
    return run, differences


def _look_closer(
    differences: Sequence[Difference], reference: RunLedger, one: ProofJob, many: ProofJob, transport: TransportName
) -> list[Difference]:
    """The differences with their values, as far as the capture budget reaches. The folder of values is removed in any case."""
    chosen = _within_budget(differences, reference, many.plan.world_size)
    with tempfile.TemporaryDirectory(prefix="shardproof-proof-") as name:
        ledgers = []
        runs: tuple[tuple[ProofJob, TransportName, str], ...] = ((one, "memory", "one"), (many, transport, "many"))
        for job, run_transport, part in runs:
            folder = Path(name, part)
            folder.mkdir()
            ledgers.append(run_ledger(replace(job, capture=chosen, folder=folder), run_transport))
        return [explain(d, *ledgers) if d.key in chosen else d for d in differences]


def _within_budget(differences: Sequence[Difference], reference: RunLedger, world_size: int) -> frozenset[Key]:
    chosen: set[Key] = set()
    used = 0
    for difference in differences:
        if difference.problem == "differs":
            used += 4 * math.prod(reference.pieces[difference.key][0].shape) * (world_size + 1)
            if chosen and used > CAPTURE_BYTES:
                break
            chosen.add(difference.key)
    return frozenset(chosen)


def _proof(
    plan: Plan | ModularPlan,
    steps: int,
    transport: str,
    changes: Sequence[str],
    reference: RunLedger,
    run: RunLedger,
    differences: Sequence[Difference],
    assumptions: Mapping[str, Finding | None],
) -> Proof:
    broken = [finding for finding in assumptions.values() if finding is not None]
    findings = (*broken, *describe(plan, run, differences))
    report = {  # bits_different is a lower bound where values were not kept: at least one bit per tensor
        "ok": not findings,
        "findings": [finding.to_dict() for finding in findings],
        "steps": steps,
        "losses": reference.scalars("loss"),
        "tensors_compared": len(reference.pieces),
        "tensors_different": len(differences),
        "bits_different": sum(d.values.bits_different if d.values else 1 for d in differences),
        "first_divergence": _divergence(plan, differences[0]) if differences else None,
        "world_size": plan.world_size,
        "num_modules": len(parts_of(plan)),
        "transport": transport,
        "assumptions": {name: finding is None for name, finding in assumptions.items()},
        "twin": list(changes),
        "leaf_sizes": leaf_sizes(plan),
        "fingerprint": _fingerprint(reference),
        "fast": None,
    }
    return Proof(report, findings, tuple(changes))


def _fingerprint(ledger: RunLedger) -> str:
    """One hash over every digest of a run: equal on two machines exactly when all their tensors are."""
    lines = (f"{tuple(key)} {to_hex(pieces[0].digest)}\n" for key, pieces in ledger.pieces.items())
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


# Words for differences


def _devices(num_modules: int) -> str:
    return "one device" if num_modules == 1 else f"one device for each of {num_modules} modules"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _divergence(plan: Plan | ModularPlan, difference: Difference) -> dict[str, Any]:
    """The JSON form of the first divergence. Steps are counted from 1."""
    key, values = difference.key, difference.values
    rank = difference.global_ranks[0] if difference.global_ranks else None
    action = None if rank is None else action_of(plan, key, rank)
    return {
        "step": key.step + 1,
        "rank": rank,
        "ranks": list(difference.global_ranks),
        "action": None if action is None else str(action),
        "microbatch": None if action is None else action.microbatch,
        "tensor": key.tensor,
        "phase": key.phase,
        "problem": difference.problem,
        "elements_different": values.elements_different if values else None,
        "num_elements": values.num_elements if values else None,
        "bits_different": values.bits_different if values else None,
        "class": values.kind if values else "unknown",
    }


def _fast_words(fast: Mapping[str, Any]) -> str:
    compared, nearest = _count(fast["tensors"], "tensor"), fast["nearest"]
    if fast["tensors_outside"]:
        return f"Fast numerics LEAVE THE BOUND: {fast['tensors_outside']} of {compared} are farther from exact ones than rounding allows."
    place = f"{nearest['phase']} {nearest['tensor']} of step {nearest['step']}"
    return f"Fast numerics, {compared}: all within the bound derived from their terms; {place} uses most of it, {nearest['share']:.2%}."


def _fast_findings(plan: Plan, check: FastCheck) -> list[Finding]:
    """The first tensor that leaves its bound, and one line about the rest."""
    if not check.wrong:
        return []
    key, far = check.wrong[0], check.distances[check.wrong[0]]
    where = ", ".join([f"step {key.step + 1}", *places(plan, key, (far.global_rank,)), name_of(key)])
    what = f"fast numerics are {far.distance:.3g} from exact ones, where {check.terms(key)} bound the distance by {far.bound:.3g}."
    hint = "Orders of sums cannot explain it: look at what is summed over ranks here, and how often."
    if plan.model.is_moe:
        hint += " With experts also at the router: rounding may have decided which of two equal experts a token goes to."
    found = [Finding("bound-left", "error", where, what, hint)]
    if rest := check.wrong[1:]:
        names = ", ".join(list(dict.fromkeys(name_of(each._replace(sample=None)) for each in rest))[:3])
        later = f"{len(rest)} more tensors leave theirs, first {names}."
        found.append(Finding("bound-left-later", "info", "later in dataflow order", later))
    return found


def describe(plan: Plan | ModularPlan, run: RunLedger, differences: Sequence[Difference]) -> list[Finding]:
    """The first difference as an error that says where and how, and one line about the rest."""
    if not differences:
        return []
    first, rest = differences[0], differences[1:]
    found = [Finding(*_first_words(plan, run, first))]
    if rest:
        names = dict.fromkeys(name_of(d.key._replace(sample=None)) for d in rest)
        later = ", ".join(list(names)[:3])
        found.append(Finding("bits-differ-later", "info", "later in dataflow order", f"{len(rest)} more tensors differ, first {later}."))
    return found


def _first_words(plan: Plan | ModularPlan, run: RunLedger, first: Difference) -> tuple[str, Literal["error"], str, str, str]:
    """Rule, severity, where, what and hint of the first divergence."""
    key, values, ranks = first.key, first.values, first.global_ranks
    where = ", ".join([f"step {key.step + 1}", *places(plan, key, ranks), name_of(key)])
    if first.problem != "differs":
        what = {
            "missing": "one device computes this tensor, but no rank did.",
            "extra": "these ranks computed a tensor that one device does not.",
            "incomplete": "the pieces of the ranks do not make up the whole tensor exactly once.",
        }[first.problem]
        return f"tensor-{first.problem}", "error", where, what, "Look at which layers and leaves each rank holds."
    if values is None or not ranks:
        what = "digests differed, but a second run of the same ranks had the right bits."
        hint = "Something depends on time: an unordered reduction, a buffer reused too early, or memory never written."
        return "run-dependent", "error", where, what, hint
    what = (
        f"{values.elements_different} of {values.num_elements} elements differ ({values.bits_different} bits, {values.kind}); "
        f"at {list(values.index)} one device has {values.expected!r}, rank {ranks[0]} has {values.found!r}."
    )
    return "bits-differ", "error", where, what, _hint(plan, run, first)


def _hint(plan: Plan | ModularPlan, run: RunLedger, first: Difference) -> str:
    """Which reduction to look at: the one over the axis that separates wrong replicas from right ones."""
    wrong = set(first.global_ranks)
    regions = {piece.region for piece in run.pieces[first.key] if piece.global_rank in wrong}
    right = {piece.global_rank for piece in run.pieces[first.key] if piece.region in regions} - wrong
    if not right:
        return "Every rank that holds this tensor has the same wrong bits: look at what feeds it, the last tensor before it was right."
    axis = _axis_between(plan_of_rank(plan, min(wrong)), wrong, right, first.key.phase)
    what = "input-gradient reduction behind" if first.key.phase == ACTIVATION_GRADIENT else "reduction of"
    if first.key.phase not in (ACTIVATION, ACTIVATION_GRADIENT, GRADIENT):
        what = "step of"
    plural = len(right) > 1
    replicas = f"{'Replicas' if plural else 'The replica'} on {ranks_listed(sorted(right))} {'are' if plural else 'is'} right"
    return f"{replicas}: look at the {axis} {what} {first.key.tensor} on rank {min(wrong)}."


def _axis_between(plan: Plan, wrong: set[int], right: set[int], phase: str) -> str:
    """The kind of reduction that tells wrong ranks from right ones: over tensor or data parallelism, or over replicas of a stage."""

    def separates(axis: str) -> bool:
        places = [{plan.layout.coordinates(rank)[axis] for rank in ranks} for ranks in (wrong, right)]
        return places[0].isdisjoint(places[1])

    if separates("tp") or phase in (ACTIVATION, ACTIVATION_GRADIENT):
        return "tensor-parallel"
    return "cross-replica" if separates("pp") and not separates("dp") else "data-parallel"
