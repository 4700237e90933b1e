"""`StepResult`: what a step came to. Whoever only reads results needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step as every rank knows it.

    `loss` is the mean per token before the update, `grad_norm` the norm before clipping, `elapsed_s` the seconds on
    this rank; `validation_loss` is the held-out loss after the update, where it was taken; `aux_loss` what routers add
    to the loss that is minimised (load balance and z-losses times their factors, over all layers), which `loss` does
    not contain; `mtp_loss` the mean over the modules of multi-token prediction, per token of the batch too, which
    neither contains. With fp16 `loss_scale` is what losses were multiplied by; where that was too much `grad_norm` is
    not finite and all ranks `skipped` the update. `learning_rate` is the rate of the step, `num_microbatches` how many
    microbatches the data-parallel rank with most had.
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
    num_microbatches: int = 1
