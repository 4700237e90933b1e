"""DeepSpeed's scheduler block, to the keys of a plan's learning rate.

DeepSpeed's scheduler steps behind the optimizer: the first step has the rate that a warm-up begins with, and step t,
from 0, that of t - 1 (`deepspeed/runtime/lr_schedules.py`, v0.16). Decays are those of a plan; a warm-up in a line
differs from a plan's by one step of it at most, and one by logarithms has none like it.
"""

from __future__ import annotations

from .table import Kind, Row, Sheet

_NUMBER: Kind = (int, float)
_P = "scheduler.params."
TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle")

ROWS = (
    Row("scheduler.type", "mapped", "optimizer.schedule", kind=str, choices=TYPES),
    Row(f"{_P}warmup_min_lr", "mapped", "optimizer.initial_learning_rate", default=0.0, kind=_NUMBER),
    Row(f"{_P}warmup_max_lr", "mapped", "train.learning_rate", default=0.001, kind=_NUMBER),
    Row(f"{_P}warmup_min_ratio", "mapped", "optimizer.initial_learning_rate", default=0.0, kind=_NUMBER),
    Row(f"{_P}warmup_num_steps", "mapped", "optimizer.warmup_steps", default=1000, kind=int),
    Row(f"{_P}warmup_type", "mapped", "optimizer.warmup_steps", default="log", kind=str),
    Row(f"{_P}total_num_steps", "mapped", "optimizer.decay_steps", kind=int),
    Row(f"{_P}cos_min_ratio", "mapped", "optimizer.minimum_learning_rate", default=0.0001, kind=_NUMBER),
    Row(
        "scheduler.*",
        "not-modelled",
        None,
        "a plan's learning rate is constant, or falls in a line, by a cosine, a root or at the end",
    ),
)
"""What becomes of the block; `scheduler.*` is all that other kinds have."""


def put_rates(sheet: Sheet, *, filled_in: bool) -> None:
    """Fills the schedule that the file has, if any; called when the optimizer is filled. None of which a trainer has
    `filled_in` a part."""
    kind, total = sheet.value("scheduler.type"), sheet.value(f"{_P}total_num_steps")
    if kind is None:
        return
    falls, cosine = kind in ("WarmupDecayLR", "WarmupCosineLR"), kind == "WarmupCosineLR"
    if filled_in:
        _leave(sheet, "a trainer fills in numbers of it (auto)")
        return
    if kind in ("LRRangeTest", "OneCycle"):
        _leave(sheet, f"{kind} has no like among a plan's schedules")
        return
    if falls and total is None:
        _leave(sheet, "without total_num_steps the decay has no end")
        return
    warmup = max(2, sheet.value(f"{_P}warmup_num_steps"))
    if falls and total <= warmup:
        _leave(sheet, f"total_num_steps={total} is not above warmup_num_steps={warmup}, so nothing is left to decay")
        return
    peak = sheet.value("optimizer.params.lr")
    if not cosine and (peak is None or sheet.is_written(f"{_P}warmup_max_lr")):
        peak = sheet.value(f"{_P}warmup_max_lr")
        sheet.put("train.learning_rate", float(peak), f"{_P}warmup_max_lr")
    if peak is None:
        _leave(sheet, "without optimizer.params.lr there is nothing to schedule")
        return
    first = sheet.value(f"{_P}warmup_min_ratio") * peak if cosine else sheet.value(f"{_P}warmup_min_lr")
    # a plan's steps of a cosine end where DeepSpeed's do, and those of a line one later
    later = 0 if cosine else 1
    sheet.put("optimizer.warmup_steps", warmup + later, f"{_P}warmup_num_steps", f"{_P}warmup_type")
    if 0 < first <= peak:
        flag = f"{_P}warmup_min_ratio" if cosine else f"{_P}warmup_min_lr"
        sheet.put("optimizer.initial_learning_rate", float(first), flag)
    if sheet.value(f"{_P}warmup_type") != "linear":
        sheet.say(f"{_P}warmup_type", "not-modelled", "a plan's warm-up rises in a line, not by logarithms")
    sheet.assumed.append(
        "DeepSpeed's scheduler is a step behind the optimizer: in the warm-up a plan's rates are up to one of its "
        "steps ahead."
    )
    if not falls:
        return
    sheet.put("optimizer.schedule", "cosine" if cosine else "linear", "scheduler.type")
    sheet.put("optimizer.decay_steps", total + later, f"{_P}total_num_steps")
    if cosine and (least := sheet.value(f"{_P}cos_min_ratio") * peak):
        sheet.put("optimizer.minimum_learning_rate", float(least), f"{_P}cos_min_ratio")


def _leave(sheet: Sheet, why: str) -> None:
    for row in ROWS[:-1]:
        if sheet.is_written(row.flag):
            sheet.say(row.flag, "not-modelled", f"the plan keeps its learning rate: {why}")
