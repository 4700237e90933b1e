"""Elementwise updates: torch's fused kernels in fp32, one pass over every tensor.

An elementwise update gives the same bits however a tensor is cut, but for the last elements of a tensor, fewer than a
vector has, which the kernels round otherwise: those of all tensors are put one behind the other and filled up to whole
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ...core.plan.optimizer import Optimizer, Update

UPDATES: dict[str, Callable[..., None]] = {"adamw": adamw, "sgd": sgd}
"""`Update.name` -> the library's update; it must be elementwise, or cuts would change bits."""

VECTOR_ELEMENTS = 64
"""Tensors are updated in multiples of this: four AVX512 registers of fp32, and the cache line by which torch's
threads share a tensor."""

Row = tuple[Tensor, ...]
"""What an update reads and writes of a tensor: its values, gradient, and the `Update.states`."""


@dataclass(frozen=True)
class Step:
    """What all updates of a step share: the rate and weight decay of the plan, gradients divided by `scale`, fp32 [],
    and nothing changed where `skipped`, fp32 [], is 1."""

    learning_rate: float
    weight_decay: float
    scale: Tensor | None = None
    skipped: Tensor | None = None


def update_rows(update: Update, choice: Optimizer, rows: Sequence[Row], counts: list[Tensor], step: Step) -> None:
    """One call of the library for tensors with one `update`, each with its count of updates, fp32 [], where the update
    goes by it."""
    if not rows:
        return
    ends = [tuple(_end(each) for each in row) for row in rows if row[0].numel() % VECTOR_ELEMENTS]
    whole: list[Row] = [tuple(_whole_vectors(each) for each in row) for row in rows]
    flat = [_filled(torch.cat(kind)) for kind in zip(*ends, strict=True)]
    if ends:
        whole.append(tuple(flat))
        counts = [*counts, *(each.clone() for each in counts[:1])]
    values, gradients, *states = [[row[kind] for row in whole] for kind in range(len(rows[0]))]
    rate, decay = update.learning_rate(step.learning_rate), update.weight_decay(step.weight_decay)
    _CALLS[update.name](
        values,
        gradients,
        states,
        counts,
        choice,
        lr=rate,
        weight_decay=decay,
        grad_scale=step.scale,
        found_inf=step.skipped,
        foreach=False,
        fused=True,
        maximize=False,
    )
    for kind in (each for each in range(len(rows[0])) if ends and each != 1):
        own = [row[kind] for row in ends]
        sizes = [len(end) for end in own]
        torch._foreach_copy_(own, flat[kind][: sum(sizes)].split(sizes))


Tensors = list[Tensor]


def _adamw(
    values: Tensors, gradients: Tensors, states: list[Tensors], counts: Tensors, choice: Optimizer, **how: object
) -> None:
    first, second = choice.betas
    UPDATES["adamw"](
        values, gradients, *states, [], counts, amsgrad=False, beta1=first, beta2=second, eps=choice.eps, **how
    )


def _sgd(
    values: Tensors, gradients: Tensors, states: list[Tensors], counts: Tensors, choice: Optimizer, **how: object
) -> None:
    """Torch begins with the first gradient as momentum; here the momentum begins with zeros, whose share is 0."""
    momentum, nesterov = choice.own_momentum, choice.own_nesterov
    buffers: Sequence[Tensor | None] = states[0] if states else [None] * len(values)
    UPDATES["sgd"](values, gradients, buffers, momentum=momentum, nesterov=nesterov, dampening=0.0, **how)


_CALLS: dict[str, Callable[..., None]] = {"adamw": _adamw, "sgd": _sgd}


def _whole_vectors(tensor: Tensor) -> Tensor:
    """All but the last elements, as long as these fill no vector."""
    rest = tensor.numel() % VECTOR_ELEMENTS
    return tensor.view(-1)[:-rest] if rest else tensor


def _end(tensor: Tensor) -> Tensor:
    """What `_whole_vectors` leaves."""
    return tensor.view(-1)[-(tensor.numel() % VECTOR_ELEMENTS) :]


def _filled(ends: Tensor) -> Tensor:
    """Zeros behind, up to whole vectors."""
    return F.pad(ends, (0, -len(ends) % VECTOR_ELEMENTS))
