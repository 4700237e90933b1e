"""`train --dry-run`: what the ranks of a plan would hold and do, equal ranks together.

Ranks are equal that hold the same stages and as many parameters, and have as many samples in a step: tensor-, context-
and data-parallel ranks of one pipeline rank, but where something does not divide. Memory is what `fit` says of their
pipeline rank: ZeRO, recomputation and activations are in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..core.base.units import format_bytes, format_count
from ..core.commands.commands import service
from ..core.layout.stages import StageLayers
from ..core.machine.variation import NO_VARIATION
from ..core.plan.plan import AnyPlan, Plan
from ..core.plan.schedule_of import part_schedule
from ..core.program import rank_elements
from ..core.schedule.action import Action
from ..core.schedule.schedule import Schedule
from .group_transports import GroupTransport

PRODUCTS_KEY = "numerics.triton_products"

ACTIONS_SHOWN = 6
RANGES_SHOWN = 4
"""Of a group's ranks in the text; JSON has all."""
MOST_RANKS_LISTED = 4096
"""A world of more ranks has no list of single ranks in JSON: a million of them would be half a gigabyte of text,
and `groups` say all."""


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds, as `fit` reports it: bytes, the action then, and bytes by component."""

    num_bytes: int
    action: str
    components: dict[str, int]


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Equal ranks. `ranges` are `(first, last)` of their global ranks, ascending; `samples` [lo, hi) those of all of
    them in a step, of which each has `num_samples`. Stages and actions count from the first of the whole run."""

    module: str | None
    pp_rank: int
    ranks: np.ndarray
    stages: tuple[str, ...]
    num_parameters: int
    peak: Peak
    samples: tuple[int, int]
    num_samples: int
    num_actions: int
    first_actions: tuple[str, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The ranks as ranges."""
        breaks = np.flatnonzero(np.diff(self.ranks) != 1)
        first, last = self.ranks[np.append(0, breaks + 1)], self.ranks[np.append(breaks, len(self.ranks) - 1)]
        return list(zip(first.tolist(), last.tolist(), strict=True))


def dry_run_text(plan: AnyPlan, transports: Sequence[GroupTransport], products: str) -> str:
    """What the ranks would hold and do, a line for each group of equal ones, how they would talk, and who would make
    the products of exact numerics (`planned_products`)."""
    lines = [_run_text(part) for part in plan.parts]
    last = [products] if products else []
    return "\n".join([*lines, *(_group_text(group) for group in rank_groups(plan)), *map(str, transports), *last])


def planned_products(plan: AnyPlan, *, on_gpus: bool) -> str:
    """Who would make the products of exact numerics, in words, as far as that is known before the start; empty in fast
    numerics."""
    if plan.numerics.mode == "fast":
        return ""
    if plan.numerics.triton_products is not None:
        by_kernels = ", ".join(plan.numerics.kernel_forms) or "none"
        return f"products: by our kernels {by_kernels}, the others by the library, since {PRODUCTS_KEY} says so"
    if on_gpus:
        return (
            "products: each rank measures its GPU at the start, and all choose together between the library and our "
            f"kernels; {PRODUCTS_KEY} says otherwise (`shardproof doctor --gpus` shows what a GPU would have)"
        )
    return "products: all by the library, since ranks compute on processors"


def dry_run_report(plan: AnyPlan, transports: Sequence[GroupTransport], products: str) -> dict[str, Any]:
    """The JSON form: `world_size`, `schedule`, `groups`, `transports`, `products` (in words) and `ranks`.

    `groups` is a list of equal ranks: `ranks` (list of [first, last]), `num_ranks`, `pp`, `stages`, `num_parameters`,
    `peak_memory_bytes`, `peak_memory_action` and `memory_bytes` of each rank, `samples` [lo, hi) of all of them and
    `num_samples` of each, `num_actions`, `first_actions`. `ranks` has every rank with its own coordinates and samples,
    in a world of up to `MOST_RANKS_LISTED` ranks; in a larger one it is empty. A plan of modules names the `module` in
    all three. `transports` has for each kind of groups `axis`, `group_size`, `num_groups`, `transport`, `why` and
    `buffers`.
    """
    groups = list(rank_groups(plan))
    ranks = [rank for group in groups for rank in _single(plan, group)] if plan.world_size <= MOST_RANKS_LISTED else []
    return {
        "world_size": plan.world_size,
        "schedule": part_schedule(plan, plan.parts[0], plan.parts[0].num_microbatches).name,
        "groups": [_group_report(group) for group in groups],
        "transports": [asdict(each) for each in transports],
        "products": products,
        "ranks": sorted(ranks, key=lambda rank: rank["global_rank"]),
    }


def rank_groups(plan: AnyPlan) -> Iterator[RankGroup]:
    """The groups of equal ranks, by module and pipeline rank."""
    rows = service("fit")(replace(plan, variation=NO_VARIATION)).report["per_rank"]  # what ranks hold does not vary
    peaks = [Peak(row["peak_memory_bytes"], row["peak_memory_action"], row["memory_bytes"]) for row in rows]
    for part in plan.parts:
        yield from _groups(plan, part, peaks[part.first_stage :])


def _groups(whole: AnyPlan, plan: Plan, peaks: list[Peak]) -> Iterator[RankGroup]:
    """The groups of a part of the whole; `peaks` begin with its first pipeline rank's."""
    layout, first_rank = plan.layout, plan.first_rank
    classes = [(lo, hi, part_schedule(whole, plan, plan.microbatches_of(lo))) for lo, hi in _equal_replicas(plan)]
    members = np.sort(np.array(layout.groups("tp-cp-ep-dp")), axis=1)
    for pp_rank, ranks in enumerate(members):
        tp_rank, dp_rank = (_coordinate(ranks - first_rank, plan, axis) for axis in ("tp", "dp"))
        elements = np.array([rank_elements(plan, pp_rank, tp) for tp in range(layout.tp)])[tp_rank]
        for lo, hi, schedule in classes:
            for number in np.unique(elements)[::-1].tolist():
                chosen = ranks[(elements == number) & (lo <= dp_rank) & (dp_rank < hi)]
                yield _group(plan, pp_rank, chosen, schedule, number, peaks[pp_rank], (lo, hi))


def _group(
    plan: Plan,
    pp_rank: int,
    ranks: np.ndarray,
    schedule: Schedule,
    elements: int,
    peak: Peak,
    replicas: tuple[int, int],
) -> RankGroup:
    row, first_stage = schedule.row(pp_rank), plan.first_stage
    first, last = (plan.samples_of(dp_rank) for dp_rank in (replicas[0], replicas[1] - 1))
    return RankGroup(
        module=plan.name or None,
        pp_rank=pp_rank,
        ranks=ranks,
        stages=tuple(stage_text(plan.stages[stage], first_stage) for stage in schedule.placement.stages_of(pp_rank)),
        num_parameters=elements,
        peak=peak,
        samples=(first[0], last[1]),
        num_samples=first[1] - first[0],
        num_actions=len(row),
        first_actions=tuple(str(_counted(action, first_stage)) for action in row[:ACTIONS_SHOWN]),
    )


def _equal_replicas(plan: Plan) -> list[tuple[int, int]]:
    """Data-parallel ranks `[lo, hi)` with equally many microbatches: earlier ones have more."""
    dp, counts = plan.layout.dp, plan.microbatch_counts
    ends = [
        bisect_left(range(dp), -count + 1, key=lambda dp_rank: -plan.microbatches_of(dp_rank)) for count in counts[:-1]
    ]
    return list(zip([0, *ends], [*ends, dp], strict=True))


def _coordinate(places: np.ndarray, plan: Plan, axis: str) -> np.ndarray:
    """The coordinates of ranks, counted from the first of the plan, along an axis."""
    layout = plan.layout
    stride = layout.global_rank(**{axis: 1}) - layout.global_rank()
    return places // stride % layout.sizes[axis]


def _single(plan: AnyPlan, group: RankGroup) -> Iterator[dict[str, Any]]:
    """The ranks of a group, one by one."""
    part = plan.part_of(int(group.ranks[0]))
    for global_rank in group.ranks.tolist():
        at = part.layout.coordinates(global_rank)
        yield {
            **({} if group.module is None else {"module": group.module}),
            "global_rank": global_rank,
            **{axis: at[axis] for axis in ("tp", "pp", "dp")},
            "stages": list(group.stages),
            "num_parameters": group.num_parameters,
            "peak_memory_bytes": group.peak.num_bytes,
            "samples": list(part.samples_of(at["dp"])),
            "num_actions": group.num_actions,
            "first_actions": list(group.first_actions),
        }


def _group_report(group: RankGroup) -> dict[str, Any]:
    return {
        **({} if group.module is None else {"module": group.module}),
        "ranks": [list(each) for each in group.ranges],
        "num_ranks": len(group.ranks),
        "pp": group.pp_rank,
        "stages": list(group.stages),
        "num_parameters": group.num_parameters,
        "peak_memory_bytes": group.peak.num_bytes,
        "peak_memory_action": group.peak.action,
        "memory_bytes": group.peak.components,
        "samples": list(group.samples),
        "num_samples": group.num_samples,
        "num_actions": group.num_actions,
        "first_actions": list(group.first_actions),
    }


def _group_text(group: RankGroup) -> str:
    ranges = group.ranges
    written = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:RANGES_SHOWN])
    more = f" and {len(ranges) - RANGES_SHOWN:,} ranges more" if len(ranges) > RANGES_SHOWN else ""
    name = "rank" if len(group.ranks) == 1 else "ranks"
    lo, hi = group.samples
    of_all = "" if group.num_samples == hi - lo else f" each, of {lo} to {hi - 1}"
    samples = f"samples {lo} to {hi - 1}" if not of_all else f"{group.num_samples} samples{of_all}"
    in_action = f" in {group.peak.action}" if group.peak.action else ""
    components = ", ".join(f"{part} {format_bytes(count)}" for part, count in group.peak.components.items() if count)
    dots = " ..." if group.num_actions > len(group.first_actions) else ""
    return (
        f"{name} {written}{more}: {'; '.join(group.stages)}; {format_count(group.num_parameters)} parameters; "
        f"{format_bytes(group.peak.num_bytes)} at most{in_action} ({components}); "
        f"{samples}; {group.num_actions} actions: {' '.join(group.first_actions)}{dots}"
    )


def _run_text(plan: Plan) -> str:
    """The run of a plan, or of one of its modules."""
    layout, name = plan.layout, f"module {plan.name}, " if plan.name else ""
    zero = f" zero={layout.zero}" if layout.zero else ""
    return (
        f"{name}{plan.model.name}: {format_count(plan.num_parameters)} parameters on {layout.world_size} ranks "
        f"(tp={layout.tp} pp={layout.pp} vpp={layout.vpp} dp={layout.dp}{zero}), {plan.num_microbatches} "
        "microbatches of "
        f"{plan.batch.micro_size} x {plan.batch.sequence} tokens per replica"
        f"{'' if plan.batch.stays else ' (the last of the batches)'}, "
        f"{plan.schedule.file or plan.schedule.name}, "
        f"{plan.numerics.mode} numerics, {plan.train.steps} steps on {plan.train.data}"
    )


def _counted(action: Action, first_stage: int) -> Action:
    """An action whose stages, those of a pair too, count from `first_stage`."""
    pair = None if action.pair_stage is None else action.pair_stage + first_stage
    return replace(action, stage=action.stage + first_stage, pair_stage=pair)


def stage_text(stage: StageLayers, first_stage: int = 0) -> str:
    """`stage 0: embedding, layers 0-1`."""
    layers = [f"layers {stage.first_layer}-{stage.last_layer - 1}"] if len(stage.layers) else []
    return (
        f"stage {first_stage + stage.stage}: "
        f"{', '.join(['embedding'] * stage.embedding + layers + ['head'] * stage.head)}"
    )
