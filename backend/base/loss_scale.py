"""Loss scaling for fp16: gradients times a power of two, so that small ones stay above what fp16 can hold
(Micikevicius et al. 2018).

fp16 has 5 bits of exponent: what is below 6e-8 becomes zero, what is above 65504 infinite. The backward starts from the
scale in place of 1, and finished gradients are divided by it again. A gradient that is not finite was scaled too far:
all ranks see it in the norm, all skip the step, and the scale goes down; after a while without any it goes up again.
Scales are powers of two, so that scaling changes no bits of what neither overflows nor underflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.plan.sections import Precision

STEP_FACTOR = 2.0
"""By how much a scale changes at a time, as in torch's and Megatron-LM's scalers upwards
(`DynamicGradScaler`, which halves too)."""


@dataclass(frozen=True)
class LossScale:
    """The scale of one step, and what decides about that of the next.

    `least` is the smallest scale, `window` the number of steps without an overflow after which the scale doubles,
    `hysteresis` the number of overflows that it takes to halve it; None for `window` keeps the scale as it is.
    `num_good` counts steps since the last overflow or doubling, `patience` the overflows that are still borne.
    """

    value: float
    least: float
    window: int | None
    hysteresis: int
    num_good: int
    patience: int

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """What training starts with: 1 for formats with the exponents of fp32."""
        if precision.dtype != "fp16":
            return cls(1.0, 1.0, None, 1, 0, 1)
        hysteresis = precision.loss_scale_hysteresis
        if precision.loss_scale is not None:
            return cls(precision.loss_scale, precision.loss_scale, None, hysteresis, 0, hysteresis)
        return cls(
            precision.initial_loss_scale,
            precision.min_loss_scale,
            precision.loss_scale_window,
            hysteresis,
            0,
            hysteresis,
        )

    @property
    def state(self) -> tuple[float, float, float]:
        """What a checkpoint keeps of it."""
        return self.value, float(self.num_good), float(self.patience)

    def restored(self, state: Sequence[float]) -> LossScale:
        """As it was when `state` was taken."""
        value, num_good, patience = state
        return replace(self, value=value, num_good=int(num_good), patience=int(patience))

    @property
    def bears_overflow(self) -> bool:
        """Whether one more overflow costs a step only: there is a smaller scale to go to, or patience is left."""
        return self.patience > 1 or self.value > self.least

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the next step.

        >>> scale = LossScale(8.0, 1.0, window=2, hysteresis=2, num_good=0, patience=2)
        >>> [scale.after(overflow=True).value, scale.after(overflow=True).after(overflow=True).value]
        [8.0, 4.0]
        >>> scale.after(overflow=False).after(overflow=False).value
        16.0
        """
        if overflow:
            patience = max(self.patience - 1, 0)
            value = self.value if patience else max(self.value / STEP_FACTOR, self.least)
            return replace(self, value=value, num_good=0, patience=patience)
        num_good = self.num_good + 1
        if self.window is None:
            return replace(self, num_good=num_good)
        if num_good < self.window:
            return replace(self, num_good=num_good)
        return replace(self, value=self.value * STEP_FACTOR, num_good=0, patience=self.hysteresis)
