"""`check`: every static rule over a schedule. No torch, no processes."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.action import RECEIVES, SENDS
from ..core.errors import ScheduleError
from ..core.findings import Finding
from ..core.schedule import Schedule
from ..core.schedules.lower import lower
from .rules import (
    COMPUTE_RULES,
    CYCLE_RULES,
    DEADLOCK_RULES,
    MEMORY_RULES,
    MESSAGE_RULES,
    PLACEMENT_RULES,
    STEP_RULES,
    ActivationMemory,
    Rule,
    View,
    Violation,
)

_MAX_PER_RULE = 20
"""Findings of one rule that are listed; the last says how many more there are."""


@dataclass(frozen=True)
class Examination:
    """What a check looked at and saw. `schedule` is the one the indices in `violations` count in: lowered as far as the check came."""

    schedule: Schedule
    violations: tuple[tuple[Rule, Violation], ...]
    rules: tuple[Rule, ...]

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
                where = f"rank {violation.pp_rank}" if violation.index is None else view.place(violation.index)
                findings.append(Finding(name, "error", where, violation.what, rule.hint))
            if len(entries) > _MAX_PER_RULE:
                findings.append(Finding(name, "error", "other places", f"the same in {len(entries) - _MAX_PER_RULE} more places."))
        return findings


def check(schedule: Schedule, memory: ActivationMemory | None = None) -> list[Finding]:
    """What is wrong with a schedule: nothing for one that computes every gradient once and cannot deadlock.

    A compute-only schedule is checked, lowered, and the result checked too. With `memory` the activations each rank holds must fit.
    Raises `ScheduleError` when `memory` does not describe the schedule's stages and ranks.
    """
    return examine(schedule, memory).findings


def examine(schedule: Schedule, memory: ActivationMemory | None = None) -> Examination:
    """The same with the places as indices, for pictures; and the rules that were asked."""
    _fits(schedule, memory)
    has_messages = _has_messages(schedule)
    lowered_rules = MESSAGE_RULES + STEP_RULES + (() if memory is None else MEMORY_RULES)
    run = _Run(View(lower(schedule) if has_messages else schedule, memory))
    if run.ask(PLACEMENT_RULES):
        return run.result
    if has_messages:
        clean = not run.ask(COMPUTE_RULES + lowered_rules)
    else:
        if run.ask(COMPUTE_RULES) or run.ask(CYCLE_RULES):
            return run.result
        run = _Run(View(lower(schedule), memory), run.rules)
        clean = not run.ask(lowered_rules)
    if clean:
        run.ask(DEADLOCK_RULES)
    return run.result


class _Run:
    """One pass over rules: collects what they say."""

    def __init__(self, view: View, rules: tuple[Rule, ...] = ()):
        self.view = view
        self.rules = rules
        self.violations: list[tuple[Rule, Violation]] = []

    def ask(self, rules: tuple[Rule, ...]) -> bool:
        """True when any of the rules is broken."""
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


def _fits(schedule: Schedule, memory: ActivationMemory | None) -> None:
    if memory is None:
        return
    for what, given, expected in (
        ("stage_bytes", len(memory.stage_bytes), schedule.num_stages),
        ("capacity_bytes", len(memory.capacity_bytes), schedule.num_ranks),
    ):
        if given != expected:
            raise ScheduleError(f"memory.{what} has {given} entries, but schedule {schedule.name} needs {expected}.")
