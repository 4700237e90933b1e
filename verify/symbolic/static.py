"""The floors of proof that need no torch: the rules over a plan's schedule, and its lowered program on symbols.

`prove_static` is what every door asks first: `verify`, `prove` and the assertions, both matrices
and the mutation command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.base.findings import Finding
from ...core.plan.batch_sizes import sizes_of
from ...core.plan.plan import AnyPlan, ModularPlan, Plan
from ...core.plan.schedule_of import schedule_for
from ...core.schedule.schedule import Schedule
from ..schedule.check import Examination, examine
from ..schedule.facts import Facts
from ..schedule.grid import grid
from ..schedule.joined import JoinedExamination, examine_joined
from ..schedule.rules import View
from ..schedule.rules.deadlock import SEND_MEANINGS, send_meanings
from ..schedule.rules.memory import peak_in_flight
from .symbolic import prove as prove_symbolically


@dataclass(frozen=True)
class StaticProof:
    """What the rules and the symbols found. `report` has the JSON keys of `verify`; `findings` are
    all of it, warnings too."""

    report: dict[str, Any]
    findings: tuple[Finding, ...]
    text: str

    @property
    def ok(self) -> bool:
        """True when nothing is wrong, whatever there is to be warned of."""
        return bool(self.report["ok"])

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that refuse the plan."""
        return tuple(finding for finding in self.findings if finding.severity == "error")


def prove_static(plan: AnyPlan, facts: Facts | None = None) -> StaticProof:
    """The rules over every schedule that ranks of the plan run, and where they hold its program on symbols against one
    device; where batches change, of the last and of the smallest. `facts` say what more is to be checked about the plan
    of one model."""
    if isinstance(plan, ModularPlan):
        return _joined(plan, examine_joined(plan))
    first, *shorter = plan.microbatch_counts
    proof = prove_schedule(plan, schedule_for(plan, first), facts)
    for count in shorter:
        if proof.ok:
            proof = _with_shorter(proof, count, prove_schedule(plan, schedule_for(plan, count)))
    if proof.ok and (others := sizes_of(plan.batch)[1:]):
        proof = _with_least(proof, plan.of_size(min(others)))
    return proof


def check_schedule(schedule: Schedule, facts: Facts | None = None) -> StaticProof:
    """The rules over a schedule without a plan."""
    return _examined(schedule, examine(schedule, facts=facts or Facts(), warnings=True))


def prove_schedule(plan: Plan, schedule: Schedule, facts: Facts | None = None) -> StaticProof:
    """One schedule of a plan: the rules, then the symbols."""
    examination = examine(schedule, plan=plan, facts=facts or Facts(), warnings=True)
    proof = _examined(schedule, examination)
    if not proof.ok:
        return proof
    symbolic = prove_symbolically(plan, examination.schedule)
    findings = (*proof.findings, *symbolic.findings)
    report = {
        **proof.report,
        "ok": symbolic.ok,
        "findings": [finding.to_dict() for finding in findings],
        "symbolic": symbolic.report,
    }
    errors = (str(finding) for finding in symbolic.findings if finding.severity == "error")
    return StaticProof(report, findings, "\n".join([proof.text, symbolic.line, *errors]))


def _with_least(proof: StaticProof, least: Plan) -> StaticProof:
    """A proof of a plan whose batches change, with what is wrong with its smallest: where microbatches are few,
    schedules are most unlike."""
    for count in least.microbatch_counts:
        proof = _with_shorter(proof, count, prove_schedule(least, schedule_for(least, count)))
        if not proof.ok:
            break
    return proof


def _with_shorter(proof: StaticProof, count: int, shorter: StaticProof) -> StaticProof:
    """A proof with what is wrong with the schedule of data-parallel ranks that have fewer microbatches."""
    found = shorter.errors
    findings = (*proof.findings, *found)
    report = {**proof.report, "ok": not found, "findings": [finding.to_dict() for finding in findings]}
    verdict = "wrong" if found else "right, too"
    text = "\n".join([proof.text, f"The schedule of ranks with {count} microbatches is {verdict}.", *map(str, found)])
    return StaticProof(report, findings, text)


def _examined(given: Schedule, examination: Examination) -> StaticProof:
    return StaticProof(_report(examination), tuple(examination.findings), _text(given, examination))


def _report(examination: Examination) -> dict[str, object]:
    """`ok`, `findings`, and `checked`: what the rules were asked about."""
    checked = {**_sizes(examination.schedule), "rules": [rule.name for rule in examination.rules]}
    findings = [finding.to_dict() for finding in examination.findings]
    return {"ok": examination.ok, "findings": findings, "checked": checked, "sends": _sends(examination)}


def _joined(plan: ModularPlan, examination: JoinedExamination) -> StaticProof:
    """The proof of a plan of several modules."""
    schedule, num_ways = examination.schedule, examination.num_ways
    counts = {"num_modules": len(plan.modules), "num_ways": num_ways}
    report = {
        "ok": examination.ok,
        "findings": [finding.to_dict() for finding in examination.findings],
        "checked": {**_sizes(schedule), **counts, "rules": list(examination.rules)},
    }
    head = (
        f"{schedule.name} over {len(plan.modules)} modules ({plan.degrees}): {len(schedule)} actions on "
        f"{schedule.num_ranks} pipeline ranks, {schedule.num_microbatches} microbatches; {len(examination.rules)} "
        f"rules checked on {'one way' if num_ways == 1 else f'{num_ways} ways'} from tokens to loss."
    )
    right = (
        "The schedule is right: no rule is broken, and no rank waits in a circle. Bridges bring every rank all it "
        "needs."
    )
    lines = [right] if examination.ok else map(str, examination.findings)
    return StaticProof(report, examination.findings, "\n".join([head, *lines]))


def _sizes(schedule: Schedule) -> dict[str, object]:
    return {
        "schedule": schedule.name,
        "num_actions": len(schedule),
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
    }


def _text(given: Schedule, examination: Examination) -> str:
    """What was checked and the result; with findings, the grid of steps and ranks with their cells marked."""
    schedule = examination.schedule
    lowered = (
        ""
        if len(schedule) == len(given)
        else (f" ({len(given)} given, {len(schedule) - len(given)} added by lowering)")
    )
    checked = (
        f"{schedule.name}: {len(schedule)} actions{lowered} on {schedule.num_ranks} pipeline ranks, "
        f"{schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches; {len(examination.rules)} rules checked"
    )
    listed = "\n".join(str(finding) for finding in examination.findings)
    if examination.ok:
        peak = peak_in_flight(View(schedule))
        held = f"Most microbatches in flight: {max(peak)} (rank {peak.index(max(peak))})."
        sends = "It runs with rendezvous, buffered and stream-ordered sends."
        return f"{checked}.\nThe schedule is right: no rule is broken. {sends} {held}" + (
            f"\n{listed}" if listed else ""
        )
    because = "" if examination.is_complete else ", the others when these findings are gone"
    picture = f"\n\n{grid(schedule, marked)}" if (marked := _marked(examination)) else ""
    return f"{checked}{because}.\n{listed}{picture}"


def _marked(examination: Examination) -> list[int]:
    """Indices of all actions that take part in a violation, the first violation's first."""
    places = (
        (violation.index, *violation.related) for rule, violation in examination.violations if rule.severity == "error"
    )
    return [index for place in places for index in place if index is not None]


def _sends(examination: Examination) -> dict[str, bool] | None:
    """Meaning of a send -> whether the schedule runs with it; None where other findings leave that open."""
    if examination.ok:
        return dict.fromkeys(SEND_MEANINGS, True)  # what runs with rendezvous runs with all
    return send_meanings(View(examination.schedule)) if examination.is_complete else None
