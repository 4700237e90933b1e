"""`prove`: every floor of proof for a plan. The static ones come first, then the dynamic one: the plan on the real
backend against the same steps on one device, every canonical tensor, bit for bit.

The first runs keep digests only. Where digests differ both programs run once more and keep the values of those
tensors, so a proof that succeeds stores nothing and one that fails can say which elements differ, and how. This
process needs numpy only.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...backend.data.vocabulary import of_part, unknown_ids
from ...backend.launching.launch import scratch_folder
from ...backend.unsupported import unsupported
from ...core.base.digest import to_hex
from ...core.base.errors import MissingExtraError, PlanError
from ...core.base.findings import Finding
from ...core.layout.products import ProductChoices, choices_text
from ...core.plan.plan import AnyPlan, Plan, only_model
from ...core.plan.sections import DataParallel
from ..causes.describe import (
    count_words,
    describe,
    devices_words,
    divergence,
    fast_findings,
    fast_words,
)
from ..causes.first_cause import Progress, run_against
from ..ledger.compare import Difference
from ..ledger.ledger import RunLedger
from ..run.drop import DropReduction
from ..run.fast_run import FastCheck, check_fast, states
from ..run.proof_run import (
    ON_GPUS,
    ProofJob,
    Scenario,
    TransportName,
    chosen_products,
    one_device,
    probed,
    run_ledger,
)
from ..run.reference import Reference, reference_words
from ..run.references import References
from ..schedule.facts import Facts
from ..symbolic.static import StaticProof, prove_static
from .each_batch import through_batches
from .twin import MAX_THREADS, MAX_WORLD_SIZE, proof_transport, provable, twin

if TYPE_CHECKING:
    from ...backend.model.block import BlockFactory


Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Proof:
    """What a proof found. `report` has the JSON keys of `verify --json`, `findings` are those of the last floor that
    was asked, `changes` say how the twin differs from the plan. `static` are the floors before the dynamic one.
    `products` says who made which products, where our kernels or a GPU made some."""

    report: dict[str, Any]
    findings: tuple[Finding, ...]
    changes: tuple[str, ...]
    static: StaticProof
    products: str = ""

    @property
    def ok(self) -> bool:
        """True when every floor holds: no bit differs, and every assumption about the library holds here."""
        return bool(self.report["ok"])

    def text(self) -> str:
        """The proof for people: the static floors, what was shrunk, what was compared, and the findings."""
        if not self.static.ok:
            why = "a schedule with these findings would hang or compute something else"
            return f"{self.static.text}\nThe dynamic proof was not run: {why}."
        return f"{self.static.text}\n\n{self._dynamic_text()}"

    def _dynamic_text(self) -> str:
        report = self.report
        lines = [f"  {change}" for change in self.changes]
        if lines:
            lines.insert(0, f"What runs here is a twin of the plan with {count_words(len(lines), 'change')}:")
        held = [name for name, holds in report["assumptions"].items() if holds]
        lines.append(f"Assumptions about the library measured here, with these shapes: {', '.join(held)} hold.")
        losses = " ".join(f"{loss:.6f}" for loss in report["losses"])
        ranks, devices = (
            f"{report['world_size']} ranks over {report['transport']}",
            devices_words(report["num_modules"]),
        )
        lines.append(f"{ranks} against {devices}, {count_words(report['steps'], 'step')}, loss {losses}.")
        if self.products:
            lines.append(self.products)
        if report["reference"] is not None:
            lines.append(reference_words(report["reference"]))
        compared = count_words(report["tensors_compared"], "tensor")
        if report["tensors_different"]:
            lines.append(f"NOT EQUAL: {report['tensors_different']} of {compared} differ.")
        else:
            what = (
                "activations and their gradients, loss, parameter gradients, gradient norm, optimizer state and "
                "weights of every rank"
            )
            lines.append(f"0 different bits in {compared}: {what}. Fingerprint {report['fingerprint']}.")
        if report["fast"] is not None:
            lines.append(fast_words(report["fast"]))
        lines += map(str, self.findings)
        return "\n".join(lines)


def prove(
    plan: AnyPlan,
    *,
    block: BlockFactory | None = None,
    transport: TransportName | None = None,
    steps: int = 3,
    fault: DropReduction | None = None,
    facts: Facts | None = None,
    scenario: Scenario | None = None,
    references: References | None = None,
    most_ranks: int | None = None,
    device: Device | None = None,
    brings_groups: bool = False,
    progress: Progress = lambda line: None,
) -> Proof:
    """Asks the static floors (`prove_static`), and where they hold runs `steps` steps of the plan (or of its twin) and
    of one device, compares every tensor of every rank, and checks the single device itself by formulas (`reference`).

    A plan in fast numerics is proved in exact ones first, and then run as it is, by torch's `fully_shard` where it says
    so and ranks are processes, and held to the derived bounds (`bounds`) and to having no common factor (`regression`);
    not in fp16, because bounds of rounding say nothing where numbers leave its range.

    `block` makes a user's own transformer layers instead of ours, in both runs: a function or class of a module, as for
    `Trainer`. `transport` is what training takes unless the plan has more ranks than a twin, and no more than run as
    threads: then ranks are threads. `fault` is injected into the sharded run only. `facts` are more for the rules to
    check. `device` is where all of it is computed: with `cuda` ranks are threads that share a GPU, unless `transport`
    is nccl and each has one. `scenario` is what ranks do besides training; `references` keep what one device computes
    for the next plan of the same problem. With `brings_groups` ranks, which are processes, bring process groups as a
    user may. Plans of more than `most_ranks` are shrunk to a twin; without, as many
    processes or threads run as one host has time for. Raises `PlanError` for a fault that the run cannot have, and for
    a block that cannot be trained; `RankFailure` when a rank dies, or when no rank comes further for
    `train.timeout_s`; `MissingExtraError` without torch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("--dynamic runs the backend, which needs torch. Run `pip install 'shardproof[train]'`.")
    static = prove_static(plan, facts)
    if not static.ok:
        return Proof(static.report, static.errors, (), static)
    transport, device = _place(plan, transport, device)
    most_ranks = most_ranks or (MAX_THREADS if transport == "memory" else MAX_WORLD_SIZE)
    if problems := [of_part(part, each) for part in plan.parts for each in unknown_ids(part)]:
        raise PlanError(problems)  # before a twin has another vocabulary
    small: AnyPlan
    if isinstance(plan, Plan):
        small, changes = twin(plan, most_ranks, captures=transport == "nccl")
        small, batches = through_batches(small, steps)
        changes += batches
    else:
        small, changes = provable(plan, unsupported(plan))
    if fault is not None:
        fault.check(only_model(small, "--inject"))
    if device == "cuda":
        from ...backend.base.environment import check_devices  # imports torch

        check_devices(small.world_size if transport in ON_GPUS else 1)
    small, products = chosen_products(small, device)
    one = one_device(small)
    assumptions = probed(one, device)
    job = ProofJob(small, steps, block=block, scenario=scenario, device=device)
    progress(f"one device: {steps} steps")
    reference, checked = (references or _REFERENCES).of(replace(job, plan=one))
    progress(f"{small.world_size} ranks over {transport}: {steps} steps")
    job = replace(job, fault=fault, brings_groups=brings_groups)
    run, differences = run_against(reference, job, transport, progress=progress)
    proof = _proof(
        static, small, steps, transport, changes, reference, checked, run, differences, assumptions, products
    )
    if plan.numerics.mode == "exact" or not proof.ok or small.precision.dtype == "fp16" or not isinstance(small, Plan):
        return proof
    progress(
        f"{small.layout.world_size} ranks over {transport} in fast numerics: {steps} steps, each from the "
        "weights of one device"
    )
    fast = replace(
        small,
        numerics=replace(small.numerics, mode="fast"),
        precision=replace(small.precision, gradient_dtype=None),
        runtime=replace(small.runtime, compile=plan.runtime.compile),
    )
    if plan.data_parallel.library == "torch" and transport != "memory":
        own = replace(fast, data_parallel=plan.data_parallel, schedule=replace(fast.schedule, max_active_stages=None))
        fast = fast if unsupported(own) else own
    check = run_fast(ProofJob(fast, steps, frozenset(reference.pieces), block=block, device=device), transport)
    findings = (*proof.findings, *fast_findings(fast, check))
    report = {**proof.report, "ok": not findings, "findings": _listed(static, findings), "fast": check.report}
    return replace(proof, report=report, findings=findings)


def _place(plan: AnyPlan, transport: TransportName | None, device: Device | None) -> tuple[TransportName, Device]:
    """The transport and the device of a proof. Raises `PlanError` for a pair that there is not."""
    if transport in ON_GPUS and device != "cpu":
        return transport, "cuda"
    if device != "cuda":
        if transport in ON_GPUS:
            raise PlanError("NCCL moves tensors of GPUs. Leave out --device cpu, or use another --transport.")
        return transport or proof_transport(plan), "cpu"
    if transport not in (None, "memory"):
        raise PlanError(
            f"--transport {transport} moves tensors of the processor. With --device cuda use memory or nccl."
        )
    return "memory", "cuda"


_REFERENCES = References(most=8)
"""Of what a process proves without references of its own."""


def _listed(static: StaticProof, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """What all floors found, as JSON."""
    return [*static.report["findings"], *(finding.to_dict() for finding in findings)]


def run_fast(job: ProofJob, transport: TransportName) -> FastCheck:
    """A job of a plan in fast numerics against one device in exact ones, which keep all values: every step starts from
    the weights and moments of one device, so that errors are those of one step."""
    assert isinstance(job.plan, Plan), "modules are not proved in fast numerics"
    exact = one_device(
        replace(job.plan, numerics=replace(job.plan.numerics, mode="exact"), data_parallel=DataParallel())
    )
    with scratch_folder("fast-") as parent:
        one, many = parent / "one", parent / "many"
        for folder in (one, many):
            folder.mkdir()
        reference = run_ledger(replace(job, plan=exact, folder=one, fault=None, wraps_rank=None), "memory")
        run = run_ledger(replace(job, folder=many, start=states(reference), skips_not_finite=True), transport)
        # a skipped step has no moments
        shown = {key: pieces for key, pieces in reference.pieces.items() if key in run.pieces}
        return check_fast(job.plan, RunLedger(shown), run)


def _proof(
    static: StaticProof,
    plan: AnyPlan,
    steps: int,
    transport: str,
    changes: Sequence[str],
    reference: RunLedger,
    checked: Reference | None,
    run: RunLedger,
    differences: Sequence[Difference],
    assumptions: Mapping[str, Finding | None],
    products: ProductChoices,
) -> Proof:
    broken = [finding for finding in assumptions.values() if finding is not None]
    leaves = {part.name: asdict(part.leaf_sizes) for part in plan.parts}
    findings = (*broken, *(checked.findings if checked else ()), *describe(plan, run, differences))
    report = {  # bits_different is a lower bound where values were not kept: at least one bit per tensor
        **static.report,
        "ok": not findings,
        "findings": _listed(static, findings),
        "steps": steps,
        "losses": reference.scalars("loss"),
        "grad_norms": reference.scalars("grad_norm"),
        "tensors_compared": len(reference.pieces),
        "tensors_different": len(differences),
        "bits_different": sum(d.values.bits_different if d.values else 1 for d in differences),
        "first_divergence": divergence(plan, differences[0]) if differences else None,
        "world_size": plan.world_size,
        "num_modules": len(plan.parts),
        "transport": transport,
        "assumptions": {name: finding is None for name, finding in assumptions.items()},
        "reference": checked.report if checked else None,
        "twin": list(changes),
        "leaf_sizes": leaves.get("", leaves),
        "products": {form: {"by": choice.by, "why": choice.why} for form, choice in products.items()},
        "fingerprint": _fingerprint(reference),
        "fast": None,
    }
    is_said = transport in ON_GPUS or any(choice.kernels for choice in products.values())
    return Proof(report, findings, tuple(changes), static, choices_text(products) if is_said else "")


def _fingerprint(ledger: RunLedger) -> str:
    """One hash over every digest of a run: equal on two machines exactly when all their tensors are."""
    lines = (f"{tuple(key)} {to_hex(pieces[0].digest)}\n" for key, pieces in ledger.pieces.items())
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
