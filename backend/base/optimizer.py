"""AdamW on a rank's shards, of gradients divided by the token count and clipped by the norm of the whole gradient.

The update itself is torch's fused AdamW in fp32, one pass over every tensor. It is elementwise, so it gives the same
bits however a tensor is cut, but for the last elements of a tensor, fewer than a vector has, which it rounds otherwise:
those of all tensors are put one behind the other and filled up to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from ...core.model.parameters import Parameter
from ...core.plan.sections import Optimizer

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""

UPDATES: dict[str, Callable[..., None]] = {"adamw": adamw}
"""`optimizer.name` -> the update; it must be elementwise, or cuts would change bits."""

VECTOR_ELEMENTS = 64
"""Tensors are updated in multiples of this: four AVX512 registers of fp32, and the cache line by which torch's
threads share a tensor."""

Row = tuple[Tensor, Tensor, Tensor, Tensor]
"""What an update reads and writes of a tensor: its values, gradient, first and second moment."""


@dataclass(frozen=True)
class Held:
    """A parameter of one stage as this rank holds it. `counts` is true on the one rank (per replica) whose
    elements enter the norm."""

    parameter: Parameter
    slices: tuple[slice, ...]
    tensor: Tensor
    counts: bool

    @property
    def name(self) -> str:
        """The canonical name of the parameter."""
        return self.parameter.name


class ShardedAdamW:
    """AdamW (Loshchilov & Hutter 2019) over what one rank holds; weight decay follows `Parameter.decay`."""

    def __init__(self, held: Sequence[Held], choice: Optimizer, learning_rate: float):
        self.held = tuple(held)
        self.learning_rate = learning_rate
        self._choice = choice
        self._updated = {id(one.tensor): _by_rows(one.tensor) for one in self.held}
        self._states: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], coefficient: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Updates every tensor of `held` from its gradient times `coefficient`, fp64 []; gradients are in the order of
        `held`, and used up. Where `skip`, bool [], is true nothing changes. The host waits for neither."""
        # the kernel divides as it goes, and leaves out the update, as it does for torch's loss scaling
        scale = None if coefficient is None else (1 / coefficient).float()
        skipped = None if skip is None else skip.float()
        pairs = list(zip(self.held, gradients, strict=True))
        for decay in (True, False):
            self._update(
                [(one, gradient) for one, gradient in pairs if one.parameter.decay == decay], decay, scale, skipped
            )

    def _update(
        self, pairs: Sequence[tuple[Held, Tensor]], decay: bool, scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """One call of the library for tensors with equal weight decay."""
        rows: list[tuple[Tensor, ...]] = []
        counts: list[Tensor] = []
        for one, gradient in pairs:
            updated, state = self._updated[id(one.tensor)], self._state(one)
            turned = gradient if updated is one.tensor else gradient.mT
            rows.append((updated, _laid_out_as(updated, turned), state["exp_avg"], state["exp_avg_sq"]))
            counts.append(state["step"])
        ends = [tuple(_end(each) for each in row) for row in rows if row[0].numel() % VECTOR_ELEMENTS]
        rows = [tuple(_whole_vectors(each) for each in row) for row in rows]
        flat = [_filled(torch.cat(kind)) for kind in zip(*ends, strict=True)]
        if ends:
            rows.append(tuple(flat))
            counts.append(counts[0].clone())
        first, second = self._choice.betas
        UPDATES[self._choice.name](
            *([row[kind] for row in rows] for kind in range(4)),
            [],
            counts,
            foreach=False,
            fused=True,
            grad_scale=scale,
            found_inf=skipped,
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=self.learning_rate,
            weight_decay=self._choice.weight_decay * decay,
            eps=self._choice.eps,
            maximize=False,
        )
        for kind in (0, 2, 3) if ends else ():
            own = [row[kind] for row in ends]
            sizes = [len(end) for end in own]
            torch._foreach_copy_(own, flat[kind][: sum(sizes)].split(sizes))

    def _state(self, one: Held) -> dict[str, Tensor]:
        """By torch's names, laid out as the tensor that is updated; zeros before the first step."""
        updated = self._updated[id(one.tensor)]
        state = self._states.setdefault(id(one.tensor), {})
        if not state:
            count = torch.zeros((), device=updated.device)
            state.update(step=count, exp_avg=torch.zeros_like(updated), exp_avg_sq=torch.zeros_like(updated))
        return state

    def moments(self, one: Held) -> tuple[Tensor, Tensor]:
        """First and second moment of a held tensor, zero before the first step."""
        state = self.saved_state(one)
        return state["exp_avg"], state["exp_avg_sq"]

    def saved_state(self, one: Held) -> Mapping[str, Tensor]:
        """What the update of a held tensor goes on from, by torch's names: `step`, which counts updates, and both
        moments. Before the first step they are zero. They may be written to."""
        turned = self._updated[id(one.tensor)] is not one.tensor
        return {name: value.mT if turned and value.dim() > 1 else value for name, value in self._state(one).items()}

    @property
    def state_tensors(self) -> list[Tensor]:
        """Everything the update keeps between steps: the moments and step counts, once they exist."""
        return [value for state in self._states.values() for value in state.values()]

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments once they exist."""
        return sum(2 * one.tensor.nbytes for one in self.held)


def _by_rows(tensor: Tensor) -> Tensor:
    """A matrix whose columns lie one after the other as its transpose: what the fused kernel would copy is then
    updated where it lies."""
    turned = tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
    return tensor.mT if turned else tensor


def _laid_out_as(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of what it belongs to, by which the fused kernel walks over both."""
    return gradient if gradient.stride() == tensor.stride() else torch.empty_like(tensor).copy_(gradient)


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


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, fp64 [], that brings a norm down to `max_norm`: min(1, max_norm / (norm + 1e-6)); 1 when
    `max_norm` is 0 (no clipping)."""
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
