"""Pipelines of torchtitan: stages, schedule, microbatches and the global batch (distributed/pipeline_parallel.py at
v0.2.2; before April 2025 the cut and the number of microbatches were parallelisms/pipelining_utils.py's)."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from ..base.errors import did_you_mean
from .table import Sheet

PP = "parallelism.pipeline_parallel_degree"
NAME = "parallelism.pipeline_parallel_schedule"
CSV = "parallelism.pipeline_parallel_schedule_csv"
SPLIT = "parallelism.pipeline_parallel_split_points"
PARTS = "parallelism.module_fqns_per_model_part"
SIZE = "parallelism.pipeline_parallel_layers_per_stage"
FIRST_LESS = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST_LESS = "parallelism.pipeline_parallel_last_stage_less_layers"
MICRO = "parallelism.pipeline_parallel_microbatch_size"
COUNT = "parallelism.pipeline_parallel_microbatches"
NEW_COUNT = "parallelism.num_pp_microbatches"
LOCAL = "training.local_batch_size"
GLOBAL = "training.global_batch_size"
TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
STEP_TOKENS = "training.num_tokens_per_train_step"

SINGLE = {"1f1b": "1F1B", "gpipe": "GPipe"}
MULTI = {
    "interleaved1f1b": "Interleaved1F1B",
    "flexibleinterleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Name in torch.distributed.pipelining without case and underscores -> ours; of schedules with one stage a rank, and
with several."""

VEES = ("ZBVZeroBubble", "DualPipeV")


def is_old(sheet: Sheet) -> bool:
    """Whether the pipeline is spelled as before March 2025."""
    return sheet.spelled(PP).startswith(("experimental.", "training."))


def put_stages(sheet: Sheet, pp: int, num_layers: int | None) -> list[int]:
    """Puts schedule and stages. How many layers each stage has, empty where that is not known."""
    if pp == 1:
        for flag in (NAME, CSV, SPLIT, PARTS, SIZE, FIRST_LESS, LAST_LESS, MICRO, COUNT, NEW_COUNT):
            sheet.say(flag, "no-effect", "the pipeline has one rank")
        sheet.say("parallelism.pipeline_parallel_expert_parallel_overlap", "no-effect", "the pipeline has one rank")
        return [num_layers] if num_layers else []
    single = _put_schedule(sheet)
    if single is None:
        return []
    counts = _counts(sheet, pp, num_layers, single=single)
    if not counts:
        return []
    if len(counts) % pp:
        sheet.refuse(_cut_by(sheet), f"{len(counts)} stages do not go evenly on {pp} pipeline ranks.")
        return []
    if len(counts) // pp > 1:
        sheet.put("layout.vpp", len(counts) // pp, NAME, _cut_by(sheet))
    if len(set(counts)) > 1:
        sheet.put("layout.stages", stage_string(counts), _cut_by(sheet), PP)
    return counts


def stage_string(counts: list[int]) -> str:
    """Layers per stage in Megatron's form, with embedding and loss."""
    cells = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return "E" + "|".join(cells) + "L"


def _cut_by(sheet: Sheet) -> str:
    """The setting that cuts the stages."""
    return next((flag for flag in (PARTS, SPLIT, SIZE) if sheet.is_written(flag)), FIRST_LESS)


def _put_schedule(sheet: Sheet) -> bool | None:
    """Puts the schedule. Whether its ranks have one stage each; None where it is refused."""
    written = str(sheet.value(NAME))
    name = written.lower().replace("_", "")
    if sheet.value(CSV):
        sheet.put("schedule.file", sheet.value(CSV), CSV)
        sheet.say(NAME, "no-effect", "the schedule is that of the CSV file")
        return name in SINGLE or name == "pipelineschedulesingle"
    if (ours := SINGLE.get(name) or MULTI.get(name)) is None:
        known = (*SINGLE.values(), *MULTI.values())
        sheet.refuse(NAME, f"this schedule is none of torchtitan's that are read{did_you_mean(written, known)}")
        return None
    sheet.put("schedule.name", ours, NAME)
    return name in SINGLE


def _counts(sheet: Sheet, pp: int, num_layers: int | None, *, single: bool) -> list[int]:
    """Layers of each stage; empty where they are not known or refused."""
    if sheet.is_written(PARTS) and sheet.value(PARTS):
        return _counts_of_parts(sheet, num_layers)
    points = sheet.value(SPLIT)
    if points := [each.strip() for each in points.split(",")] if isinstance(points, str) else points:
        return _counts_of_points(sheet, [str(each) for each in points if each], num_layers)
    if num_layers is None:
        return []
    first, last = sheet.value(FIRST_LESS), sheet.value(LAST_LESS)
    if not (0 <= first < num_layers and 0 <= last < num_layers):
        sheet.refuse(FIRST_LESS if not 0 <= first < num_layers else LAST_LESS, f"the model has {num_layers} layers.")
        return []
    num_stages = pp if single else 2 * pp
    if sheet.value(SIZE) is not None:
        if sheet.value(SIZE) < 1:
            sheet.refuse(SIZE, "a stage has at least one layer.")
            return []
        num_stages = math.ceil((num_layers + first + last) / sheet.value(SIZE))
        if num_stages % pp or (num_stages == pp) != single:
            sheet.refuse(
                SIZE,
                f"{num_layers} layers, with {first} and {last} for embedding and head, make {num_stages} stages on "
                f"{pp} ranks, which the schedule does not take ({'one' if single else 'two or more'} a rank).",
            )
            return []
    if num_stages > num_layers + first + last:
        sheet.refuse(PP, f"{num_layers} layers do not fill {num_stages} stages.")
        return []
    counts = _old_cut(num_layers, num_stages) if is_old(sheet) else _weighted_cut(num_layers, num_stages, first, last)
    if min(counts) < 0 or sum(counts) != num_layers:
        sheet.refuse(PP, f"{num_layers} layers do not fill {num_stages} stages.")
        return []
    return counts


def _weighted_cut(num_layers: int, num_stages: int, first: int, last: int) -> list[int]:
    """Even stages where embedding and head count as so many layers, larger ones before smaller ones
    (generate_llm_fqn_per_model_part)."""
    size, larger = divmod(num_layers + first + last, num_stages)
    counts = [size + (stage < larger) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def _old_cut(num_layers: int, num_stages: int) -> list[int]:
    """Even stages; what is left over goes to those in the middle, then to the last (generate_split_points)."""
    size, extra = divmod(num_layers, num_stages)
    counts = [size] * num_stages
    for stage in range(1, num_stages - 1):
        if extra:
            counts[stage] += 1
            extra -= 1
    counts[-1] += extra
    return counts


def _counts_of_parts(sheet: Sheet, num_layers: int | None) -> list[int]:
    parts = sheet.value(PARTS)
    names = [[str(name) for name in part] if isinstance(part, list) else None for part in parts]
    if any(part is None for part in names):
        sheet.refuse(PARTS, "each part is a list of names of modules.")
        return []
    layers = [[int(name[7:]) for name in part or () if re.fullmatch(r"layers\.\d{1,6}", name)] for part in names]
    flat = [layer for part in layers for layer in part]
    if flat != list(range(len(flat))) or (num_layers is not None and len(flat) != num_layers):
        sheet.refuse(PARTS, f"the parts do not hold the {num_layers or ''} layers of the model once, in their order.")
        return []
    if "tok_embeddings" not in (names[0] or ()) or not {"output", "lm_head"} & {*(names[-1] or ())}:
        sheet.refuse(PARTS, "embedding and head are on the first and the last stage of a plan (layout.stages).")
        return []
    return [len(part) for part in layers]


def _counts_of_points(sheet: Sheet, points: list[str], num_layers: int | None) -> list[int]:
    found = [re.fullmatch(r"layers\.(\d{1,6})", point) for point in points]
    if num_layers is None:
        return []
    cuts = [0, *(int(each[1]) for each in found if each), num_layers]
    if not all(found) or cuts != sorted(set(cuts)):
        sheet.refuse(SPLIT, f"stages begin at rising layers below {num_layers}, such as layers.4.")
        return []
    return [end - begin for begin, end in pairwise(cuts)]


def put_batch(sheet: Sheet, dp: int, pp: int, *, num_stages: int) -> None:
    """Puts microbatch and global batch, in sequences."""
    if sheet.is_written(TOKENS, STEP_TOKENS, NEW_COUNT) or sheet.spelled("training.seq_len").endswith("context_length"):
        _put_batch_of_tokens(sheet, dp, pp)
        return
    local, whole = sheet.value(LOCAL), sheet.value(GLOBAL)
    if local < 1:
        sheet.refuse(LOCAL, "a batch has at least one sequence.")
        return
    micro, by = local, LOCAL
    if pp > 1:
        count = sheet.value(COUNT) or (num_stages if is_old(sheet) else None)
        by = COUNT if count else MICRO
        size = sheet.value(MICRO) if not count else local // count if local % count == 0 else 0
        if size < 1 or local % size:
            asked = f"{count} microbatches" if count else f"microbatches of {size}"
            sheet.refuse(LOCAL, f"{local} sequences of a rank are not whole {asked}.")
            return
        micro = size
    sheet.put("batch.micro", micro, by, LOCAL)
    total = whole if whole > 0 else local * dp
    sheet.put("batch.global", total, GLOBAL if whole > 0 else LOCAL)
    if total % (local * dp):
        sheet.refuse(GLOBAL, f"a step of {dp} ranks with {local} sequences each takes a multiple of {local * dp}.")
    elif pp > 1 and total > local * dp:
        _say_drained(sheet, GLOBAL, total // (local * dp))


def _say_drained(sheet: Sheet, flag: str, times: int) -> None:
    sheet.say(
        flag,
        "not-modelled",
        f"torchtitan drains the pipeline after each of the {times} accumulation steps; a plan runs all microbatches "
        "in one pass, which idles less",
    )


def _put_batch_of_tokens(sheet: Sheet, dp: int, pp: int) -> None:
    """The batches of August 2026, which count tokens."""
    sequence, tokens = sheet.value("training.seq_len"), sheet.value(TOKENS) or 16384
    if sequence < 1 or tokens % sequence:
        sheet.refuse(TOKENS, f"{tokens} tokens are no whole sequences of {sequence}, which a plan's microbatch has.")
        return
    micro = tokens // sequence
    local = micro * ((sheet.value(NEW_COUNT) or 1) if pp > 1 else 1)
    sheet.put("batch.micro", micro, TOKENS)
    step = sheet.value(STEP_TOKENS)
    total = local * dp if step in (None, -1) else step // sequence
    sheet.put("batch.global", total, STEP_TOKENS if step not in (None, -1) else TOKENS)
    if total < 1 or total % (local * dp) or (step not in (None, -1) and step % sequence):
        sheet.refuse(STEP_TOKENS, f"a step takes a multiple of {local * dp} sequences of {sequence} tokens.")
    elif pp > 1 and total > local * dp:
        _say_drained(sheet, STEP_TOKENS, total // (local * dp))
