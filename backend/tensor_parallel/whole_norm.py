"""RMSNorms of all queries and of all keys of a token, whose heads tensor parallelism cuts: sums over a token's features
are sums over ranks.

Shape suffixes: B samples, S tokens, L this rank's key/value heads, Q query heads of each (one for keys), D features of
a head, C all of these features of the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.autograd import Function
from ..numerics import Contribution
from .context import LayerContext
from .norm import Norm


class WholeNorms(nn.Module):
    """Queries [b, s, l, q, d] and keys [b, s, l, 1, d] -> the same, each divided by the root of the mean square over
    all heads of the token and multiplied by a weight for each feature (OLMo 2, arXiv 2501.00656, section 3.2). Both
    sums go in one exchange, forward and backward."""

    def __init__(self, context: LayerContext, prefix: str):
        super().__init__()
        self.name = f"{prefix}.all_queries_norm"
        self.context = context
        self.queries = CutNorm(context, f"{prefix}.all_queries_norm")
        self.keys = CutNorm(context, f"{prefix}.all_keys_norm")

    @property
    def norms(self) -> tuple[CutNorm, CutNorm]:
        """Both, in the order of their sums."""
        return self.queries, self.keys

    def forward(self, q_BSLQD: Tensor, k_BSLQD: Tensor) -> tuple[Tensor, ...]:
        return _WholeNorms.apply(q_BSLQD, k_BSLQD, self)

    def means(self, parts_BSC: Sequence[Tensor]) -> list[Tensor]:
        """[b, s, 1] of each: the mean over all features of all ranks."""
        numerics, norms = self.context.numerics, self.norms
        with self.context.recorder.layer(self.name):
            own = [numerics.leaf_sums(part, norm.leaves) for part, norm in zip(parts_BSC, norms, strict=True)]
            sums = numerics.row_sums(own, norms[0].leaves, self.context.tp)
        return [(each / norm.width).unsqueeze(-1) for each, norm in zip(sums, norms, strict=True)]


class CutNorm(Norm):
    """A norm of rows of which this rank has the features of its heads: weights for these."""

    def __init__(self, context: LayerContext, name: str):
        super().__init__(context, name)
        self.leaves = context.owned_leaves(f"{name}.weight")
        self.width = self.leaves.leaves.num_items * self.leaves.unit

    def token_sums(self, x_BSC: Tensor) -> Contribution:
        """The sums over all tokens: heads are of all of them."""
        return self.context.numerics.token_sums(x_BSC)


class _WholeNorms(Function):
    """y = x r w with r = 1/sqrt(mean(x^2) + eps); dx = r (g - n mean(g n)) with n = x r and g = w dy."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, layer: WholeNorms) -> tuple[Tensor, ...]:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        parts = [part.flatten(2) for part in (q, k)]  # copies: else values were kept with them
        wide = [part.float() for part in parts]
        inverse, means = layer.context.numerics.elementwise, layer.means([part.square() for part in wide])
        rstds = [inverse(torch.rsqrt, mean + norm.eps) for mean, norm in zip(means, layer.norms, strict=True)]
        ctx.save_for_backward(*parts, *rstds)
        return tuple(
            (part * rstd).mul_(norm.factor).to(given.dtype).view(given.shape)
            for part, rstd, norm, given in zip(wide, rstds, layer.norms, (q, k), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, (q, k, *rstds) = ctx.layer, ctx.saved_tensors
        norms, dys = layer.norms, [dy.float().flatten(2) for dy in gradients]
        normed = [part.float() * rstd for part, rstd in zip((q, k), rstds, strict=True)]
        scaled = [dy * norm.factor for dy, norm in zip(dys, norms, strict=True)]
        means = layer.means([g * n for g, n in zip(scaled, normed, strict=True)])
        found = [
            (g - n * mean).mul_(rstd).to(given.dtype).view(given.shape)
            for g, n, mean, rstd, given in zip(scaled, normed, means, rstds, gradients, strict=True)
        ]
        for norm, n, dy in zip(norms, normed, dys, strict=True):
            layer.context.submit(
                norm.name, [(norm.weight_usage, partial(_weight_gradient, norm, n, dy))], ctx.microbatch
            )
        return (*found, None)


def _weight_gradient(norm: CutNorm, normed_BSC: Tensor, dy_BSC: Tensor) -> Contribution:
    return norm.token_sums(normed_BSC * dy_BSC)
