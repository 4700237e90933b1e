"""Recomputation: a forward that keeps its inputs only, and runs again when its backward comes (Chen et al.
2016, arXiv 1604.06174).

The second forward repeats the first, collectives included, on equal inputs, so its bits are equal too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.base.reduction import cut
from ...core.model.blocks import layer_prefix
from ...core.program import recomputes_whole
from .context import LayerContext
from .mappings import all_parts

Again = Callable[[], Tensor]
"""What makes a tensor again (`LayerContext.can_repeat`)."""


def recomputed(context: LayerContext, function: Callable[..., Any], *tensors: Tensor, name: str = "") -> Any:
    """`function(*tensors)`, a tensor or several; of all it computes only the result stays, and of the inputs
    what nobody can make again.

    Under `name` an observer sees the result forward and again in the backward."""
    seen = name if torch.is_grad_enabled() else ""
    return _Recomputed.apply(context, function, [context.source_of(tensor) for tensor in tensors], "", seen, *tensors)


def recomputed_layer(context: LayerContext, layer: int, block: Callable[[Tensor], Tensor], x_BSH: Tensor) -> Tensor:
    """`block(x)`, the transformer layer with this global index, of which only the input stays where the
    plan recomputes it whole.

    With `recompute.distribute` each tensor-parallel rank keeps an even part of the input's elements, and all
    gather it for the backward.
    """
    if not recomputes_whole(context.plan, layer):
        return block(x_BSH)
    spread = layer_prefix(layer) if context.plan.recompute.distribute and context.tp.size > 1 else ""
    seen = f"{layer_prefix(layer)}.output" if torch.is_grad_enabled() else ""
    return _Recomputed.apply(context, block, [context.source_of(x_BSH)], spread, seen, x_BSH)


class _Recomputed(torch.autograd.Function):
    """`spread` names the layer whose inputs tensor-parallel ranks, which all hold them, keep in parts; empty
    where each keeps its own."""

    @staticmethod
    def forward(
        ctx: Any,
        context: LayerContext,
        function: Callable[..., Any],
        sources: list[Again | None],
        spread: str,
        name: str,
        *tensors: Tensor,
    ) -> Any:
        ctx.context, ctx.function, ctx.microbatch = context, function, context.microbatch
        ctx.sources, ctx.spread, ctx.shapes = sources, spread, [tensor.shape for tensor in tensors]
        own = [tensor for tensor, source in zip(tensors, sources, strict=True) if source is None]
        ctx.save_for_backward(*(own_part(tensor, context) if spread else tensor for tensor in own))
        y = function(*tensors)
        ctx.show = [context.shown_inside(each) for each in _names(name, y)]
        return _shown(ctx.show, y)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, inputs = iter(ctx.saved_tensors), []
        for source, shape in zip(ctx.sources, ctx.shapes, strict=True):
            tensor = source() if source is not None else next(saved)
            whole = from_parts(tensor, shape, ctx.context, ctx.spread) if source is None and ctx.spread else tensor
            inputs.append(whole.detach().requires_grad_())
        with torch.enable_grad(), ctx.context.running(ctx.microbatch, again=True):
            y = _shown(ctx.show, ctx.function(*inputs))
        torch.autograd.backward([y] if isinstance(y, Tensor) else y, dy)
        return None, None, None, None, None, *(tensor.grad for tensor in inputs)


def _names(name: str, y: Any) -> list[str]:
    """Of a result of one tensor or several; none where it has no name."""
    return [] if not name else [name] if isinstance(y, Tensor) else [f"{name}.{place}" for place in range(len(y))]


def _shown(show: Sequence[Callable[[Tensor], None] | None], y: Any) -> Any:
    """The result `y`, each tensor of which has been shown as it is to be."""
    for each, tensor in zip(show, [y] if isinstance(y, Tensor) else y, strict=False):
        if each is not None:
            each(tensor)
    return y


def own_part(x: Tensor, context: LayerContext) -> Tensor:
    """This tensor-parallel rank's even part of the elements of a tensor that all ranks hold, flat,
    with memory of its own."""
    lo, hi = cut(x.numel(), context.tp.size, context.tp.rank)
    return x.flatten()[lo:hi].clone()


def from_parts(part: Tensor, shape: torch.Size, context: LayerContext, layer: str) -> Tensor:
    """The tensor of which every tensor-parallel rank keeps `own_part`; the gather is recorded under `layer`."""
    sizes = [hi - lo for lo, hi in (cut(shape.numel(), context.tp.size, member) for member in range(context.tp.size))]
    with context.recorder.layer(layer):
        return all_parts(part, context.tp, 0, sizes).view(shape)
