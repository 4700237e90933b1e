"""The static proof of a plan of several modules: the rules over every way through it, and the whole run
blocking, in list order.

A way leads from a module that reads tokens to the last one; its stages make a line, about which the rules speak. Where
branches join, a stage receives once for all its sources: that the whole cannot halt is seen by running its lists. Of
every module the collectives are checked by its own plan, and that the bridges bring every rank what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...core.base.findings import Finding, Where
from ...core.plan.plan import AnyPlan, ModularPlan, ModulePlan
from ...core.plan.schedule_of import modular_schedule, schedule_for
from ...core.program.bridge import messages, stage_grid
from ...core.schedule import lower
from ...core.schedule.action import ActionArray, Kind
from ...core.schedule.placement import Placement
from ...core.schedule.schedule import Schedule
from .check import check, examine
from .facts import Facts
from .plan_facts import plan_calls
from .rules.rule import SCHEDULE_KEY

HALTS = "joined-stages-halt"
"""The rule that is asked of the whole where branches join."""


@dataclass(frozen=True)
class JoinedExamination:
    """What was looked at, and what is wrong: the `schedule` of all stages, the names of the rules that were asked, and
    how many ways lead from tokens to the loss."""

    schedule: Schedule
    findings: tuple[Finding, ...]
    rules: tuple[str, ...]
    num_ways: int

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.findings


def examine_joined(plan: ModularPlan) -> JoinedExamination:
    """Every finding about a plan of modules, for each number of microbatches that its ranks have."""
    findings: list[Finding] = []
    rules: dict[str, None] = {}
    counts = sorted({count for part in plan.parts for count in part.microbatch_counts}, reverse=True)
    for count in counts:
        schedule = modular_schedule(plan, count)
        for way in ways(plan):
            examination = examine(_line(schedule, way))
            rules.update((rule.name, None) for rule in examination.rules)
            findings += examination.findings
        if schedule.placement.sources is not None:
            rules[HALTS] = None
            findings += halts(schedule)
    for part in plan.parts:
        findings += _of_module(part, rules)
    for source, target in plan.joins:
        findings += _of_bridge(source, target)
    unique = tuple(dict.fromkeys(findings))
    return JoinedExamination(modular_schedule(plan, counts[0]), unique, tuple(rules), len(list(ways(plan))))


def check_plan(plan: AnyPlan) -> list[Finding]:
    """What is wrong with the schedule that the ranks of a plan run, of one model or of several."""
    if isinstance(plan, ModularPlan):
        return list(examine_joined(plan).findings)
    return check(lower(schedule_for(plan)), plan=plan)


def ways(plan: ModularPlan) -> Iterator[tuple[int, ...]]:
    """The stages from each stage that reads tokens to the last one."""
    placement = modular_schedule(plan, 1).placement
    for stage in range(placement.num_stages):
        if not placement.sources_of(stage):
            way = [stage]
            while not placement.has_loss(way[-1]):
                way.append(placement.target_of(way[-1]))
            yield tuple(way)


def halts(schedule: Schedule) -> list[Finding]:
    """Runs all rows in list order with sends that wait for their receive: a finding for every rank that
    does not come to its end."""
    placement, rows = schedule.placement, [list(row) for row in schedule.rows()]
    at = [0] * len(rows)
    # what went from one stage to another: kind of send, ends, microbatch
    delivered: set[tuple[Kind, int, int, int | None]] = set()

    def heads(stage: int) -> tuple[Kind, int | None] | None:
        row = rows[stage]
        return (row[at[stage]].kind, row[at[stage]].microbatch) if at[stage] < len(row) else None

    def ends_of(kind: Kind, stage: int) -> tuple[int, ...]:
        forward = kind in (Kind.SEND_F, Kind.RECV_B)
        return (placement.target_of(stage),) if forward else placement.sources_of(stage)

    moved = True
    while moved:
        moved = False
        for stage in range(len(rows)):
            while (head := heads(stage)) is not None:
                kind, microbatch = head
                if kind in (Kind.SEND_F, Kind.SEND_B):
                    receive = Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B
                    others = ends_of(kind, stage)
                    delivered |= {
                        (kind, stage, other, microbatch) for other in others if heads(other) == (receive, microbatch)
                    }
                    done = all((kind, stage, other, microbatch) in delivered for other in others)
                elif kind in (Kind.RECV_F, Kind.RECV_B):
                    send = Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B
                    done = all((send, other, stage, microbatch) in delivered for other in ends_of(kind, stage))
                else:
                    done = True
                if not done:
                    break
                at[stage] += 1
                moved = True
    hint = "List the receive before what waits for it, in the order in which its sources send."
    return [
        Finding.at(
            HALTS,
            "error",
            Where(stage, str(rows[stage][place]), microbatch=rows[stage][place].microbatch),
            "it waits for other ranks, which wait for it.",
            hint,
            key=SCHEDULE_KEY,
        )
        for stage, place in enumerate(at)
        if place < len(rows[stage])
    ]


def _line(schedule: Schedule, way: tuple[int, ...]) -> Schedule:
    """The rows of the stages of a way, numbered along it."""
    placement = Placement.loop(len(way), len(way), schedule.num_microbatches)
    rows = [schedule.row(stage) for stage in way]
    columns = [np.concatenate(column) for column in zip(*(row.columns for row in rows), strict=True)]
    columns[0] = np.concatenate([np.full(len(row), place) for place, row in enumerate(rows)])
    return Schedule(schedule.name, placement, ActionArray(*columns), np.cumsum([0, *map(len, rows)]))


def _of_module(part: ModulePlan, rules: dict[str, None]) -> list[Finding]:
    """Findings about the collectives of a module, which its own ranks make."""
    alone = part.alone
    schedule = lower(schedule_for(alone))
    examination = examine(schedule, facts=Facts(collectives=plan_calls(alone, schedule, per_microbatch=False)))
    rules.update((rule.name, None) for rule in examination.rules)
    return [replace(each, where=f"module {part.name}, {each.where}") for each in examination.findings]


def _of_bridge(source: ModulePlan, target: ModulePlan) -> list[Finding]:
    """A finding where hidden states that ranks of the target need are on no rank of the source."""
    grids = [
        stage_grid(part, samples=[(part.samples_of(dp),) for dp in range(part.layout.dp)], pp_rank=pp_rank)
        for part, pp_rank in ((source, source.layout.pp - 1), (target, 0))
    ]
    try:
        messages(*grids)
        messages(*reversed(grids))
    except ValueError as error:
        where = f"bridge {source.name} -> {target.name}"
        return [
            Finding(
                "bridge-incomplete",
                "error",
                where,
                str(error),
                "Cut the same batch and sequence in both modules.",
                key="batch.sequence",
            )
        ]
    return []
