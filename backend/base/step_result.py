"""`StepResult`: what a step came to, and `StepResults`: those of a run. Whoever only reads results needs no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step as every rank knows it.

    `loss` is the mean per token before the update, `grad_norm` the norm before clipping, `elapsed_s` the seconds on
    this rank; `validation_loss` is the held-out loss after the update, where it was taken; `aux_loss` what routers add
    to the loss that is minimised (load balance and z-losses times their factors, over all layers), which `loss` does
    not contain; `mtp_loss` the mean over the modules of multi-token prediction, per token of the batch too, which
    neither contains. With fp16 `loss_scale` is what losses were multiplied by; where that was too much `grad_norm` is
    not finite and all ranks `skipped` the update. `learning_rate` is that of the update, `num_microbatches` what the
    data-parallel rank with most of them ran.
    """

    step: int
    loss: float
    grad_norm: float
    elapsed_s: float
    num_tokens: int
    validation_loss: float | None = None
    aux_loss: float = 0.0
    mtp_loss: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False
    learning_rate: float = 0.0
    num_microbatches: int = 0


_VALIDATION = "validation_loss"
_FROM_FLOAT = {"step": int, "num_tokens": int, "num_microbatches": int, "skipped": bool}
_STORED = tuple(each.name for each in fields(StepResult) if each.name != _VALIDATION)


class StepResults(Sequence[StepResult]):
    """The results of steps, in their order, each in 88 bytes: a run may have millions, and every rank has them."""

    def __init__(self) -> None:
        self._numbers = array("d")
        self._validation: dict[int, float] = {}

    def append(self, result: StepResult) -> None:
        """Adds the result of the next step."""
        if result.validation_loss is not None:
            self._validation[len(self)] = result.validation_loss
        self._numbers.extend(float(getattr(result, name)) for name in _STORED)

    def __len__(self) -> int:
        return len(self._numbers) // len(_STORED)

    @overload
    def __getitem__(self, index: int) -> StepResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepResult]: ...
    def __getitem__(self, index: int | slice) -> StepResult | list[StepResult]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        row = self._numbers[number * len(_STORED) : (number + 1) * len(_STORED)]
        found: dict[str, Any] = {
            name: _FROM_FLOAT.get(name, float)(value) for name, value in zip(_STORED, row, strict=True)
        }
        return StepResult(**found, validation_loss=self._validation.get(number))
