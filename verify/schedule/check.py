"""`check`: every static rule over a schedule. No torch, no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.base.findings import Finding
from ...core.schedule.action import RECEIVES, SENDS
from ...core.schedule.lower import lower
from ...core.schedule.schedule import Schedule
from .facts import ActivationMemory, Facts
from .plan_facts import plan_facts
from .rules import (
    BUFFER_RULES,
    COLLECTIVE_RULES,
    COMPUTE_RULES,
    CYCLE_RULES,
    DEADLOCK_RULES,
    LAYER_RULES,
    MEMORY_RULES,
    MESSAGE_RULES,
    PLACEMENT_RULES,
    STEP_RULES,
    Rule,
    View,
    Violation,
)

if TYPE_CHECKING:
    from ...core.plan.plan import Plan

_MAX_PER_RULE = 20
"""Findings of one rule that are listed; the last says how many more there are."""


@dataclass(frozen=True)
class Examination:
    """What a check looked at and saw. `schedule` is the one the indices in `violations` count in: lowered as
    far as the check came."""

    schedule: Schedule
    violations: tuple[tuple[Rule, Violation], ...]
    rules: tuple[Rule, ...]

    @property
    def ok(self) -> bool:
        """True when no rule but those that only warn is broken."""
        return all(rule.severity != "error" for rule, _ in self.violations)

    @property
    def is_complete(self) -> bool:
        """True when the check came to its end: no rule was left out because of what others found."""
        return DEADLOCK_RULES[0] in self.rules

    @property
    def findings(self) -> list[Finding]:
        """The violations as text, at most `_MAX_PER_RULE` of each rule."""
        view = View(self.schedule)
        by_rule: dict[str, list[tuple[Rule, Violation]]] = {}
        for rule, violation in self.violations:
            by_rule.setdefault(rule.name, []).append((rule, violation))
        findings = []
        for name, entries in by_rule.items():
            for rule, violation in entries[:_MAX_PER_RULE]:
                findings.append(rule.finding(violation, view))
            if (more := len(entries) - _MAX_PER_RULE) > 0:
                rule = entries[0][0]
                what = f"the same in {more} more places."
                findings.append(Finding(name, rule.severity, "other places", what, key=rule.key))
        return findings


def check(
    schedule: Schedule,
    memory: ActivationMemory | None = None,
    *,
    plan: Plan | None = None,
    facts: Facts | None = None,
    warnings: bool = False,
) -> list[Finding]:
    """What is wrong with a schedule: nothing for one that computes every gradient once and cannot deadlock.

    A compute-only schedule is checked, lowered, and the result checked too. With `memory` the activations each rank
    holds must fit. `plan` and `facts` say what the schedule alone does not (collectives, layers, buffers, message
    formats); parts of `facts` replace those of the plan. With `warnings` also what is right and yet should be known.
    Raises `ScheduleError` when what is given describes another number of stages or ranks than the schedule has.
    """
    return examine(schedule, memory, plan=plan, facts=facts, warnings=warnings).findings


def examine(
    schedule: Schedule,
    memory: ActivationMemory | None = None,
    *,
    plan: Plan | None = None,
    facts: Facts | None = None,
    warnings: bool = False,
) -> Examination:
    """The same with the places as indices, for pictures; and the rules that were asked."""
    given = Facts(memory=memory).over(facts or Facts())
    has_messages = _has_messages(schedule)
    run = _Run(lower(schedule) if has_messages else schedule, plan, given)
    # What is wrong with the layers is no reason not to look at the schedule; everything else
    # counts on the rules before it.
    layers_fit = not run.ask(LAYER_RULES)
    if run.ask(PLACEMENT_RULES):
        return run.result
    if has_messages:
        clean = not run.ask(COMPUTE_RULES + _LOWERED_RULES)
    else:
        if run.ask(COMPUTE_RULES) or run.ask(CYCLE_RULES):
            return run.result
        run = run.continued(lower(schedule))
        clean = not run.ask(_LOWERED_RULES)
    if clean and not run.ask(DEADLOCK_RULES):
        clean = not run.ask(COLLECTIVE_RULES + BUFFER_RULES)
        if clean and layers_fit and warnings:
            run.ask(_WARNINGS)
    return run.result


_LOWERED_RULES = tuple(rule for rule in MESSAGE_RULES + STEP_RULES + MEMORY_RULES if rule.severity == "error")
_WARNINGS = tuple(rule for rule in MEMORY_RULES if rule.severity != "error")


class _Run:
    """One pass over rules: collects what they say."""

    def __init__(self, schedule: Schedule, plan: Plan | None, given: Facts):
        facts = given if plan is None else given.over(plan_facts(plan, schedule))
        facts.require(schedule)
        self.plan, self.given, self.view = plan, given, View(schedule, facts)
        self.rules: tuple[Rule, ...] = ()
        self.violations: list[tuple[Rule, Violation]] = []

    def continued(self, schedule: Schedule) -> _Run:
        """A run over another form of the schedule that keeps what was found."""
        run = _Run(schedule, self.plan, self.given)
        run.rules, run.violations = self.rules, self.violations
        return run

    def ask(self, rules: tuple[Rule, ...]) -> bool:
        """True when any of the rules is broken, of those that have what they need."""
        rules = tuple(rule for rule in rules if rule.needs is None or getattr(self.view.facts, rule.needs) is not None)
        found = [(rule, violation) for rule in rules for violation in rule.find(self.view)]
        self.rules += rules
        self.violations += found
        return bool(found)

    @property
    def result(self) -> Examination:
        """What was seen."""
        return Examination(self.view.schedule, tuple(self.violations), self.rules)


def _has_messages(schedule: Schedule) -> bool:
    kind = schedule.actions.kind
    return any(bool((kind == each).any()) for each in SENDS | RECEIVES)
