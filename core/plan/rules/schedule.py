"""The rules that tie microbatches, stages and the schedule to each other. `table` has them in order."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.errors import LayoutError, did_you_mean
from ...layout.layout import Layout
from ...layout.microbatches import microbatch_counts
from ...layout.stages import assign_layers, num_mtp_written
from ...model.model import ModelSpec
from ...schedule import CATALOG, default_name
from ..batch_sizes import said, sizes_of
from ..runtime import Runtime
from ..sections import Batch, ScheduleChoice


def microbatches_divide(batch: Batch, layout: Layout) -> Iterator[str]:
    """The global batch is whole microbatches, at least one for every data-parallel rank."""
    num_microbatches, rest = divmod(batch.global_size, batch.micro_size)
    if rest:
        nearest = [
            number * batch.micro_size for number in (num_microbatches, num_microbatches + 1) if number >= layout.dp
        ]
        named = " or ".join(map(str, nearest)) or str(batch.micro_size * layout.dp)
        yield (
            f"global={batch.global_size} is no multiple of micro={batch.micro_size}. Use global = {named}, or "
            "another micro."
        )
    elif num_microbatches < layout.dp:
        yield (
            f"global={batch.global_size} has {num_microbatches} microbatches of micro={batch.micro_size} for "
            f"dp={layout.dp} ranks. "
            f"Use global >= {batch.micro_size * layout.dp}, or dp <= {num_microbatches}."
        )
    others = sizes_of(batch)[1:]
    if cut := [size for size in others if size % batch.micro_size]:
        yield (
            f"{said(batch, cut)}: no multiple of micro={batch.micro_size}. Use batches and increments that are, or "
            "another micro."
        )
    if few := [size for size in others if size not in cut and size < batch.micro_size * layout.dp]:
        yield (
            f"{said(batch, few)}: fewer microbatches of micro={batch.micro_size} than dp={layout.dp} ranks. Begin "
            f"with {batch.micro_size * layout.dp} sequences or more, or use less dp."
        )


def stages_hold_all_layers(layout: Layout, model: ModelSpec) -> Iterator[str]:
    """Pp*vpp divides the layers, or the stage string holds them all."""
    try:
        assign_layers(model.num_layers, layout)
    except LayoutError as error:
        yield from error.problems
        return
    written = 0 if layout.stages is None else num_mtp_written(layout.stages)
    if written not in (0, model.num_mtp_layers):
        yield (
            f"stages={layout.stages!r} names {written} modules of multi-token prediction (m), but model {model.name} "
            f"has num_mtp_layers={model.num_mtp_layers}. Write as many, or none."
        )


def interleaving_matches(schedule: ScheduleChoice, layout: Layout) -> Iterator[str]:
    """Vpp above 1 and interleaved schedules go together."""
    if schedule.file is not None:
        return
    if schedule.name not in CATALOG:
        yield f'schedule.name="{schedule.name}" is not in the catalog{did_you_mean(schedule.name, CATALOG)}'
        return
    entry, suggested = CATALOG[schedule.name], default_name(layout.pp, layout.vpp)
    nearest = entry.nearest_vpp(layout.vpp)
    if nearest == layout.vpp:
        return
    if not entry.chunks:
        yield (
            f'vpp={layout.vpp} needs an interleaved schedule, but schedule.name="{schedule.name}" runs one stage per '
            "rank. "
            f'Set schedule.name = "{suggested}" or layout.vpp = 1.'
        )
    else:
        needed = f"{'at least ' if entry.fixed_vpp is None else ''}{nearest}"
        yield (
            f'schedule.name="{schedule.name}" needs vpp of {needed}, but vpp={layout.vpp}. '
            f'Set layout.vpp = {nearest} or schedule.name = "{suggested}".'
        )


def sizes_are_built(schedule: ScheduleChoice, layout: Layout, batch: Batch) -> Iterator[str]:
    """The schedule exists for this number of ranks and microbatches."""
    multiple = CATALOG[schedule.name].multiple if schedule.file is None and schedule.name in CATALOG else 1
    counts = microbatch_counts(batch.global_size, batch.micro_size, layout.dp, multiple)
    others = sizes_of(batch)[1:]
    if schedule.file is None and schedule.name in CATALOG:
        condition = CATALOG[schedule.name].condition
        yield from filter(None, (condition(layout.pp, count) for count in counts))
        of_others = {size: microbatch_counts(size, batch.micro_size, layout.dp, multiple) for size in others}
        wrong = {
            size: complaint
            for size, each in of_others.items()
            if (complaint := next(filter(None, (condition(layout.pp, count) for count in each)), None))
        }
        if wrong:
            yield f"{said(batch, tuple(wrong))}: {next(iter(wrong.values()))}"
    elif others:
        yield (
            f"schedule.file={schedule.file!r} has one number of microbatches, but batches change by "
            f"{said(batch, others).partition(' of ')[2]}. Use a schedule.name, or a batch that stays."
        )
    elif schedule.file is not None and len(counts) > 1:
        per_round = batch.micro_size * layout.dp
        yield (
            f"schedule.file={schedule.file!r} has one number of microbatches, but global={batch.global_size} gives "
            "some of the "
            f"dp={layout.dp} ranks {counts[0]} and others {counts[1]}. Use global = {counts[1] * per_round} or "
            f"{counts[0] * per_round}."
        )


MOST_ACTIONS = 1_000_000
"""Of one step. Measured on 2026-11-23 on 2 busy cores, lowered 1F1B of 3 million actions: simulate 5 s and 0.5 GB,
verify 9 s and 0.6 GB, draw 16 to 38 s and 1.4 GB; of 0.8 million on two ranks, fit 11 s. Seconds and bytes grow as the
actions. What is built without a plan (`core.schedule.build`) has no such bound."""

ACTIONS_PER_MICROBATCH = 6
"""Of a stage inside the pipeline: forward, backward, and a send and a receive of each."""


def actions_are_bounded(batch: Batch, layout: Layout, schedule: ScheduleChoice) -> Iterator[str]:
    """The schedule is no longer than what its verbs can go through."""
    largest = max(sizes_of(batch))
    counts = microbatch_counts(largest, batch.micro_size, layout.dp)
    each = layout.num_stages * ACTIONS_PER_MICROBATCH
    if schedule.file is not None or not counts or counts[0] * each <= MOST_ACTIONS:
        return
    fitting = MOST_ACTIONS // each
    remedy = f"Use global <= {fitting * batch.micro_size * layout.dp}, " if fitting else "Use "
    yield (
        f"pp*vpp={layout.num_stages} stages with {counts[0]} microbatches each are about {counts[0] * each:,} "
        "actions, more than the "
        f"{MOST_ACTIONS:,} that a step may have here. {remedy}a larger micro, more dp, or fewer stages."
    )


def name_or_file(schedule: ScheduleChoice) -> Iterator[str]:
    """A schedule has a name or a file, not both."""
    if schedule.file is not None and schedule.name != ScheduleChoice().name:
        yield (
            f'schedule.name="{schedule.name}" and schedule.file="{schedule.file}" both choose a schedule. Give one '
            "of them."
        )


def stages_are_sharded(schedule: ScheduleChoice, layout: Layout) -> Iterator[str]:
    """Only ZeRO-3 gathers the parameters of stages."""
    if schedule.max_active_stages is not None and layout.zero != 3:
        yield (
            f"max_active_stages={schedule.max_active_stages} says how many stages' parameters ZeRO-3 gathers at a "
            "time, "
            f"but zero={layout.zero} keeps them all. Set layout.zero = 3, or leave max_active_stages out."
        )


def batches_are_waited_for(runtime: Runtime) -> Iterator[str]:
    """Messages during the products have lanes of their own, which need no batches."""
    if runtime.p2p_batched is not None and runtime.p2p_overlap is not False:
        written = str(runtime.p2p_batched).lower()
        yield (
            f"p2p_batched={written} says how messages are sent for which products wait, but p2p_overlap=false is not "
            "set. "
            "Set it, or leave p2p_batched out."
        )
