"""Why the best layout is the best, in words: what its neighbours and the next ones would cost, each simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.base.errors import ShardproofError
from ...core.base.units import format_bytes
from ...core.plan.plan import Plan
from ...core.plan.runtime import Recompute
from ...core.plan.sections import ScheduleChoice
from ..memory.capacity import capacity_of
from ..simulation.simulate import simulate
from ..stack.profiles import PROFILES
from .freed import KEYS, chosen_of, word
from .space import RECOMPUTE_MODES

CAUSES = {
    "compute": "in computing",
    "recompute": "in recomputing",
    "tp_comm": "in TP",
    "cp_comm": "in CP",
    "ep_comm": "in EP",
    "pp_comm": "in waiting for messages",
    "dp_comm": "in DP",
    "optimizer": "in the optimizer step",
    "bubble": "in the bubble",
    "other": "in waiting for the host",
}

LEAST_SHARE = 0.002
"""Differences of a part below this share of the step are not worth a word."""

MOST_CAUSES = 2


class Reason(NamedTuple):
    """A layout that is not the best: what it changes, its seconds and bytes (of the worst rank), whether it fits, and
    the difference in words."""

    change: str
    step_time_s: float
    peak_memory_bytes: int
    fits: bool
    text: str


def reasons(plans: Sequence[Plan], most_bytes: int | None = None) -> list[Reason]:
    """Of the best plan's neighbours, which differ in one choice, and of the plans ranked after it, why they are not the
    best. `most_bytes` is a limit of the worst rank besides the device's own."""
    if not plans:
        return []
    best = plans[0]
    report, found = simulate(best).report, dict[str, Reason]()
    for plan in (*plans[1:], *neighbours(best)):
        change = changes(best, plan)
        if change and change not in found:
            found[change] = _reason(best, report, plan, change, most_bytes)
    return list(found.values())


def neighbours(plan: Plan) -> Iterator[Plan]:
    """The legal plans on as many devices that differ from one in one choice: twice or half of a degree (dp makes up for
    it), the next ZeRO stages, another microbatch, recomputation or schedule."""
    layout = plan.layout
    for axis in ("tp", "cp", "pp"):
        size = getattr(layout, axis)
        yield from _legal(plan, layout={axis: size * 2, "dp": layout.dp // 2} if layout.dp % 2 == 0 else None)
        yield from _legal(plan, layout={axis: size // 2, "dp": layout.dp * 2} if size % 2 == 0 else None)
    if plan.model.is_moe:
        yield from _legal(plan, layout={"ep": layout.ep * 2})
        yield from _legal(plan, layout={"ep": layout.ep // 2} if layout.ep % 2 == 0 else None)
    for zero in (layout.zero - 1, layout.zero + 1):
        yield from _legal(plan, layout={"zero": zero} if 0 <= zero <= 3 and layout.dp * layout.cp > 1 else None)
    for micro in (plan.batch.micro_size * 2, plan.batch.micro_size // 2):
        yield from _legal(plan, batch={"micro_size": micro} if micro else None)
    for mode in RECOMPUTE_MODES:
        yield from _legal(plan, recompute=Recompute(mode) if mode != plan.recompute.mode else None)
    for name in PROFILES[plan.runtime.profile].schedules if layout.pp > 1 else ():
        if name != plan.schedule.name:
            yield from _legal(plan, schedule=ScheduleChoice(name))


def _legal(plan: Plan, **nouns: Any) -> Iterator[Plan]:
    """The plan with nouns, or with fields of nouns, that are others; nothing where it is not legal."""
    if None in nouns.values():
        return
    try:
        changed = {
            name: replace(getattr(plan, name), **value) if isinstance(value, dict) else value
            for name, value in nouns.items()
        }
        yield replace(plan, **changed)
    except ShardproofError:
        return


def changes(best: Plan, plan: Plan) -> str:
    """What a plan has otherwise than the best, as keys: `tp=4 dp=8`."""
    rows: list[tuple[str, Any, Any]] = [
        *((name, getattr(best.layout, name), getattr(plan.layout, name)) for name in ("tp", "cp", "pp", "vpp", "ep")),
        ("etp", best.layout.expert_tp, plan.layout.expert_tp) if best.model.is_moe else ("etp", 0, 0),
        ("zero", best.layout.zero, plan.layout.zero),
        ("micro", best.batch.micro_size, plan.batch.micro_size),
        ("recompute", best.recompute.mode, plan.recompute.mode),
        ("schedule", best.schedule.name, plan.schedule.name),
    ]
    split = (best.layout.sequence_parallel, plan.layout.sequence_parallel)
    if split[0] != split[1] and best.layout.tp > 1 < plan.layout.tp:
        rows.append(("sequence_parallel", str(split[0]).lower(), str(split[1]).lower()))
    others, new = (chosen_of(each, KEYS) for each in (best, plan))
    rows += [(key.partition(".")[2], word(others[key]), word(new[key])) for key in KEYS]
    return " ".join(f"{name}={new}" for name, old, new in rows if old != new)


def _reason(best: Plan, report: Mapping[str, Any], plan: Plan, change: str, most_bytes: int | None) -> Reason:
    try:
        other = simulate(plan).report
    except ShardproofError as error:
        return Reason(change, float("inf"), 0, False, str(error).partition("\n")[0])
    peak, usable = other["peak_memory_bytes"], capacity_of(plan).usable_bytes
    usable = usable if most_bytes is None else min(usable, most_bytes)
    words = [_over(report, other, usable)] if peak > usable else []
    words += [_slower(report, other)] if not words or other["step_time_s"] > report["step_time_s"] else []
    text = ", ".join(each for each in (_leaves_node(best, plan), *words) if each)
    return Reason(change, other["step_time_s"], peak, peak <= usable, text)


def _over(report: Mapping[str, Any], other: Mapping[str, Any], usable: int) -> str:
    """How much a plan holds too much, and what has grown most."""
    grown = {name: count - report["memory_bytes"][name] for name, count in other["memory_bytes"].items()}
    name = max(grown, key=lambda each: grown[each])
    over = f"{format_bytes(other['peak_memory_bytes'] - usable)} over on rank {other['peak_memory_rank']}"
    if grown[name] <= 0:
        return over
    before, after = report["memory_bytes"][name], other["memory_bytes"][name]
    twice = ", held twice" if name == "weights" and before and 1.9 < after / before < 2.1 else ""
    return f"{over}: {name} {format_bytes(after)} instead of {format_bytes(before)}{twice}"


def _slower(report: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How much longer the step is, and in what, as shares of the best step."""
    step_s = report["step_time_s"]
    total = other["step_time_s"] / step_s - 1
    parts = {name: (seconds - report["time_s"][name]) / step_s for name, seconds in other["time_s"].items()}
    causes = sorted((name for name in parts if abs(parts[name]) >= LEAST_SHARE), key=lambda name: -parts[name])
    said = [f"{parts[name]:+.1%} {CAUSES[name]}" for name in causes if (parts[name] > 0) == (total > 0)]
    said = (said if total > 0 else said[::-1])[:MOST_CAUSES]
    return f"{total:+.1%} of the step" + (f": {', '.join(said)}" if said else "")


def _leaves_node(best: Plan, plan: Plan) -> str:
    """The axis whose groups no longer lie in one node, whose links are faster than the network."""
    per_node = plan.cluster.devices_per_node
    before, now = best.layout, plan.layout
    for axis, inside, outside in (("tp", before.tp, now.tp), ("cp", before.tp * before.cp, now.tp * now.cp)):
        if inside <= per_node < outside and getattr(now, axis) > getattr(before, axis):
            return f"{axis} leaves the node ({outside} ranks, {per_node} on its links)"
    return ""
