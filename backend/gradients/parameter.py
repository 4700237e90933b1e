"""`Shard`: this rank's part of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.model.parameters import Parameter
from ..numerics.random import normal


@dataclass(frozen=True)
class Shard:
    """The `slices` part of a parameter.

    `storage` is fp32 and contiguous with the cut dimension first (of each expert), so that a feature leaf is a run of
    whole rows; `tensor` is the same memory in the parameter's own orientation. Layers compute with `operand`: the
    storage itself, or its copy in the plan's precision.
    """

    parameter: Parameter
    slices: tuple[slice, ...]
    storage: Tensor
    operand: Tensor

    @property
    def tensor(self) -> Tensor:
        """fp32, shaped as the slice of the full parameter; not contiguous where columns are cut."""
        return canonical(self.parameter, self.storage)

    def load(self, full: Tensor) -> None:
        """Takes this rank's part of a full tensor."""
        with torch.no_grad():
            self.tensor.copy_(full[self.slices])
        self.refresh()

    def refresh(self) -> None:
        """Rounds the fp32 weights into `operand`, after they have changed."""
        if self.operand is not self.storage:
            self.operand.copy_(self.storage)


def canonical(parameter: Parameter, stored: Tensor) -> Tensor:
    """A tensor in storage orientation (a gradient, say) as a view in the parameter's own."""
    return stored.transpose(-1, -2) if _columns_cut(parameter) else stored


def canonical_slices(shard: Shard, box: tuple[slice, ...]) -> tuple[slice, ...]:
    """A box of a shard's storage as a part of the full parameter."""
    if _columns_cut(shard.parameter):
        box = (*box[:-2], box[-1], box[-2])
    return tuple(
        slice(whole.start + part.start, whole.start + part.stop) for whole, part in zip(shard.slices, box, strict=True)
    )


def initial_shard(
    parameter: Parameter,
    slices: tuple[slice, ...],
    seed: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    drawn_as: str | None = None,
) -> Shard:
    """The shard at the start of training: the constant, or this rank's part of the parameter's normal draw; without a
    seed zeros, which loaded weights replace. Layers compute in `dtype`. The draw goes by the name `drawn_as`, by
    default the parameter's own."""
    if seed is None or parameter.constant is not None:
        constant = 0.0 if seed is None or parameter.constant is None else parameter.constant
        values = torch.full([part.stop - part.start for part in slices], constant)
    else:
        values = normal(seed, drawn_as or parameter.name, parameter.shape, slices, parameter.init_std)
    storage = values.transpose(-1, -2) if _columns_cut(parameter) else values
    storage = storage.contiguous().to(device)
    return Shard(parameter, slices, storage, storage.to(dtype))


def _columns_cut(parameter: Parameter) -> bool:
    return parameter.cut is not None and parameter.cut[0] == 1 + parameter.expert
