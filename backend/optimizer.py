"""AdamW on a rank's shards, of gradients divided by the token count and clipped by the norm of the whole gradient.

The update itself is `torch.optim.AdamW` in fp32. It is elementwise, so it gives the same bits however a tensor is cut; but for the fused
kernel, which rounds the last elements of a tensor, fewer than a vector has, otherwise: fast numerics use that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.parameters import Parameter
from ..core.plan import Optimizer

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""

UPDATES = {"adamw": torch.optim.AdamW}
"""`optimizer.name` -> the update; it must be elementwise, or cuts would change bits."""


@dataclass(frozen=True)
class Held:
    """A parameter of one stage as this rank holds it. `counts` is true on the one rank (per replica) whose elements enter the norm."""

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

    def __init__(self, held: Sequence[Held], choice: Optimizer, learning_rate: float, *, fused: bool = False):
        """`fused` runs torch's kernel that passes once over every tensor; the bits of its last elements depend on where a tensor is cut."""
        self.held = tuple(held)
        self._fused = fused
        self._updated = {id(one.tensor): _by_rows(one.tensor) for one in self.held}
        groups = [
            {
                "params": [self._updated[id(one.tensor)] for one in self.held if one.parameter.decay == decay],
                "weight_decay": choice.weight_decay * decay,
            }
            for decay in (True, False)
        ]
        self._adamw = UPDATES[choice.name](groups, lr=learning_rate, betas=choice.betas, eps=choice.eps, foreach=False, fused=fused)

    def step(self, gradients: Sequence[Tensor], coefficient: float) -> None:
        """Updates every tensor of `held` from its gradient times `coefficient`; gradients are in the order of `held`, and used up."""
        for one, gradient in zip(self.held, gradients, strict=True):
            updated = self._updated[id(one.tensor)]
            if coefficient != 1.0 and not self._fused:
                gradient.mul_(coefficient)
            updated.grad = _laid_out_as(updated, gradient.mT if updated is not one.tensor else gradient)
        if self._fused and self.held:  # the kernel divides as it goes, as it does for torch's loss scaling
            self._adamw.grad_scale = torch.tensor(1 / coefficient, device=self.held[0].tensor.device) if coefficient != 1.0 else None
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def moments(self, one: Held) -> tuple[Tensor, Tensor]:
        """First and second moment of a held tensor. There are none before the first step."""
        state = self.saved_state(one)
        return state["exp_avg"], state["exp_avg_sq"]

    def saved_state(self, one: Held) -> Mapping[str, Tensor]:
        """What the update of a held tensor goes on from, by torch's names: `step`, which counts updates, and both moments. Before the first
        step they are zero. They may be written to."""
        updated = self._updated[id(one.tensor)]
        state = self._adamw.state[updated]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(updated), exp_avg_sq=torch.zeros_like(updated))
        turned = updated is not one.tensor
        return {name: value.mT if turned and value.dim() > 1 else value for name, value in state.items()}

    @property
    def state_tensors(self) -> list[Tensor]:
        """Everything the update keeps between steps: the moments and step counts, once they exist."""
        return [value for state in self._adamw.state.values() for value in state.values() if isinstance(value, Tensor)]

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments once they exist."""
        return sum(2 * one.tensor.nbytes for one in self.held)


def _by_rows(tensor: Tensor) -> Tensor:
    """A matrix whose columns lie one after the other as its transpose: what the fused kernel would copy is then updated where it lies."""
    turned = tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
    return tensor.mT if turned else tensor


def _laid_out_as(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of what it belongs to, by which the fused kernel walks over both."""
    return gradient if gradient.stride() == tensor.stride() else torch.empty_like(tensor).copy_(gradient)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that brings a norm down to `max_norm`: min(1, max_norm / (norm + 1e-6)); 1 when `max_norm` is 0 (no clipping)."""
    return min(1.0, max_norm / (norm + CLIP_EPS)) if max_norm > 0 else 1.0
