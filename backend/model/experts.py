"""Mixture of experts in the place of an MLP: a router, experts that see copies of the tokens it sends
them, and shared experts.

Shape suffixes: B samples, S tokens that this rank holds, T those of them that it sends (all b*s, flat), K
experts of a token, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.model.blocks import layer_prefix
from ...core.plan.plan import Plan
from ..numerics import Numerics
from ..tensor_parallel import LayerContext, WholeLinear, recomputed
from ..tensor_parallel.exchange import Exchange, Outgoing, TokenExchange
from ..tensor_parallel.expert_linear import ExpertDown, ExpertUp
from ..tensor_parallel.mappings import gather, scatter
from .mlp import MLP, activated
from .router import Router, Routing


class MoE(nn.Module):
    """[b, s, h] -> [b, s, h]: the weighted results of each token's experts, plus those of the shared experts,
    which every token takes."""

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        self.name = prefix = f"{layer_prefix(layer)}.mlp"
        self.context = context
        self.router = Router(context, layer)
        self.experts = Experts(context, prefix)
        modules = context.recomputed_modules
        self.recomputed = "moe" in modules
        again = "shared_experts" in modules and not self.recomputed
        self.shared = MLP(context, f"{prefix}.shared", recomputed=again) if context.model.num_shared_experts else None
        self.gate = WholeLinear(context, f"{prefix}.shared.gate") if context.model.shared_expert_gate else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.recomputed:
            return self._forward(x_BSH)
        return recomputed(self.context, self._forward, x_BSH, name=self.name)

    def _forward(self, x_BSH: Tensor) -> Tensor:
        routed, sent, *shared = self._uses(x_BSH, 2 + (self.shared is not None) + (self.gate is not None))
        y_BSH = self.experts(sent, self.router(routed))
        if self.shared is None:
            return y_BSH
        return y_BSH + self.context.part(f"{self.name}.shared", self._shared, *shared)

    def _shared(self, x_BSH: Tensor, gated_BSH: Tensor | None = None) -> Tensor:
        """The shared experts of `x`, weighed by a gate of the same where there is one."""
        assert self.shared is not None
        y_BSH: Tensor = self.shared(x_BSH)
        if self.gate is None:
            return y_BSH
        numerics = self.context.numerics
        return _Weighed.apply(y_BSH, numerics.elementwise(torch.sigmoid, self.gate(gated_BSH)), numerics)

    def _uses(self, x_BSH: Tensor, number: int) -> tuple[Tensor, ...]:
        """`x` for its uses, whose gradients are added in this order."""
        uses = _Uses.apply(x_BSH, number)
        source = self.context.source_of(x_BSH)
        return uses if source is None else tuple(self.context.can_repeat(use, source) for use in uses)


class Experts(nn.Module):
    """Hidden states [b, s, h] and their `Routing` -> the sum of each token's experts, in ascending order, fp32
    until it is rounded once.

    Without sequence parallelism each tensor-parallel rank sends its part of the tokens that all hold, and
    the results are gathered.
    """

    def __init__(self, context: LayerContext, prefix: str):
        super().__init__()
        self.context = context
        self.dispatch_name, self.combine_name = f"{prefix}.dispatch", f"{prefix}.combine"
        self.exchange = TokenExchange(context.plan, context.experts, context.numerics.device)
        self.up = ExpertUp(context, f"{prefix}.experts.up")
        self.down = ExpertDown(context, f"{prefix}.experts.down")

    def begin_batches_of(self, plan: Plan) -> None:
        """From here on tokens come from ranks with the samples that `plan` gives them."""
        self.exchange = TokenExchange(plan, self.context.experts, self.context.numerics.device)

    def forward(self, x_BSH: Tensor, routing: Routing) -> Tensor:
        context, experts_BSK, weights_BSK = self.context, routing.experts_BSK, routing.weights_BSK
        recorder, sizes = context.recorder, self.exchange.token_sizes
        cut = context.tokens is None and context.tp.size > 1
        if cut:
            first = sum(sizes[: context.tp.rank])
            experts_BSK = experts_BSK[:, first : first + sizes[context.tp.rank]]
            with recorder.layer(self.dispatch_name):
                x_BSH = scatter(x_BSH, context.tp, dim=1, sizes=sizes)
            with recorder.layer(self.combine_name):
                weights_BSK = scatter(weights_BSK, context.tp, dim=1, sizes=sizes)
        y_BSH = self._own_tokens(x_BSH, experts_BSK, weights_BSK)
        if not cut:
            return y_BSH
        with recorder.layer(self.combine_name):
            return gather(y_BSH, context.tp, dim=1, sizes=sizes)

    def _own_tokens(self, x_BSH: Tensor, experts_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
        context, microbatch = self.context, self.context.microbatch
        assert microbatch is not None
        with context.recorder.layer(self.dispatch_name):
            exchange = self.exchange.exchange(experts_BSK, microbatch.first_sample)
            copies = _Copies.apply(x_BSH.flatten(0, 1), exchange.outgoing)
            rows = _Exchanged.apply(copies, exchange, self, True)
        up = self.up(rows, exchange, self.dispatch_name)
        units = activated(
            context, up, again=f"{self.up.name}.activation" if "moe_act" in context.recomputed_modules else None
        )
        results = _Exchanged.apply(self.down(units, exchange, self.combine_name), exchange, self, False)
        if context.numerics.observer is not None:
            context.numerics.observer.returned(exchange, weights_BSK.flatten(0, 1))
        y_TH = _Combined.apply(results, weights_BSK.flatten(0, 1), exchange.outgoing, context)
        return y_TH.view_as(x_BSH)

    def exchanged(self, rows: Tensor, exchange: Exchange, to_experts: bool, layer: str) -> Tensor:
        """One all-to-all, there or back, recorded for `layer`."""
        with self.context.recorder.layer(layer):
            return exchange.there(rows) if to_experts else exchange.back(rows)


class _Uses(torch.autograd.Function):
    """Several uses of one tensor; the backward adds their gradients one after the other and rounds once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first, *rest = gradients
        total = first.to(torch.float32, copy=True)
        for gradient in rest:
            total.add_(gradient)
        return total.to(first.dtype), None


class _Weighed(torch.autograd.Function):
    """[b, s, h] times one number for each token [b, s, 1], whose gradient is a dot product of rows."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weights_BS1: Tensor, numerics: Numerics) -> Tensor:
        ctx.numerics = numerics
        ctx.save_for_backward(x_BSH, weights_BS1)
        return x_BSH * weights_BS1

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BSH, weights_BS1 = ctx.saved_tensors
        dots = ctx.numerics.row_dots(dy_BSH.flatten(0, 1), x_BSH.flatten(0, 1))
        return dy_BSH * weights_BS1, dots.to(weights_BS1.dtype).view_as(weights_BS1), None


class _Copies(torch.autograd.Function):
    """[t, h] -> a copy of every token for each of its experts; the backward adds a token's copies in ascending
    order of the experts."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, outgoing: Outgoing) -> Tensor:
        ctx.outgoing = outgoing
        return x_TH[outgoing.tokens]

    @staticmethod
    def backward(ctx: Any, dcopies: Tensor) -> tuple[Tensor, None]:
        outgoing: Outgoing = ctx.outgoing
        total = outgoing.pick(dcopies, 0).float()
        for choice in range(1, outgoing.places_TK.shape[1]):
            total.add_(outgoing.pick(dcopies, choice))
        return total.to(dcopies.dtype), None


class _Exchanged(torch.autograd.Function):
    """Rows on the way to their experts or back; gradients go the other way, for the same layer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, experts: Experts, to_experts: bool) -> Tensor:
        layer = experts.dispatch_name if to_experts else experts.combine_name
        ctx.of = exchange, experts, to_experts, layer
        moved = experts.exchanged(rows, exchange, to_experts, layer)
        return moved.view_as(moved)  # without others it is the argument itself

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
        exchange, experts, to_experts, layer = ctx.of
        moved = experts.exchanged(drows, exchange, not to_experts, layer)
        if to_experts and experts.context.numerics.observer is not None:
            experts.context.numerics.observer.returned(exchange, None)
        return moved, None, None, None


class _Combined(torch.autograd.Function):
    """Results of a token's experts times their weights, added in ascending order of the experts."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights_TK: Tensor, outgoing: Outgoing, context: LayerContext) -> Tensor:
        ctx.of = outgoing, context
        ctx.save_for_backward(results, weights_TK)
        total = outgoing.pick(results, 0) * weights_TK[:, :1]
        for choice in range(1, weights_TK.shape[1]):
            total.add_(outgoing.pick(results, choice) * weights_TK[:, choice : choice + 1])
        return total.to(results.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (results, weights_TK), (outgoing, context) = ctx.saved_tensors, ctx.of
        dy_copies = dy_TH[outgoing.tokens]
        # one place more than there are copies, for the choices that were dropped
        weights = weights_TK.new_zeros(len(dy_copies) + 1)
        weights[outgoing.places_TK] = weights_TK
        dots = F.pad(context.numerics.row_dots(dy_copies, results), (0, 1))
        dresults = (dy_copies * weights[:-1].unsqueeze(-1)).to(results.dtype)
        return dresults, dots[outgoing.places_TK], None, None
