"""Learning rates, weight decay and batches of Megatron-Bridge's `scheduler`, `optimizer` and `train`, to the keys of a
plan. What they mean is Megatron-Core's (`megatron_rates`); of a run that is counted in samples nothing is read."""

from __future__ import annotations

from .megatron_rates import STYLES, WEIGHT_DECAY_STYLES, WSD_STYLES
from .table import Kind, Row, Sheet, quiet

_NUMBER: Kind = (int, float)
_S = "scheduler."

ROWS = (
    Row(f"{_S}lr_decay_style", "mapped", "optimizer.schedule", default="linear", kind=str, choices=tuple(STYLES)),
    Row(f"{_S}lr_warmup_iters", "mapped", "optimizer.warmup_steps", default=0, kind=int),
    Row(f"{_S}lr_warmup_fraction", "mapped", "optimizer.warmup_fraction", kind=_NUMBER),
    Row(f"{_S}lr_warmup_init", "mapped", "optimizer.initial_learning_rate", default=0.0, kind=_NUMBER),
    Row(f"{_S}lr_decay_iters", "mapped", "optimizer.decay_steps", kind=int),
    Row(f"{_S}lr_wsd_decay_iters", "mapped", "optimizer.wsd_decay_steps", kind=int),
    Row(
        f"{_S}lr_wsd_decay_style",
        "mapped",
        "optimizer.wsd_decay",
        default="exponential",
        kind=str,
        choices=WSD_STYLES,
    ),
    Row(
        f"{_S}weight_decay_incr_style",
        "mapped",
        "optimizer.weight_decay_schedule",
        default="constant",
        kind=str,
        choices=WEIGHT_DECAY_STYLES,
    ),
    Row(f"{_S}start_weight_decay", "mapped", "optimizer.weight_decay", kind=_NUMBER),
    Row(f"{_S}end_weight_decay", "mapped", "optimizer.end_weight_decay", kind=_NUMBER),
    Row("optimizer.min_lr", "mapped", "optimizer.minimum_learning_rate", default=0.0, kind=_NUMBER),
    Row("train.rampup_batch_size", "mapped", "batch.rampup", kind=list),
    *quiet("", "scheduler.*", "it follows from the other settings of the scheduler, or counts for checkpoints only"),
)


def put_rates(sheet: Sheet) -> None:
    """Fills both schedules of a file that has a scheduler, and batches that grow."""
    ramp = sheet.value("train.rampup_batch_size")
    if ramp:
        if len(ramp) == 3 and all(isinstance(each, int) for each in ramp):
            sheet.put("batch.rampup", list(ramp), "train.rampup_batch_size")
        else:
            sheet.refuse("train.rampup_batch_size", "these are three whole numbers: first batch, increment, samples.")
    steps, peak = sheet.value("train.train_iters"), sheet.value("optimizer.lr")
    if not sheet.is_written(*(row.flag for row in ROWS if row.flag.startswith(_S))):
        return
    if steps is None or peak is None:
        for row in ROWS:
            if sheet.is_written(row.flag) and row.status == "mapped" and row.flag != "train.rampup_batch_size":
                lacks = "optimizer.lr" if peak is None else "train.train_iters"
                sheet.say(row.flag, "not-modelled", f"the plan keeps its learning rate: the file lacks {lacks}")
        return
    _put_learning_rate(sheet)
    style = sheet.value(f"{_S}weight_decay_incr_style")
    start, end = (sheet.value(f"{_S}{name}_weight_decay") for name in ("start", "end"))
    if style == "constant" or start is None or end is None:
        return
    sheet.put("optimizer.weight_decay_schedule", style, f"{_S}weight_decay_incr_style")
    sheet.put("optimizer.weight_decay", float(start), f"{_S}start_weight_decay")
    sheet.put("optimizer.end_weight_decay", float(end), f"{_S}end_weight_decay")


def _put_learning_rate(sheet: Sheet) -> None:
    style, fraction = STYLES[sheet.value(f"{_S}lr_decay_style")], sheet.value(f"{_S}lr_warmup_fraction")
    warmup, least = sheet.value(f"{_S}lr_warmup_iters"), sheet.value("optimizer.min_lr")
    sheet.put("optimizer.schedule", style, f"{_S}lr_decay_style")
    if fraction is not None:
        sheet.put("optimizer.warmup_fraction", float(fraction), f"{_S}lr_warmup_fraction")
    elif warmup:
        sheet.put("optimizer.warmup_steps", warmup, f"{_S}lr_warmup_iters")
    if (fraction or warmup) and (first := sheet.value(f"{_S}lr_warmup_init")):
        sheet.put("optimizer.initial_learning_rate", float(first), f"{_S}lr_warmup_init")
    if (style != "constant" or fraction is not None) and sheet.value(f"{_S}lr_decay_iters"):
        sheet.put("optimizer.decay_steps", sheet.value(f"{_S}lr_decay_iters"), f"{_S}lr_decay_iters")
    if style != "constant" and least:
        sheet.put("optimizer.minimum_learning_rate", float(least), "optimizer.min_lr")
    if style == "wsd":
        length = sheet.value(f"{_S}lr_wsd_decay_iters")
        sheet.put("optimizer.wsd_decay", sheet.value(f"{_S}lr_wsd_decay_style"), f"{_S}lr_wsd_decay_style")
        if length:
            sheet.put("optimizer.wsd_decay_steps", length, f"{_S}lr_wsd_decay_iters")
        else:
            sheet.refuse(f"{_S}lr_decay_style", "WSD needs lr_wsd_decay_iters (optimizer.wsd_decay_steps).")
