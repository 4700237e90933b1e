"""Linear layers cut over tensor parallelism: `ColumnParallelLinear` cuts its output features,
`RowParallelLinear` its input features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.layout.stage_parameters import Usage
from ..base.autograd import Function
from ..gradients.parameter import Shard
from ..numerics import Contribution
from . import mappings
from .context import LayerContext

Source = Callable[[], Tensor]
"""What computes a tensor again (`LayerContext.can_repeat`)."""


class ParallelLinear(nn.Module, ABC):
    """What both kinds share: the three products (see `numerics.base`), recorded under the layer's name.

    With sequence parallelism a whole-feature side has this rank's tokens outside of the layer, and all of them inside.

    `weight` and `bias` name the parameters; the bias is left out where the model has none. `frozen` weights get no
    gradient and no update, and the layer keeps no input.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        weight: str | None = None,
        role: Literal["", "embedding", "output"] = "",
        frozen: bool = False,
    ):
        super().__init__()
        weight = weight or f"{name}.weight"
        self.name = name
        self.context = context
        self.leaves = context.owned_leaves(weight)
        self.shard, self.usage = context.shard(weight, role, frozen=frozen)
        self.bias: Shard | None
        self.bias_usage: Usage | None
        self.bias, self.bias_usage = (
            context.shard(f"{name}.bias", frozen=frozen) if context.has(f"{name}.bias") else (None, None)
        )
        own = [each.parameter.name for each in (self.shard, self.bias) if each is not None]
        self.frozen = context.frozen.issuperset(own)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The product and the bias."""

    @abstractmethod
    def apart(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias expanded to its shape for whoever adds it later; None where there is none."""

    @abstractmethod
    def bias_gradient(self, dy: Tensor) -> Contribution:
        """The contribution of one microbatch."""

    @property
    def feature_sizes(self) -> tuple[int, ...]:
        """How many of the cut features every rank has."""
        parts = (self.leaves.leaves.owned_items(self.leaves.tp, tp_rank) for tp_rank in range(self.leaves.tp))
        return tuple((hi - lo) * self.leaves.unit for lo, hi in parts)

    def gather(self, x_BSF: Tensor) -> Tensor:
        """All tokens of the whole-feature side."""
        if self.context.tokens is None:
            return x_BSF
        with self.context.recorder.layer(self.name):
            return self.context.gather(x_BSF)

    def project(self, x_BSF: Tensor) -> Tensor:
        """[b, s, f] of all tokens -> [b, s, c]: whole features to this rank's part of the cut ones."""
        cut_size, full_size = self.shard.storage.shape
        self.record_product(_tokens(x_BSF), cut_size, full_size)
        return self.context.numerics.project(x_BSF, self.shard.operand, self.leaves)

    def contract(self, x_BSC: Tensor) -> Tensor:
        """[b, s, c] -> [b, s, f]: summed over all ranks' parts; this rank's tokens of it."""
        context = self.context
        if context.tp.size > 1:
            return self.finish_contract(self.partial_contract(x_BSC), x_BSC.dtype)
        cut_size, full_size = self.shard.storage.shape
        self.record_product(_tokens(x_BSC), full_size, cut_size)
        return context.numerics.contract(x_BSC, self.shard.operand, self.leaves, context.tp, context.tokens)

    def partial_contract(self, x_BSC: Tensor) -> Tensor:
        """The product of `contract`: what this rank brings to the sum, [n, b, s, f]."""
        cut_size, full_size = self.shard.storage.shape
        self.record_product(_tokens(x_BSC), full_size, cut_size)
        return self.context.numerics.partial_contract(x_BSC, self.shard.operand, self.leaves)

    def record_product(self, m: int, n: int, k: int) -> None:
        """Reports to the recorder, if there is one, a product [m, k] x [k, n] of this layer."""
        recorder = self.context.recorder
        if recorder.enabled:
            with recorder.layer(self.name):
                recorder.product(m, n, k)

    def finish_contract(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of `contract`."""
        context = self.context
        with context.recorder.layer(self.name):
            return context.numerics.finish_contract(partial, self.leaves, context.tp, context.tokens, dtype)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor) -> Contribution:
        """The contribution of one microbatch, in storage orientation."""
        cut_size, full_size = self.shard.storage.shape
        self.context.recorder.product(cut_size, full_size, _tokens(x_BSC))
        return self.context.numerics.weight_gradient(x_BSC, y_BSF, self.leaves)

    def submit(self, ctx: Any, weight: Callable[[], Contribution], dy: Tensor) -> None:
        """Leaves the gradient of the weight to the stage, and that of a bias that the layer has added
        itself, from the output's."""
        if self.frozen:
            return
        work = [(self.usage, weight)]
        if self.bias_usage is not None and ctx.add_bias:
            work.append((self.bias_usage, lambda: self.bias_gradient(dy)))
        self.context.submit(self.name, work, ctx.microbatch)

    def _bias_of(self, y: Tensor) -> Tensor | None:
        return None if self.bias is None else _Bias.apply(self.context.anchor(), self, y.shape)


class ColumnParallelLinear(ParallelLinear):
    """[b, s, f] -> [b, s, c], the same input on every rank, each rank its own output features.

    With `gather_output` every rank gets all of them, of the tokens it holds between the cut layers.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        weight: str | None = None,
        role: Literal["", "embedding", "output"] = "",
        frozen: bool = False,
        gather_output: bool = False,
    ):
        super().__init__(context, name, weight=weight, role=role, frozen=frozen)
        self.gather_output = gather_output

    def forward(self, x_BSF: Tensor) -> Tensor:
        return self._gathered(self._column(x_BSF, add_bias=True))

    def apart(self, x_BSF: Tensor) -> tuple[Tensor, Tensor | None]:
        y_BSC = self._column(x_BSF, add_bias=False)
        bias_BSC = self._bias_of(y_BSC)
        return self._gathered(y_BSC), None if bias_BSC is None else self._gathered(bias_BSC)

    def bias_gradient(self, dy: Tensor) -> Contribution:
        return self.context.numerics.token_sums(dy)

    def _column(self, x_BSF: Tensor, *, add_bias: bool) -> Tensor:
        return _Column.apply(x_BSF, self, self.context.source_of(x_BSF), add_bias)

    def _gathered(self, y_BSC: Tensor) -> Tensor:
        """Own features of all tokens -> all features of own tokens."""
        if not self.gather_output:
            return y_BSC
        tp, tokens = self.context.tp, self.context.tokens
        with self.context.recorder.layer(self.name):
            if tokens is None:
                return mappings.gather(y_BSC, tp, dim=2, sizes=self.feature_sizes)
            return mappings.hidden_to_sequence(y_BSC, tp, sequence_sizes=tokens.sizes, hidden_sizes=self.feature_sizes)


class RowParallelLinear(ParallelLinear):
    """[b, s, c] -> [b, s, f], each rank its own input features, the same output on every rank.

    Without `input_is_parallel` every rank brings all input features, of the tokens it holds between the cut layers.
    """

    def __init__(self, context: LayerContext, name: str, *, frozen: bool = False, input_is_parallel: bool = True):
        super().__init__(context, name, frozen=frozen)
        self.input_is_parallel = input_is_parallel

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self._row(x_BSC, add_bias=True)

    def apart(self, x_BSC: Tensor) -> tuple[Tensor, Tensor | None]:
        y_BSF = self._row(x_BSC, add_bias=False)
        return y_BSF, self._bias_of(y_BSF)

    def bias_gradient(self, dy: Tensor) -> Contribution:
        return self.context.numerics.token_sums(dy, self.context.tokens)

    def _row(self, x_BSC: Tensor, *, add_bias: bool) -> Tensor:
        x_BSC = x_BSC if self.input_is_parallel else self._own_features(x_BSC)
        return _Row.apply(x_BSC, self, self.context.source_of(x_BSC), add_bias)

    def _own_features(self, x_BSC: Tensor) -> Tensor:
        """All features of own tokens -> own features of all tokens."""
        tp, tokens = self.context.tp, self.context.tokens
        with self.context.recorder.layer(self.name):
            if tokens is None:
                return mappings.scatter(x_BSC, tp, dim=2, sizes=self.feature_sizes)
            return mappings.sequence_to_hidden(x_BSC, tp, sequence_sizes=tokens.sizes, hidden_sizes=self.feature_sizes)


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, layer: ColumnParallelLinear, source: Source | None, add_bias: bool) -> Tensor:
        _keep(ctx, x_BSF, layer, source, add_bias)
        y_BSC = layer.project(layer.gather(x_BSF))
        return y_BSC.add_(layer.bias.operand) if add_bias and layer.bias is not None else y_BSC

    @staticmethod
    def backward(ctx: Any, dy_BSC: Tensor) -> tuple[Tensor, None, None, None]:
        dy_BSC = dy_BSC.contiguous()
        return column_backward(ctx, dy_BSC), None, None, None


def column_backward(
    ctx: Any,
    dy_BSC: Tensor,
    product: Callable[[], Tensor] | None = None,
    weight_gradient: Callable[[Tensor, Tensor], Contribution] | None = None,
) -> Tensor:
    """The input gradient of a column-parallel layer, the sum over ranks of what `product` brings to it; weight and bias
    get theirs. `product` and `weight_gradient` are the layer's own unless given.

    Where the plan overlaps them, the input is gathered during the product, and the sum is taken during the product of
    the weight gradient (Megatron-Core's `LinearWithGradAccumulationAndAsyncCommunication`).
    """
    layer, context = ctx.layer, ctx.layer.context
    weight_gradient = weight_gradient or layer.weight_gradient

    def contracted() -> Tensor:
        return layer.contract(dy_BSC) if product is None else layer.finish_contract(product(), dy_BSC.dtype)

    if layer.frozen:
        return contracted()
    x_BSF, lane = _saved_input(ctx), context.lane
    if lane is None or context.weight_work.deferring:
        dx_BSF = contracted()
        layer.submit(ctx, lambda: weight_gradient(dy_BSC, layer.gather(x_BSF)), dy_BSC)
        return dx_BSF
    gathered = lane.start(lambda: layer.gather(x_BSF), x_BSF) if context.tokens is not None else lambda: x_BSF
    partial = layer.partial_contract(dy_BSC) if product is None else product()
    all_x_BSF = gathered()
    summed = lane.start(lambda: layer.finish_contract(partial, dy_BSC.dtype), partial)
    layer.submit(ctx, lambda: weight_gradient(dy_BSC, all_x_BSF), dy_BSC)
    return summed()


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, layer: RowParallelLinear, source: Source | None, add_bias: bool) -> Tensor:
        _keep(ctx, x_BSC, layer, source, add_bias)
        y_BSF = layer.contract(x_BSC)
        return y_BSF.add_(layer.bias.operand) if add_bias and layer.bias is not None else y_BSF

    @staticmethod
    def backward(ctx: Any, dy_BSF: Tensor) -> tuple[Tensor, None, None, None]:
        layer, own_dy_BSF = ctx.layer, dy_BSF.contiguous()
        dy_BSF = layer.gather(own_dy_BSF)
        dx_BSC = layer.project(dy_BSF)
        if not layer.frozen:
            x_BSC = _saved_input(ctx)
            layer.submit(ctx, lambda: layer.weight_gradient(x_BSC, dy_BSF), own_dy_BSF)
        return dx_BSC, None, None, None


class _Bias(Function):
    """A layer's bias as large as what it is to be added to; its gradient goes the way of all weight gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layer: ParallelLinear, shape: torch.Size) -> Tensor:
        assert layer.bias is not None
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        return layer.bias.operand.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        layer, dy = ctx.layer, dy.contiguous()
        if not layer.frozen:
            layer.context.submit(layer.name, [(layer.bias_usage, lambda: layer.bias_gradient(dy))], ctx.microbatch)
        return None, None, None


def _keep(ctx: Any, x: Tensor, layer: ParallelLinear, source: Source | None, add_bias: bool) -> None:
    """What the backward of a product needs: its input, or what makes it again; a frozen layer neither."""
    ctx.layer, ctx.microbatch, ctx.source, ctx.add_bias = layer, layer.context.microbatch, source, add_bias
    ctx.save_for_backward(*([] if layer.frozen or source is not None else [x]))


def _saved_input(ctx: Any) -> Tensor:
    return ctx.saved_tensors[0] if ctx.source is None else ctx.source()


def _tokens(x_BSN: Tensor) -> int:
    return x_BSN.shape[0] * x_BSN.shape[1]
