"""Learning rates, weight decay and batches of Megatron-LM, to and from the keys of a plan.

Megatron counts both schedules in samples; where its arguments are in iterations each is one global batch, so that a
step of a plan is one of them. Sources: `get_optimizer_param_scheduler` of `training/training.py` and
`training/arguments.py` of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..base.errors import PlanError
from ..layout.microbatches import constant_microbatches
from ..plan.batch_sizes import complaints, pairs_of, samples_before, stretches
from ..plan.plan import Plan
from ..plan.sections import Batch
from .megatron_reading import Reading

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
"""--lr-decay-style -> optimizer.schedule."""

WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")

_OF_LENGTHS = ("decay", "wsd-decay")
_OF_RATES = (
    *("--lr-decay-style", "--min-lr", "--lr-warmup-init", "--lr-warmup-fraction", "--lr-warmup-iters"),
    *("--lr-warmup-samples", "--lr-wsd-decay-style"),
    *(f"--lr-{name}-{unit}" for name in _OF_LENGTHS for unit in ("iters", "samples")),
)
_OF_WEIGHT_DECAY = ("--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style")


def read_batches(reading: Reading, size: int | None, replicas: int | None) -> int | None:
    """The batches that change, and the global batch that they come to: `size` where they do not; `replicas` are the
    data-parallel ranks, where these are known."""
    ramp, listed, decrease = "--rampup-batch-size", "--step-batch-size-schedule", "--decrease-batch-size-if-needed"
    if reading.is_written(listed):
        return _listed(reading, listed, size)
    micro, per_replica = reading.value("batch", "micro"), None
    if micro is not None and replicas is not None:
        per_replica = micro * replicas
    if reading.given(decrease) and size is not None and per_replica is not None and not reading.is_written(ramp):
        try:
            running = constant_microbatches(size, micro or 1, replicas or 1, decrease_if_needed=True).running_global
        except PlanError:
            reading.say(
                decrease, "refused", f"the batch of {size} has not one microbatch for each rank", "batch.global"
            )
            return size
        if running != size:
            reading.say(decrease, "mapped", f"{size} is decreased to a multiple of {per_replica}", "batch.global")
        return running
    if reading.is_written(ramp):
        _ramp(reading, ramp)
    return size


def _listed(reading: Reading, flag: str, size: int | None) -> int | None:
    if (first := reading.text(flag)) is None:
        return size
    # scripts give it in quotes and lose them: Megatron's own train_gpt3_175b_distributed.sh
    text = " ".join(reading.last[flag].values) or first
    if reading.given("--decrease-batch-size-if-needed"):
        reading.say(flag, "refused", "Megatron takes no list with --decrease-batch-size-if-needed", "batch.schedule")
        return size
    try:
        last = max(pairs_of(text))[1]
    except ValueError as error:
        reading.say(flag, "refused", str(error), "batch.schedule")
        return size
    reading.put("batch.schedule", text, flag)
    reading.put("batch.schedule_unit", "tokens", flag, why="with a sequence length Megatron counts tokens")
    return last


def _ramp(reading: Reading, flag: str) -> None:
    occurrence = reading.last[flag]
    if occurrence.unknown:
        reading.say(flag, "not-modelled", "it is not known here: the plan is of the full batch")
        return
    try:
        start, increment, samples = map(int, occurrence.values)
    except ValueError:
        reading.say(flag, "refused", "it takes three whole numbers: the first batch, the increment, the samples")
        return
    reading.put("batch.rampup", [start, increment, samples], flag)


def read_length(reading: Reading, size: int | None) -> None:
    """How many steps there are."""
    if (steps := _quietly(reading, "--train-iters")) is not None:
        reading.put("train.steps", steps, "--train-iters")
    elif (samples := _quietly(reading, "--train-samples")) is not None and size:
        steps = steps_of(_batch(reading, size), samples)
        reading.put("train.steps", steps, "--train-samples", why="samples over the global batches")


def steps_of(batch: Batch, samples: int) -> int:
    """The steps of a run of so many samples, as `update_train_iters` of `training/training.py` counts them: a list of
    batches goes on until all are taken, and what is no whole batch at the end of others is left out. Not so: where a
    run ends within its ramp-up, Megatron takes one batch more.

    >>> [steps_of(Batch(8, 1, 16, **more), 42) for more in ({}, {"schedule": "0:4 8:8"}, {"rampup": (4, 4, 9)})]
    [5, 7, 6]
    """
    last = [each for each in stretches(batch) if each.first_sample <= samples][-1]
    rest = (samples - last.first_sample) / last.size
    return last.first_step + (math.floor(rest) if batch.schedule is None else math.ceil(rest))


def _batch(reading: Reading, size: int) -> Batch:
    """The batches as far as they are read; constant where what is read is none."""
    given: dict[str, Any] = {
        name: reading.value("batch", name)
        for name in ("rampup", "schedule", "schedule_unit")
        if reading.value("batch", name) is not None
    }
    if "rampup" in given:
        given["rampup"] = tuple(given["rampup"])
    sequence = reading.value("batch", "sequence") or 1
    batch = Batch(size, 1, sequence, **given)
    return Batch(size, 1, sequence) if complaints(batch) else batch


def _quietly(reading: Reading, flag: str) -> int | None:
    """A number that is not needed: one that is not known is left out."""
    if reading.is_written(flag) and reading.last[flag].unknown:
        reading.say(flag, "no-effect", "how long a run trains does not change a step, and it is not known here")
        return None
    return reading.integer(flag)


def read_rates(reading: Reading, size: int | None) -> None:
    """Both schedules; called when the other keys of the optimizer are filled."""
    unknown = [flag for flag in (*_OF_RATES, *_OF_WEIGHT_DECAY) if flag in reading.last and reading.last[flag].unknown]
    if unknown or not reading.is_written("--lr"):
        why = f"{unknown[0]} is not known here" if unknown else "without --lr there is nothing to schedule"
        for flag in (*_OF_RATES, *_OF_WEIGHT_DECAY):
            reading.say(flag, "not-modelled", f"the plan keeps its learning rate: {why}")
        return
    by_samples = reading.value("train", "steps") is not None and reading.given("--train-samples")
    by_samples = by_samples and not reading.given("--train-iters")
    unit = "samples" if by_samples else "iters"
    _read_learning_rate(reading, unit, size)
    _read_weight_decay(reading, unit, size)


def _read_learning_rate(reading: Reading, unit: str, size: int | None) -> None:
    style = reading.text("--lr-decay-style") or "linear"
    if style not in STYLES:
        reading.say("--lr-decay-style", "refused", f"known are {', '.join(STYLES)}", "optimizer.schedule")
        return
    fraction, steps = reading.number("--lr-warmup-fraction"), reading.integer(f"--lr-warmup-{unit}") or 0
    decay = reading.integer(f"--lr-decay-{unit}")
    if style != "constant" and decay is None and reading.value("train", "steps") is None:
        reading.say("--lr-decay-style", "not-modelled", "how long the run is, and so the decay, is not said")
        return
    reading.put("optimizer.schedule", STYLES[style], "--lr-decay-style")
    warms = bool(fraction or steps)
    if unit == "samples" and (warms or style != "constant"):
        reading.put("optimizer.counted_in", "samples", "--train-samples")
    if fraction is not None:
        reading.put("optimizer.warmup_fraction", fraction, "--lr-warmup-fraction")
    elif steps:
        reading.put("optimizer.warmup_steps", steps, f"--lr-warmup-{unit}")
    if warms and (first := reading.number("--lr-warmup-init")):
        reading.put("optimizer.initial_learning_rate", first, "--lr-warmup-init")
    if style != "constant" and (least := reading.number("--min-lr")):
        reading.put("optimizer.minimum_learning_rate", least, "--min-lr")
    if style != "constant" or fraction is not None:
        _put_length(reading, "optimizer.decay_steps", decay, f"--lr-decay-{unit}", unit, size)
    if style == "WSD":
        _read_wsd(reading, unit)


def _read_wsd(reading: Reading, unit: str) -> None:
    form, length = reading.text("--lr-wsd-decay-style") or "exponential", reading.integer(f"--lr-wsd-decay-{unit}")
    if form not in WSD_STYLES:
        reading.say("--lr-wsd-decay-style", "refused", f"known are {', '.join(WSD_STYLES)}", "optimizer.wsd_decay")
        return
    reading.put("optimizer.wsd_decay", form, "--lr-wsd-decay-style")
    if length is not None:
        reading.put("optimizer.wsd_decay_steps", length, f"--lr-wsd-decay-{unit}")
    else:
        why = f"WSD needs --lr-wsd-decay-{unit}"
        reading.say("--lr-decay-style", "refused", why, "optimizer.wsd_decay_steps")


def _put_length(reading: Reading, key: str, given: int | None, flag: str, unit: str, size: int | None) -> None:
    """How long a schedule is: as the flag says, else as long as the run, which a plan need not say."""
    if given is not None:
        reading.put(key, given, flag)
    elif unit == "samples" and size and (samples := reading.integer("--train-samples")):
        steps = reading.value("train", "steps")
        if samples_before(_batch(reading, size), steps) != samples:  # the run ends within a batch
            reading.put(key, samples, "--train-samples")


def _read_weight_decay(reading: Reading, unit: str, size: int | None) -> None:
    style = reading.text("--weight-decay-incr-style") or "constant"
    if style not in WEIGHT_DECAY_STYLES:
        known = ", ".join(WEIGHT_DECAY_STYLES)
        reading.say("--weight-decay-incr-style", "refused", f"known are {known}", "optimizer.weight_decay_schedule")
        return
    if style == "constant":
        return
    start, end = reading.number("--start-weight-decay"), reading.number("--end-weight-decay")
    if start is None or end is None:
        why = "Megatron then needs --start-weight-decay and --end-weight-decay"
        reading.say("--weight-decay-incr-style", "refused", why, "optimizer.end_weight_decay")
        return
    reading.put("optimizer.weight_decay_schedule", style, "--weight-decay-incr-style")
    reading.put("optimizer.weight_decay", start, "--start-weight-decay")
    reading.put("optimizer.end_weight_decay", end, "--end-weight-decay")
    if unit == "samples":
        reading.put("optimizer.counted_in", "samples", "--train-samples")
    _put_length(reading, "optimizer.weight_decay_steps", None, "", unit, size)


Line = tuple[Any, ...]


def rate_lines(plan: Plan) -> Iterator[Line]:
    """The arguments of both schedules, of the batches and of the length of the run."""
    optimizer, batch = plan.optimizer, plan.batch
    by_samples = optimizer.counted_in == "samples" or not batch.stays
    unit = "samples" if by_samples else "iters"
    if by_samples:
        yield "--train-samples", samples_before(batch, plan.train.steps)
    else:
        yield "--train-iters", plan.train.steps
    yield "--lr-decay-style", next(theirs for theirs, ours in STYLES.items() if ours == optimizer.schedule)
    if batch.rampup is not None:
        yield "--rampup-batch-size", *batch.rampup
    elif batch.schedule is not None:
        yield "--step-batch-size-schedule", batch.schedule
    if optimizer.counted_in != ("samples" if by_samples else "steps"):
        return  # nothing but numbers of steps, which are not those of samples
    yield from _lengths(plan, unit)
    if optimizer.warmup_steps or optimizer.warmup_fraction:
        yield "--lr-warmup-init", optimizer.initial_learning_rate
    if optimizer.schedule != "constant":
        yield "--min-lr", optimizer.minimum_learning_rate
    if optimizer.weight_decay_schedule != "constant":
        yield "--weight-decay-incr-style", optimizer.weight_decay_schedule
        yield "--start-weight-decay", optimizer.weight_decay
        yield "--end-weight-decay", optimizer.end_weight_decay


def _lengths(plan: Plan, unit: str) -> Iterator[Line]:
    optimizer = plan.optimizer
    if optimizer.warmup_fraction is not None:
        yield "--lr-warmup-fraction", optimizer.warmup_fraction
    elif optimizer.warmup_steps:
        yield f"--lr-warmup-{unit}", optimizer.warmup_steps
    if optimizer.decay_steps is not None:
        yield f"--lr-decay-{unit}", optimizer.decay_steps
    if optimizer.schedule == "wsd":
        yield f"--lr-wsd-decay-{unit}", optimizer.wsd_decay_steps
        yield "--lr-wsd-decay-style", optimizer.wsd_decay
