"""One batch and one set of weights for tests that run a stage by itself, and what its ranks found as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardproof import ModelSpec, Plan
from shardproof.core.model.parameters import parameters


def tokens_of(plan: Plan) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one global batch, [samples, s]."""
    size = (plan.batch.global_size, plan.batch.sequence + 1)
    text = torch.randint(0, plan.model.vocab_size, size, generator=torch.Generator().manual_seed(5))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def spread_weights(model: ModelSpec) -> dict[str, Tensor]:
    """Weights far from their start, so that biases and norms matter and attention is not uniform."""
    generator = torch.Generator().manual_seed(11)
    return {
        p.name: torch.randn(p.shape, generator=generator) * (0.1 if len(p.shape) >= 2 else 0.2) + (p.constant or 0.0)
        for p in parameters(model)
    }


def whole_gradients(
    model: ModelSpec, ranks: Iterable[tuple[Mapping[str, Tensor], Mapping[str, tuple[slice, ...]]]]
) -> dict[str, Tensor]:
    """Full gradients by name from every rank's own and where they lie; what several ranks hold
    must be equal to the bit."""
    shapes = {p.name: p.shape for p in parameters(model)}
    full: dict[str, Tensor] = {}
    for gradients, slices in ranks:
        for name, gradient in gradients.items():
            target = full.setdefault(name, torch.full(shapes[name], torch.nan))[slices[name]]
            known = ~target.isnan()
            assert torch.equal(target[known], gradient[known]), f"{name} differs between replicas"
            target.copy_(gradient)
    return full
