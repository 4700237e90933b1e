"""`Observer` and `SumObserver`: who wants to see the numbers of a training step while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...core.layout.stage_parameters import Usage
from ...core.plan.plan import AnyPlan
from .microbatch import Microbatch

Slices = tuple[slice, ...]
"""Where a local tensor lies in the full one."""


class Observer(Protocol):
    """Sees every canonical tensor of one rank. Tensors are live: read them before the call
    returns and do not change them.

    Calls come in the order the rank works: `begin_step`, activations of each microbatch, then in STEP the loss,
    gradients from the last layer to the first, the gradient norm, optimizer states and weights. Held-out passes
    show their activations too. Nothing waits, and nothing is sent, for an observer: what is shown is what the step
    has there. An exception raised here ends the rank like any other. One that is a context manager too is left when
    the run ends, whatever ends it.
    """

    def begin_step(self, step: int) -> None:
        """A new optimizer step, counted from 0."""

    def activation(self, name: str, microbatch: Microbatch, tokens: tuple[slice, ...], tensor_BSH: Tensor) -> None:
        """Hidden states `[samples, tokens, hidden]` of one microbatch; `microbatch.first_sample` is its
        place in the global batch.

        `tokens` are those of each sequence that this rank holds, one run after the other: all of them, but for sequence
        and context parallelism.
        """

    def scalar(self, name: str, value: float) -> None:
        """`loss` (mean over the tokens of the global batch) and `grad_norm` (before clipping): the same on every rank.
        `validation_loss` follows the held-out pass that it is the mean of."""

    def gradient(self, name: str, slices: Slices, tensor: Tensor) -> None:
        """This rank's slice of a finished gradient: summed over the global batch, divided by its
        tokens, not yet clipped."""

    def optimizer_state(self, name: str, slices: Slices, moments: Mapping[str, Tensor]) -> None:
        """The moments that the update of a parameter keeps, after the step, by torch's names: `exp_avg` and
        `exp_avg_sq` of AdamW, `momentum_buffer` of SGD."""

    def weight(self, name: str, slices: Slices, tensor: Tensor, *, step: int | None = None) -> None:
        """This rank's slice of a parameter after the step. Weights that are gathered during a forward of the next step
        are shown again, with their `step`, where that forward uses them; None is the step that has begun last."""

    def recomputed(self, name: str, microbatch: Microbatch, tokens: tuple[slice, ...] | None, tensor: Tensor) -> None:
        """What a backward has computed again. With `tokens` it is a tensor that `activation` has shown; without them it
        is one of this rank's own, which comes once forward and again in the backward."""

    def brought(self, name: str, slices: Slices, tensor: Tensor) -> None:
        """The part of a parameter that this rank brings to an UNSHARD of a training step."""

    def gathered(self, name: str, slices: Slices, tensor: Tensor) -> None:
        """This rank's slice of a parameter as that UNSHARD has brought it together: layers compute with it."""


@runtime_checkable
class ObserversOfRun(Protocol):
    """What makes a rank's observer, and wants to know first what is run: `of_run(plan)` makes it from the plan with
    what was chosen at the start of the run (`backend.numerics.product_choice`)."""

    def of_run(self, plan: AnyPlan) -> Callable[[int], Observer | None]:
        """The same for a plan as it is run."""


class SumObserver(Protocol):
    """Sees what the sums of exact numerics are made of, for whoever explains a wrong one. Tensors are live, as those of
    `Observer`."""

    def computed(self, operation: str, operands: tuple[Any, ...], result: Any) -> None:
        """A method of `Numerics` that is `observed`, what it was given and what it gave."""

    def contributed(self, usage: Usage, first_sample: int, contribution: Any) -> Any:
        """What a microbatch contributes to a gradient (`backend.numerics.contributions`), before it is added. Returns
        the contribution: one that can be read only once is given back as another."""

    def returned(self, exchange: Any, weights_TK: Tensor | None) -> None:
        """Rows are back from their experts: results, of which a token's are multiplied with these weights and added, or
        gradients (None)."""
