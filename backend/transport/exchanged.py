"""Sums and maxima made of what members exchange: one after the other, in member order, equal on all of them.

Where all members' tensors are small, or a copy is all that it takes to send one, this is faster than a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base import ReduceOp, Shape

AllToAll = Callable[[list[Tensor], list[Shape]], list[Tensor]]
AllGather = Callable[[Tensor, list[Shape]], list[Tensor]]


def exchanged_all_reduce(
    tensor: Tensor, op: ReduceOp, size: int, all_to_all: AllToAll, all_gather: AllGather
) -> Tensor:
    """All tensors are exchanged, or, where that would be more than a ring sends, parts of them: every member adds up
    one part and all take all parts."""
    if size == 2 or tensor.numel() <= size:
        return folded(all_gather(tensor, [tuple(tensor.shape)] * size), op)
    flat = tensor.reshape(-1)
    width = -(-flat.numel() // size)
    padded = torch.nn.functional.pad(flat, (0, width * size - flat.numel()))
    shapes: list[Shape] = [(width,)] * size
    own = folded(all_to_all(list(padded.split(width)), shapes), op)
    return torch.cat(all_gather(own, shapes))[: flat.numel()].view(tensor.shape)


def folded(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The sum or maximum of two or more, one after the other."""
    first, second, *others = tensors
    result = first + second if op == "sum" else torch.maximum(first, second)
    for other in others:
        result = result.add_(other) if op == "sum" else torch.maximum(result, other)
    return result
