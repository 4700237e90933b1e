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

from ..core.base.findings import Finding, Location, ProofFailed
from ..core.base.units import format_bytes
from ..core.commands.commands import service
from ..core.imports.given import values_of
from ..core.plan.plan import AnyPlan, any_plan
from ..core.plan.toml import read_values
from ..core.schedule.schedule import Schedule, read_csv
from .schedule.locations import location_of


def assert_bitwise(
    plan: AnyPlan | Path | str,
    *,
    block: Callable[..., Any] | None = None,
    transport: Literal["gloo", "shm", "memory", "nccl", "kernels"] | None = None,
    steps: int = 3,
) -> None:
    """Fails unless `steps` optimizer steps of the plan compute, to the last bit, what one device computes.

    The schedule and the program are proved first, as in `assert_schedule`. `block` makes a user's own transformer
    layers instead of ours: a function or class of a module. With `transport="memory"` ranks are threads of one process,
    which starts faster; without, they are processes up to 8 ranks.

    Raises `ProofFailed`, an `AssertionError`; `PlanError` for a plan that cannot be run here, `RankFailure` when a rank
    dies, `MissingExtraError` without torch.
    """
    __tracebackhide__ = True
    from .dynamic.proof import prove

    given, source = _read(plan)
    if isinstance(given, Schedule):
        raise TypeError("assert_bitwise runs a plan, and this is only a schedule. Give a plan, or use assert_schedule.")
    proof = prove(given, block=block, transport=transport, steps=steps)
    if not proof.static.ok:
        raise _failed("the schedule is not right, so no bits were compared", proof.findings, source)
    if not proof.ok:
        raise ProofFailed(proof.text(), _placed(proof.findings, source))


def assert_schedule(schedule: Schedule | AnyPlan | Path | str) -> None:
    """Fails unless a schedule runs everything once, in a legal order, and cannot hang. No torch.

    The schedule is a `Schedule`, the path of a CSV file, or its text. Of a plan its lowered program is proved,
    too: every value of every rank is the expression that one device computes. Raises `ProofFailed`,
    `ScheduleError` or `PlanError`.
    """
    __tracebackhide__ = True
    from .symbolic.static import check_schedule, prove_static

    given, source = _read(schedule)
    proof = check_schedule(given) if isinstance(given, Schedule) else prove_static(given)
    if found := proof.errors:
        name = given.name if isinstance(given, Schedule) else given.schedule.name
        raise _failed(f"schedule {name} is not right", found, source)


def assert_fits(plan: AnyPlan | Path | str) -> None:
    """Fails unless the predicted peak memory of every rank is within what is usable of its device. No torch.

    Raises `ProofFailed` or `PlanError`.
    """
    __tracebackhide__ = True
    given, source = _read(plan)
    if isinstance(given, Schedule):
        raise TypeError("assert_fits takes a plan, and this is a schedule. Give a plan.")
    fitting = service("fit")(given)
    if found := fitting.findings:
        usable, total = (format_bytes(fitting.report[key]) for key in ("capacity_bytes", "device_bytes"))
        devices = f"{given.world_size} devices of {given.cluster.name}"
        raise _failed(f"the plan does not fit {devices}, with {usable} usable of {total}", found, source)


def _read(given: Schedule | AnyPlan | Path | str) -> tuple[Schedule | AnyPlan, str | None]:
    """What was given, parsed, and the file that it was in. CSV has no brackets, and TOML with
    sections has no line without."""
    if isinstance(given, Schedule | AnyPlan):
        return given, None
    text = str(given)
    if isinstance(given, str) and ("\n" in text or "[" in text):
        return (any_plan(read_values(text, "plan"), "plan") if "[" in text else Schedule.from_csv(text)), None
    if text.lower().endswith(".csv"):
        return read_csv(text), text
    return any_plan(values_of(text)[0], text), text


def _failed(title: str, findings: Sequence[Finding], source: str | None) -> ProofFailed:
    text = "\n".join([f"{title}:", *map(str, findings)])
    return ProofFailed(text, _placed(findings, source))


def _placed(findings: Sequence[Finding], source: str | None) -> tuple[tuple[Finding, Location], ...]:
    return tuple((each, location_of(each, source)) for each in findings)
