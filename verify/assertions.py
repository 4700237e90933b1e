"""Proofs as assertions of a test suite: they return nothing when the proof holds, and fail with what was found.

    from shardproof import assert_bitwise

    def test_our_layout_computes_what_one_device_computes():
        assert_bitwise("plan.toml")

A plan is a `Plan`, the path of a plan file, or its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..core.commands import service
from ..core.files import read_text
from ..core.findings import Finding, ProofFailed, Spot
from ..core.modules import ModularPlan
from ..core.plan import Plan
from ..core.plan_toml import any_plan, read_values
from ..core.schedule import Schedule
from ..core.schedules import from_csv, read_csv, schedule_for
from ..core.units import format_bytes
from .spots import spot_of


def assert_bitwise(
    plan: Plan | ModularPlan | Path | str,
    *,
    block: Callable[..., Any] | None = None,
    transport: Literal["gloo", "memory", "nccl"] | None = None,
    steps: int = 3,
) -> None:
    """Fails unless `steps` optimizer steps of the plan compute, to the last bit, what one device computes.

    The schedule and the program are proved first, as in `assert_schedule`. `block` makes a user's own transformer layers instead of
    ours: a function or class of a module. With `transport="memory"` ranks are threads of one process, which starts faster; without, they
    are processes up to 8 ranks.

    Raises `ProofFailed`, an `AssertionError`; `PlanError` for a plan that cannot be run here, `RankFailure` when a rank dies,
    `MissingExtraError` without torch.
    """
    __tracebackhide__ = True
    from .dynamic import prove

    given, source = _read(plan)
    if isinstance(given, Schedule):
        raise TypeError("assert_bitwise runs a plan, and this is only a schedule. Give a plan, or use assert_schedule.")
    if found := _static_errors(given):
        raise _failed("the schedule is not right, so no bits were compared", found, source)
    proof = prove(given, block=block, transport=transport, steps=steps)
    if not proof.ok:
        raise ProofFailed(proof.text(), _placed(proof.findings, source))


def assert_schedule(schedule: Schedule | Plan | ModularPlan | Path | str) -> None:
    """Fails unless a schedule runs everything once, in a legal order, and cannot hang. No torch.

    The schedule is a `Schedule`, the path of a CSV file, or its text. Of a plan its lowered program is proved, too: every value of every
    rank is the expression that one device computes. Raises `ProofFailed`, `ScheduleError` or `PlanError`.
    """
    __tracebackhide__ = True
    from .check import check

    given, source = _read(schedule)
    found = [each for each in check(given) if each.severity == "error"] if isinstance(given, Schedule) else _static_errors(given)
    if found:
        name = given.name if isinstance(given, Schedule) else given.schedule.name
        raise _failed(f"schedule {name} is not right", found, source)


def assert_fits(plan: Plan | Path | str) -> None:
    """Fails unless the predicted peak memory of every rank is within its device. No torch. Raises `ProofFailed` or `PlanError`."""
    __tracebackhide__ = True
    given, source = _read(plan)
    if not isinstance(given, Plan):
        raise TypeError("assert_fits takes the plan of one model. Give one.")
    if found := service("fit")(given).findings:
        capacity = format_bytes(given.cluster.device_memory_bytes)
        raise _failed(f"the plan does not fit {given.cluster.num_devices} devices of {given.cluster.name} with {capacity}", found, source)


def _read(given: Schedule | Plan | ModularPlan | Path | str) -> tuple[Schedule | Plan | ModularPlan, str | None]:
    """What was given, parsed, and the file that it was in. CSV has no brackets, and TOML with sections has no line without."""
    if isinstance(given, Schedule | Plan | ModularPlan):
        return given, None
    text = str(given)
    if isinstance(given, str) and ("\n" in text or "[" in text):
        return (any_plan(read_values(text, "plan"), "plan") if "[" in text else from_csv(text)), None
    if text.lower().endswith(".csv"):
        return read_csv(text), text
    return any_plan(read_values(read_text(text), text), text), text


def _static_errors(plan: Plan | ModularPlan) -> list[Finding]:
    """What the rules and the symbolic proof say of every schedule that ranks of the plan run."""
    from .cli import prove_schedule
    from .modules_check import prove_modules

    if isinstance(plan, ModularPlan):
        return list(prove_modules(plan).findings)
    return [found for count in plan.microbatch_counts for found in prove_schedule(plan, schedule_for(plan, count))]


def _failed(title: str, findings: Sequence[Finding], source: str | None) -> ProofFailed:
    text = "\n".join([f"{title}:", *map(str, findings)])
    return ProofFailed(text, _placed(findings, source))


def _placed(findings: Sequence[Finding], source: str | None) -> tuple[tuple[Finding, Spot], ...]:
    return tuple((each, spot_of(each, source)) for each in findings)
