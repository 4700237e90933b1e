"""ALiBi on tensors: scores that fall with the distance between query and key, by each head's slope
(`core.model.alibi`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.model.alibi import alibi_slopes
from ..tensor_parallel import LayerContext
from .attention_blocks import Kernel


def first_query_head(context: LayerContext) -> int:
    """The number in the model of the first query head whose scores this rank computes."""
    inner = context.cp_inner
    lo, hi = context.plan.leaf_sizes.heads.owned_items(context.tp.size, context.tp.rank)
    return (lo + (hi - lo) // inner.size * inner.rank) * context.model.query_heads_per_group


def own_slopes(context: LayerContext) -> tuple[float, ...]:
    """The slopes of the query heads whose scores this rank computes, in their order; none without ALiBi."""
    return alibi_slopes(context.model)[first_query_head(context) :]


def penalties(slopes: Sequence[float], start: int, like: Tensor) -> Tensor:
    """fp32 [heads, l, keys]: what is added to the scores of queries from the token `start` on; `like` is of as many
    queries and keys."""
    queries, keys = (torch.arange(size, device=like.device) for size in like.shape[-2:])
    distances = (queries.unsqueeze(-1) + (start - keys)).float()
    return torch.stack([distances * -slope for slope in slopes])


@dataclass(frozen=True)
class PenalisedKernel:
    """A kernel of the library with ALiBi, head by head: the mask of one head is all that is held of the penalties."""

    kernel: Kernel
    slopes: Sequence[float]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        results: list[Tensor] = []
        saved: list[Tensor] = []
        for number in range(q.shape[1]):
            head = slice(number, number + 1)
            inputs = q[:, head], k[:, head], v[:, head], self._mask(number, mask, start)
            result, for_backward = self.kernel.forward(*inputs, start)
            results.append(result)
            saved += for_backward
        return torch.cat(results, 1), tuple(saved)

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        *,
        y: Tensor,
        for_backward: Sequence[Tensor],
        start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients, per_head = [], len(for_backward) // q.shape[1]
        for number in range(q.shape[1]):
            head, saved = slice(number, number + 1), for_backward[number * per_head : (number + 1) * per_head]
            inputs = dy[:, head], q[:, head], k[:, head], v[:, head], self._mask(number, mask, start)
            gradients.append(self.kernel.backward(*inputs, y=y[:, head], for_backward=saved, start=start))
        dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*gradients, strict=True))
        return dq, dk, dv

    def _mask(self, number: int, mask: Tensor, start: int) -> Tensor:
        """What is added to one head's scores, fp32."""
        return mask + penalties(self.slopes[number : number + 1], start, mask)[0]
