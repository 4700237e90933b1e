"""The rules of learning rates, weight decay and batches that change. `table` has them in order."""

from __future__ import annotations

from collections.abc import Iterator

from ..batch_sizes import complaints, samples_before
from ..optimizer import Optimizer
from ..rates import Rates
from ..sections import Batch
from ..train import Train

OF_DECAYING = ("minimum_learning_rate", "decay_steps")
OF_WSD = ("wsd_decay", "wsd_decay_steps")
OF_WEIGHT_DECAY = ("end_weight_decay", "weight_decay_steps")


def batches_are_listed(batch: Batch) -> Iterator[str]:
    """Batches that change come to the global one."""
    yield from complaints(batch)


def rates_are_ordered(optimizer: Optimizer, train: Train, batch: Batch) -> Iterator[str]:
    """A learning rate rises to the peak and falls to its minimum, and a weight decay rises, each in its time."""
    yield from _superfluous(optimizer)
    peak = train.learning_rate
    for name, value in (
        ("initial_learning_rate", optimizer.initial_learning_rate),
        ("minimum_learning_rate", optimizer.minimum_learning_rate),
    ):
        if value > peak:
            yield (
                f"{name}={value:g} is above train.learning_rate={peak:g}, which it leads to or comes from. Use "
                f"{name} <= {peak:g}."
            )
    if not complaints(batch):
        yield from _times(optimizer, train, batch)
    end = optimizer.end_weight_decay
    if optimizer.weight_decay_schedule != "constant" and end is None:
        yield (
            f'weight_decay_schedule="{optimizer.weight_decay_schedule}" does not say where it ends. Set '
            "optimizer.end_weight_decay, or leave it out."
        )
    elif optimizer.weight_decay_schedule != "constant" and end is not None and end < optimizer.weight_decay:
        yield (
            f"end_weight_decay={end:g} is below weight_decay={optimizer.weight_decay:g}, and a weight decay rises. Use "
            f"end_weight_decay >= {optimizer.weight_decay:g}."
        )


def _superfluous(optimizer: Optimizer) -> Iterator[str]:
    """Keys about what there is not."""
    warmed = optimizer.warmup_steps > 0 or bool(optimizer.warmup_fraction)
    wsd, rising = optimizer.schedule == "wsd", optimizer.weight_decay_schedule != "constant"
    decaying = optimizer.schedule != "constant" or optimizer.warmup_fraction is not None
    for names, needed, remedy in (
        (OF_DECAYING[:1], optimizer.schedule != "constant", 'optimizer.schedule = "cosine", say'),
        (OF_DECAYING[1:], decaying, 'optimizer.schedule = "cosine", say'),
        (OF_WSD, wsd, 'optimizer.schedule = "wsd"'),
        (("initial_learning_rate",), warmed, "optimizer.warmup_steps"),
        (OF_WEIGHT_DECAY, rising, 'optimizer.weight_decay_schedule = "linear", say'),
    ):
        for name in names:
            if not needed and (value := getattr(optimizer, name)) != getattr(Optimizer, name):
                shown = f'"{value}"' if isinstance(value, str) else f"{value:g}"
                yield f"{name}={shown} has no effect here. Set {remedy}, or leave {name} out."
    if optimizer.warmup_fraction is not None and optimizer.warmup_steps:
        yield (
            f"warmup_fraction={optimizer.warmup_fraction:g} and warmup_steps={optimizer.warmup_steps} both say how "
            "long the warm-up is. Leave one of them out."
        )
    if wsd and optimizer.wsd_decay_steps is None:
        yield 'schedule="wsd" does not say how long the decay is. Set optimizer.wsd_decay_steps.'
    if optimizer.counted_in == "samples" and not (warmed or rising or optimizer.schedule != "constant"):
        yield 'counted_in="samples" has no effect where nothing is counted. Leave it out.'


def _times(optimizer: Optimizer, train: Train, batch: Batch) -> Iterator[str]:
    """Warm-up and decay lie within the schedule's length."""
    rates, unit = Rates.of(optimizer, train, batch), optimizer.counted_in
    if optimizer.schedule == "constant" or not rates.decay_end:
        return  # a run without steps has no rates
    given = optimizer.decay_steps is not None
    run = f"train.steps={train.steps}" + (f", {samples_before(batch, train.steps):,} samples" * (unit == "samples"))
    length = f"decay_steps={rates.decay_end}" if given else f"the length of the run ({run})"
    if rates.warmup >= rates.decay_end:
        yield (
            f"warmup_steps={optimizer.warmup_steps} is not below {length}, so nothing is left for the decay. Use "
            f"warmup_steps < {rates.decay_end}, or a longer optimizer.decay_steps."
        )
    if rates.wsd_length > rates.decay_end:
        yield (
            f"wsd_decay_steps={rates.wsd_length} is longer than {length}, of which it is the end. Use "
            f"wsd_decay_steps <= {rates.decay_end}, or a longer optimizer.decay_steps."
        )
