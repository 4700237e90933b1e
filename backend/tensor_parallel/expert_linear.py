"""The two linear layers of all experts on a rank, over rows that are copies of tokens (`exchange`), grouped by expert.

`ExpertUp` cuts its output features over `etp`, `ExpertDown` its input features, as the column- and row-parallel
linears do over `tp`. A rank's own rows are those that came to it over `ep`; inside, the rows of all members of
`etp` are together and in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout.stage_parameters import Usage
from ..gradients.parameter import Shard
from ..numerics.contributions import ExpertContribution
from .context import LayerContext
from .exchange import Exchange


class ExpertLinear(nn.Module):
    """What both share: the three products, recorded under the layer's name with the mean number
    of rows of an expert."""

    def __init__(self, context: LayerContext, name: str):
        super().__init__()
        self.name = name
        self.context = context
        self.leaves = context.owned_leaves(f"{name}.weight")
        self.shard, self.usage = context.shard(f"{name}.weight")
        self.bias: Shard | None
        self.bias_usage: Usage | None
        self.bias, self.bias_usage = context.shard(f"{name}.bias") if context.has(f"{name}.bias") else (None, None)

    def gather_features(self, rows_NF: Tensor, exchange: Exchange, layer: str) -> Tensor:
        """All members' rows in order, from this rank's own; sent for `layer`."""
        with self.context.recorder.layer(layer):
            return exchange.gather_features(rows_NF)

    def project(self, x_NF: Tensor, exchange: Exchange) -> Tensor:
        """Whole features to this rank's part of the cut ones."""
        experts, cut_size, full_size = self.shard.storage.shape
        self._record(_mean(x_NF, experts), cut_size, full_size)
        return self.context.numerics.project_experts(x_NF, self.shard.operand, exchange.rows, self.leaves)

    def contract(self, x_NC: Tensor, exchange: Exchange, layer: str) -> Tensor:
        """This rank's part of the cut features to whole ones, summed over `etp` for `layer`, of
        this rank's own rows."""
        experts, cut_size, full_size = self.shard.storage.shape
        self._record(_mean(x_NC, experts), full_size, cut_size)
        numerics, etp = self.context.numerics, exchange.groups.etp
        values = numerics.contract_experts(x_NC, self.shard.operand, exchange.rows, self.leaves)[:, exchange.inverse]
        with self.context.recorder.layer(layer):
            if etp.size == 1:
                return values[0].to(x_NC.dtype)
            return numerics.sum_members_part(values, self.leaves.summands, etp, 0, exchange.member_rows).to(x_NC.dtype)

    def weight_gradient(self, x_NC: Tensor, y_NF: Tensor, exchange: Exchange) -> ExpertContribution:
        """The contribution of one microbatch, in storage orientation."""
        experts, cut_size, full_size = self.shard.storage.shape
        self._record(cut_size, full_size, _mean(x_NC, experts))
        return self.context.numerics.expert_weight_gradient(x_NC, y_NF, exchange.rows, self.leaves)

    def submit(
        self, ctx: Any, weight: Callable[[], ExpertContribution], bias: Callable[[], ExpertContribution]
    ) -> None:
        """Leaves the gradients of weight and bias to the stage."""
        work = [(self.usage, weight)]
        if self.bias_usage is not None:
            work.append((self.bias_usage, bias))
        self.context.submit(self.name, work, ctx.microbatch)

    def _record(self, m: int, n: int, k: int) -> None:
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(m, n, k, len(self.shard.storage), grouped=True)


class ExpertUp(ExpertLinear):
    """[own rows, h] -> [n, c]: the rows of all members of `etp`, each rank its own features. `layer`
    brings them together."""

    def forward(self, rows_NH: Tensor, exchange: Exchange, layer: str) -> Tensor:
        return _Up.apply(rows_NH, self, exchange, layer)


class ExpertDown(ExpertLinear):
    """[n, c] -> [own rows, h]: each rank its own input features, summed over `etp` for `layer`."""

    def forward(self, x_NC: Tensor, exchange: Exchange, layer: str) -> Tensor:
        return _Down.apply(x_NC, self, exchange, layer, self.context.source_of(x_NC))


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, linear: ExpertUp, exchange: Exchange, layer: str) -> Tensor:
        x_NH = linear.gather_features(rows_NH, exchange, layer)
        ctx.linear, ctx.exchange, ctx.layer, ctx.microbatch = linear, exchange, layer, linear.context.microbatch
        ctx.save_for_backward(x_NH)
        y_NC = linear.project(x_NH, exchange)
        return y_NC if linear.bias is None else _biased(y_NC, linear.bias.operand, exchange.experts)

    @staticmethod
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor, None, None, None]:
        (x_NH,), linear, exchange, dy_NC = ctx.saved_tensors, ctx.linear, ctx.exchange, dy_NC.contiguous()
        drows_NH = linear.contract(dy_NC, exchange, ctx.layer)
        sums = linear.context.numerics.expert_row_sums
        linear.submit(ctx, lambda: linear.weight_gradient(dy_NC, x_NH, exchange), lambda: sums(dy_NC, exchange.rows))
        return drows_NH, None, None, None


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, linear: ExpertDown, exchange: Exchange, layer: str, source: Callable[[], Tensor] | None
    ) -> Tensor:
        ctx.linear, ctx.exchange, ctx.layer, ctx.microbatch = linear, exchange, layer, linear.context.microbatch
        ctx.source = source
        ctx.save_for_backward(*([x_NC] if source is None else []))
        rows_NH = linear.contract(x_NC, exchange, layer)
        return rows_NH if linear.bias is None else _biased(rows_NH, linear.bias.operand, exchange.own_experts)

    @staticmethod
    def backward(ctx: Any, drows_NH: Tensor) -> tuple[Tensor, None, None, None, None]:
        linear, exchange = ctx.linear, ctx.exchange
        x_NC = ctx.saved_tensors[0] if ctx.source is None else ctx.source()
        dy_NH = linear.gather_features(drows_NH.contiguous(), exchange, ctx.layer)
        dx_NC = linear.project(dy_NH, exchange)
        sums = linear.context.numerics.expert_row_sums
        linear.submit(ctx, lambda: linear.weight_gradient(x_NC, dy_NH, exchange), lambda: sums(dy_NH, exchange.rows))
        return dx_NC, None, None, None, None


def _biased(y_NF: Tensor, bias_EF: Tensor, experts_N: Tensor) -> Tensor:
    return y_NF.add_(bias_EF[experts_N])


def _mean(rows: Tensor, num_experts: int) -> int:
    return -(-len(rows) // num_experts)
