"""The learning rate and the weight decay of every step of a run, as functions of the number of the step alone.

The formulas are those of Megatron-Core's `OptimizerParamScheduler`, which counts in samples; here the plan chooses
what is counted. A step uses the rate for what was counted before it: the first one that for 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .batch_sizes import samples_before
from .optimizer import Optimizer
from .sections import Batch
from .train import Train

WSD_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (math.cos(math.pi * share) + 1.0),
    "exponential": lambda share: 2.0 * math.pow(0.5, share) - 1.0,
    "minus_sqrt": lambda share: 1.0 - math.sqrt(share),
}
"""`optimizer.wsd_decay` -> what is left of the way from peak to minimum, by the share of the decay behind it."""


@dataclass(frozen=True)
class Rates:
    """The schedules of a plan. `warmup`, `decay_end`, `wsd_length` and `weight_decay_end` are counted in steps or in
    samples, as the plan says; they must obey the rule `rates-are-ordered`."""

    optimizer: Optimizer
    peak: float
    warmup: float
    decay_end: int
    wsd_length: int
    weight_decay_end: int
    batch: Batch

    @staticmethod
    def of(optimizer: Optimizer, train: Train, batch: Batch) -> Rates:
        """Those of a plan with these sections. What says no end ends with the run."""
        samples = optimizer.counted_in == "samples"
        run = samples_before(batch, train.steps) if samples else train.steps
        decay_end = run if optimizer.decay_steps is None else optimizer.decay_steps
        fraction = optimizer.warmup_fraction
        return Rates(
            optimizer,
            train.learning_rate,
            optimizer.warmup_steps if fraction is None else fraction * decay_end,
            decay_end,
            optimizer.wsd_decay_steps or 0,
            run if optimizer.weight_decay_steps is None else optimizer.weight_decay_steps,
            batch,
        )

    def counted_before(self, step: int) -> int:
        """Steps, or samples, before a step."""
        return samples_before(self.batch, step) if self.optimizer.counted_in == "samples" else step

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate_at(self.counted_before(step))

    def weight_decay(self, step: int) -> float:
        """The weight decay of a step, counted from 0."""
        return self.weight_decay_at(self.counted_before(step))

    def learning_rate_at(self, count: int) -> float:
        """The learning rate after `count` steps, or samples."""
        chosen, peak, least = self.optimizer, self.peak, self.optimizer.minimum_learning_rate
        if self.warmup > 0 and count <= self.warmup:
            first = chosen.initial_learning_rate
            return first + (peak - first) * count / self.warmup
        if chosen.schedule == "constant":
            return peak
        if count > self.decay_end or not self.decay_end:
            return least
        if chosen.schedule == "inverse_sqrt":
            return max(least, peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(count, 1)))
        return least + self._left(count) * (peak - least)

    def _left(self, count: int) -> float:
        """What is left of the way from the peak down to the minimum, from 1 to 0."""
        if self.optimizer.schedule == "wsd":
            begin = self.decay_end - self.wsd_length
            return 1.0 if count <= begin else WSD_DECAYS[self.optimizer.wsd_decay]((count - begin) / self.wsd_length)
        share = (count - self.warmup) / (self.decay_end - self.warmup)
        return 1.0 - share if self.optimizer.schedule == "linear" else 0.5 * (math.cos(math.pi * share) + 1.0)

    def weight_decay_at(self, count: int) -> float:
        """The weight decay after `count` steps, or samples."""
        chosen = self.optimizer
        start, end = chosen.weight_decay, chosen.end_weight_decay
        if chosen.weight_decay_schedule == "constant" or end is None:
            return start
        if count > self.weight_decay_end or not self.weight_decay_end:
            return end
        share = count / self.weight_decay_end
        made = share if chosen.weight_decay_schedule == "linear" else 0.5 * (math.cos(math.pi * (1.0 - share)) + 1.0)
        return start + made * (end - start)

    @property
    def recorded(self) -> dict[str, int]:
        """What the keys of `[optimizer]` come to that depend on the length of the run, where a schedule has them: by
        key. Runs of other lengths have the same rates where these are equal."""
        found: dict[str, int] = {}
        if self.optimizer.schedule != "constant":
            found["decay_steps"] = self.decay_end
        if self.optimizer.weight_decay_schedule != "constant":
            found["weight_decay_steps"] = self.weight_decay_end
        return found

    @property
    def fixed(self) -> Optimizer:
        """The section of the plan with the ends of its schedules written down: it means the same in a run of another
        length, or of other batches."""
        ends = self.recorded
        return replace(
            self.optimizer,
            decay_steps=ends.get("decay_steps") or self.optimizer.decay_steps,
            weight_decay_steps=ends.get("weight_decay_steps") or self.optimizer.weight_decay_steps,
        )
