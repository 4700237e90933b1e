"""The catalog: schedule name -> builder with its legal range, and the schedule of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError, UnknownNameError
from ..schedule import Schedule
from .csv import read_csv
from .gpipe import gpipe
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b

if TYPE_CHECKING:
    from ..plan import Plan


@dataclass(frozen=True)
class Builder:
    """A catalog entry. `build` takes pp and num_microbatches, vpp where `chunks` is true, and the named `options`."""

    name: str
    summary: str
    legal: str
    build: Callable[..., Schedule]
    chunks: bool = False
    options: tuple[str, ...] = ()


CATALOG: dict[str, Builder] = {
    entry.name: entry
    for entry in (
        Builder("GPipe", "all forwards, then all backwards", "any pp and number of microbatches; vpp=1", gpipe),
        Builder("1F1B", "forwards and backwards in turn, p-rank in flight", "any pp and number of microbatches; vpp=1", one_f_one_b),
        Builder(
            "Interleaved1F1B",
            "1F1B over vpp chunks per rank: the bubble divided by vpp",
            "vpp of at least 2; any pp and number of microbatches",
            interleaved,
            chunks=True,
            options=("microbatch_group_size",),
        ),
    )
}


def build(name: str, *, pp: int, num_microbatches: int, vpp: int = 1, **options: Any) -> Schedule:
    """The compute-only schedule `name` for `pp` ranks of `vpp` stages each. Options are those of the catalog entry.

    Raises `UnknownNameError` for a name that is not in the catalog, `ScheduleError` for numbers outside its legal range.

    >>> print(build("1F1B", pp=2, num_microbatches=3).to_csv(), end="")
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    if name not in CATALOG:
        raise UnknownNameError("schedule", name, CATALOG)
    entry = CATALOG[name]
    for what, value in {"pp": pp, "num_microbatches": num_microbatches, "vpp": vpp}.items():
        if not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{what}={value!r} must be a whole number of at least 1 (schedule {name}).")
    unknown = sorted(set(options) - set(entry.options))
    if unknown:
        known = f"It takes {', '.join(entry.options)}." if entry.options else "It takes no options."
        raise ScheduleError(f"schedule {name} has no option {', '.join(unknown)}. {known}")
    if entry.chunks and vpp == 1:
        raise ScheduleError(f"schedule {name} needs vpp of at least 2, got vpp=1. Use schedule {default_name(pp, vpp)}, or set vpp=2.")
    if not entry.chunks and vpp > 1:
        raise ScheduleError(f"schedule {name} runs one stage per rank, got vpp={vpp}. Use schedule {default_name(pp, vpp)}, or set vpp=1.")
    return entry.build(pp, num_microbatches, **({"vpp": vpp} if entry.chunks else {}), **options)


def default_name(pp: int, vpp: int = 1) -> str:
    """The schedule to use when nothing speaks for another: 1F1B, interleaved when ranks hold several stages (Megatron's choice).

    With pp=1 and vpp=1, 1F1B is plain gradient accumulation: F0 B0 F1 B1, no messages.
    """
    return "Interleaved1F1B" if vpp > 1 else "1F1B"


def schedule_for(plan: Plan) -> Schedule:
    """The schedule of a plan: built by name, or read from `schedule.file` and then as complete as the file is (`lower` adds the rest).

    Raises `ScheduleError` when the file's ranks, stages or microbatches are not the plan's.
    """
    choice, layout = plan.schedule, plan.layout
    if choice.file is None:
        return build(choice.name, pp=layout.pp, vpp=layout.vpp, num_microbatches=plan.num_microbatches)
    schedule = read_csv(choice.file)
    problems = [
        f"{choice.file} has {found} {what}, but the plan has {expected} ({source})."
        for what, found, expected, source in (
            ("rows (pipeline ranks)", schedule.num_ranks, layout.pp, "layout.pp"),
            ("stages", schedule.num_stages, layout.num_stages, "pp*vpp"),
            ("microbatches", schedule.num_microbatches, plan.num_microbatches, "batch.global / (batch.micro * dp)"),
        )
        if found != expected
    ]
    if problems:
        raise ScheduleError("\n".join(problems))
    return schedule
