"""The learning rate's schedule of torchtitan, to and from the keys of a plan.

torchtitan's step t, from 0, of a warm-up of W has (t + 1) / W of the rate; then the rate stays, and falls in the last
steps, or in all that follow: `components/lr_scheduler.py` of pytorch/torchtitan, v0.1 to 2026. In a plan that is a
warm-up of W - 1 steps which begins with 1 / W of the rate, and `wsd`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..plan.plan import Plan
from .table import Row, Sheet

_PREFIX = "lr_scheduler."
_FORMS = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
"""lr_scheduler.decay_type -> optimizer.wsd_decay."""

ROWS = (
    Row(f"{_PREFIX}warmup_steps", "mapped", "optimizer.warmup_steps", default=200, kind=int),
    Row(f"{_PREFIX}total_steps", "mapped", "optimizer.decay_steps", default=None, kind=int),
    Row(f"{_PREFIX}decay_ratio", "mapped", "optimizer.wsd_decay_steps", default=None, kind=(float, int)),
    Row(
        f"{_PREFIX}decay_type",
        "mapped",
        "optimizer.wsd_decay, optimizer.schedule",
        default="linear",
        kind=str,
        choices=tuple(_FORMS),
    ),
    Row(f"{_PREFIX}min_lr_factor", "mapped", "optimizer.minimum_learning_rate", default=0.0, kind=(float, int)),
    Row(
        f"{_PREFIX}warmup_pct",
        "not-modelled",
        None,
        "a share of a warm-up that no release in the table reads: the rate is as without it",
        kind=(float, int),
    ),
)


def put_rates(sheet: Sheet) -> None:
    """Fills the schedule, said or torchtitan's own: 200 steps up, and down in a line to the end."""
    own = {name: f"{_PREFIX}{name}" for name in ("warmup_steps", "total_steps", "decay_ratio", "decay_type")}
    least = f"{_PREFIX}min_lr_factor"
    rate, total = float(sheet.value("optimizer.lr")), sheet.value(own["total_steps"]) or sheet.value("training.steps")
    if rate <= 0 or total <= 0:
        return
    warmup = min(max(0, sheet.value(own["warmup_steps"])), total)
    ratio, form = sheet.value(own["decay_ratio"]), sheet.value(own["decay_type"])
    length = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if warmup > 1:
        sheet.put("optimizer.warmup_steps", warmup - 1, own["warmup_steps"])
        sheet.put("optimizer.initial_learning_rate", rate / warmup, own["warmup_steps"], "optimizer.lr")
    else:
        sheet.say(own["warmup_steps"], "no-effect", "the first step has the whole rate")
    if length <= 0:
        sheet.put("optimizer.schedule", "constant", own["decay_ratio"])
        sheet.say(own["decay_type"], "no-effect", "the rate does not fall")
        sheet.say(least, "no-effect", "the rate does not fall")
        sheet.say(own["total_steps"], "no-effect", "the rate does not fall")
        return
    if warmup <= 1 and length == total and form in ("linear", "cosine"):
        sheet.put("optimizer.schedule", form, own["decay_type"])
    else:
        sheet.put("optimizer.schedule", "wsd", own["decay_type"], own["decay_ratio"])
        sheet.put("optimizer.wsd_decay", _FORMS[form], own["decay_type"])
        sheet.put("optimizer.wsd_decay_steps", length, own["decay_ratio"], own["warmup_steps"], own["decay_type"])
    if sheet.value(own["total_steps"]):
        sheet.put("optimizer.decay_steps", total, own["total_steps"])
    if factor := sheet.value(least):
        sheet.put("optimizer.minimum_learning_rate", factor * rate, least, "optimizer.lr")


def rate_settings(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The settings of a plan's schedule; where torchtitan has none like it, those of the nearest."""
    optimizer, peak = plan.optimizer, plan.train.learning_rate
    warmup = 0 if optimizer.counted_in == "samples" else plan.rates.warmup
    total = optimizer.decay_steps or plan.train.steps
    yield f"{_PREFIX}warmup_steps", int(warmup) + 1 if warmup else 0
    forms = {ours: theirs for theirs, ours in _FORMS.items()}
    falls = optimizer.counted_in == "steps" and optimizer.schedule in ("linear", "cosine", "wsd") and total > 0
    if not falls:
        yield f"{_PREFIX}decay_ratio", 0.0
        if warmup >= plan.train.steps:
            yield f"{_PREFIX}total_steps", int(warmup) + 1
        return
    if optimizer.decay_steps is not None:
        yield f"{_PREFIX}total_steps", total
    if optimizer.schedule == "wsd":
        yield f"{_PREFIX}decay_ratio", (optimizer.wsd_decay_steps or 0) / total
        yield f"{_PREFIX}decay_type", forms.get(optimizer.wsd_decay, "linear")
    else:
        yield f"{_PREFIX}decay_type", optimizer.schedule
    if optimizer.minimum_learning_rate and peak:
        yield f"{_PREFIX}min_lr_factor", _factor(optimizer.minimum_learning_rate, peak)


def _factor(least: float, peak: float) -> float:
    """What times `peak` is `least`, where rounding lets a number be that."""
    factor = least / peak
    near = (factor, math.nextafter(factor, 0.0), math.nextafter(factor, 1.0))
    return next((each for each in near if each * peak == least), factor)
