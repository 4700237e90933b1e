"""The catalog: schedule name -> builder with its legal range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base.errors import ScheduleError, UnknownNameError
from .breadth_first import looped_bfs
from .combined import combined
from .dualpipe import dualpipe, dualpipev, fewer_than_stages, unpaired
from .gpipe import gpipe
from .interleaved import interleaved
from .interleaved_zero_bubble import interleaved_zero_bubble, uneven_rounds
from .one_f_one_b import one_f_one_b
from .placement import Placement
from .schedule import Schedule
from .vee import zbv
from .vee_memory import v_half, v_min
from .zero_bubble import zb_h1, zb_h2
from .zero_bubble_auto import zb_auto


def _any_size(pp: int, num_microbatches: int) -> str | None:
    """The condition of a schedule that can be built for every number of ranks and microbatches."""
    return None


def _loop(pp: int, vpp: int, num_microbatches: int) -> Placement:
    return Placement.loop(pp, pp * vpp, num_microbatches)


def _vee(pp: int, vpp: int, num_microbatches: int) -> Placement:
    assert vpp == 2
    return Placement.vee(pp, num_microbatches)


def _replicated(pp: int, vpp: int, num_microbatches: int) -> Placement:
    assert vpp == 1
    return Placement.replicated(pp, num_microbatches)


MAX_FORWARDS = 10**8
"""Forwards of all stages that a builder lists: more would take tens of GiB before anything could be said about them."""


@dataclass(frozen=True)
class Builder:
    """A catalog entry. `build` takes pp and num_microbatches, vpp where `chunks` is true, and the named `options`.

    With `chunks` a rank holds `vpp` stages, 2 or more (1 or more where that is `plain` too), or exactly
    `fixed_vpp` (the two of a vee). `placement(pp, vpp, num_microbatches)` is that of the schedule, without
    building it. `condition(pp, num_microbatches)` gives the sentence that says why these sizes cannot be built
    and which can, or None. Numbers of microbatches that can be built are multiples of `multiple`, by which
    those of data-parallel ranks differ.
    """

    name: str
    summary: str
    legal: str
    build: Callable[..., Schedule]
    chunks: bool = False
    options: tuple[str, ...] = ()
    fixed_vpp: int | None = None
    plain: bool = False
    placement: Callable[[int, int, int], Placement] = _loop
    condition: Callable[[int, int], str | None] = _any_size
    multiple: int = 1

    def problem(self, *, pp: int, num_microbatches: int, vpp: int = 1) -> str | None:
        """Why these sizes cannot be built, with the nearest that can; None when they can."""
        return self.vpp_problem(pp, vpp) or self.condition(pp, num_microbatches)

    def vpp_problem(self, pp: int, vpp: int) -> str | None:
        """Why a rank cannot hold `vpp` stages, and what to use instead; None when it can."""
        nearest = self.nearest_vpp(vpp)
        if nearest == vpp:
            return None
        needs = (
            "runs one stage per rank"
            if not self.chunks
            else f"needs vpp of {'at least ' * (self.fixed_vpp is None)}{nearest}"
        )
        return (
            f"schedule {self.name} {needs}, got vpp={vpp}. Use schedule {default_name(pp, vpp)}, or set vpp={nearest}."
        )

    def nearest_vpp(self, vpp: int) -> int:
        """The legal number of stages per rank nearest to `vpp`, which is `vpp` itself when that is legal."""
        if self.plain:
            return vpp
        if not self.chunks:
            return 1
        return max(2, vpp) if self.fixed_vpp is None else self.fixed_vpp


CATALOG: dict[str, Builder] = {
    entry.name: entry
    for entry in (
        Builder("GPipe", "all forwards, then all backwards", "any pp and number of microbatches; vpp=1", gpipe),
        Builder(
            "1F1B",
            "forwards and backwards in turn, p-rank in flight",
            ("any pp and number of microbatches; vpp=1"),
            one_f_one_b,
        ),
        Builder(
            "Interleaved1F1B",
            "1F1B over vpp chunks per rank: the bubble divided by vpp",
            "vpp of at least 2; any pp and number of microbatches",
            interleaved,
            chunks=True,
            options=("microbatch_group_size",),
        ),
        Builder(
            "LoopedBFS",
            "breadth-first: every chunk for all microbatches, weights gathered once per direction",
            "vpp of at least 2; any pp and number of microbatches",
            looped_bfs,
            chunks=True,
        ),
        Builder(
            "InterleavedZeroBubble",
            "interleaved with split backwards: W fills the bubble",
            "vpp of at least 2; max(1, microbatches // pp) rounds divide the microbatches",
            interleaved_zero_bubble,
            chunks=True,
            condition=uneven_rounds,
        ),
        Builder(
            "ZBH1",
            "zero bubble in the memory of 1F1B: a third of its bubble",
            ("any pp and number of microbatches; vpp=1"),
            zb_h1,
        ),
        Builder("ZBH2", "zero bubble in twice the memory of 1F1B", "any pp and number of microbatches; vpp=1", zb_h2),
        Builder(
            "ZBAuto",
            "zero bubble for given stage times and a memory limit (by default that of 1F1B)",
            "any pp and number of microbatches; vpp=1",
            zb_auto,
            options=("memory_limit", "forward_s", "backward_input_s", "backward_weight_s", "send_s"),
        ),
        Builder(
            "ZBVZeroBubble",
            "zero bubble in the memory of 1F1B: two stages per rank, down and back",
            "vpp=2; any pp and number of microbatches",
            zbv,
            chunks=True,
            fixed_vpp=2,
            placement=_vee,
        ),
        Builder(
            "VHalf",
            "a vee with half the memory and half the bubble of 1F1B",
            "vpp=2; any pp and number of microbatches",
            v_half,
            chunks=True,
            fixed_vpp=2,
            placement=_vee,
        ),
        Builder(
            "VMin",
            "a vee with a third of the memory and two thirds of the bubble of 1F1B",
            "vpp=2; any pp and number of microbatches",
            v_min,
            chunks=True,
            fixed_vpp=2,
            placement=_vee,
        ),
        Builder(
            "DualPipe",
            "two directions with a replica of every stage each; forwards overlap backwards",
            "even pp; an even number of microbatches, at least 2*pp; vpp=1",
            dualpipe,
            placement=_replicated,
            condition=unpaired,
            multiple=2,
        ),
        Builder(
            "DualPipeV",
            "DualPipe folded onto half the ranks, without replicas",
            "vpp=2; any pp; at least 2*pp microbatches",
            dualpipev,
            chunks=True,
            fixed_vpp=2,
            placement=_vee,
            condition=fewer_than_stages,
        ),
        Builder(
            "Combined1F1B",
            "1F1B, interleaved or not, whose steady state overlaps each forward with a backward",
            "any pp, vpp and number of microbatches",
            combined,
            chunks=True,
            options=("microbatch_group_size",),
            plain=True,
        ),
    )
}


def build(name: str, *, pp: int, num_microbatches: int, vpp: int = 1, **options: Any) -> Schedule:
    """The compute-only schedule `name` for `pp` ranks of `vpp` stages each. Options are those of the catalog entry.

    Raises `UnknownNameError` for a name that is not in the catalog, `ScheduleError` for numbers
    outside its legal range.

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
    if (size := pp * vpp * num_microbatches) > MAX_FORWARDS:
        most = max(1, MAX_FORWARDS // (pp * vpp))
        raise ScheduleError(
            f"pp*vpp*num_microbatches={size} forwards are too many: at most {MAX_FORWARDS}. Use {most} microbatches."
        )
    unknown = sorted(set(options) - set(entry.options))
    if unknown:
        known = f"It takes {', '.join(entry.options)}." if entry.options else "It takes no options."
        raise ScheduleError(f"schedule {name} has no option {', '.join(unknown)}. {known}")
    if problem := entry.problem(pp=pp, vpp=vpp, num_microbatches=num_microbatches):
        raise ScheduleError(problem)
    return entry.build(pp, num_microbatches, **({"vpp": vpp} if entry.chunks else {}), **options)


def default_name(pp: int, vpp: int = 1) -> str:
    """The schedule to use when nothing speaks for another: 1F1B, interleaved when ranks hold several
    stages (Megatron's choice).

    With pp=1 and vpp=1, 1F1B is plain gradient accumulation: F0 B0 F1 B1, no messages.
    """
    return "Interleaved1F1B" if vpp > 1 else "1F1B"
