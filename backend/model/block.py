"""One transformer layer, and what a user's own layer is built from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from ...core.base.errors import PlanError
from ...core.model.blocks import layer_prefix
from ...core.model.model import ModelSpec
from ..numerics import Numerics
from ..numerics.tokens import OwnedTokens
from ..tensor_parallel import (
    ColumnParallelLinear,
    LayerContext,
    Norm,
    RowParallelLinear,
    WholeLinear,
    hidden_dropout,
    recomputed,
    recomputed_layer,
)
from ..transport.base import Group
from .attention import Attention
from .experts import MoE
from .latent_attention import LatentAttention
from .mlp import MLP
from .own_block import check_block

Made = TypeVar("Made", bound=nn.Module)


class BlockContext:
    """The layers a block may be built from, bound to this rank. Names are those of the model's
    parameters without `.weight`.

    A block is any `nn.Module` from [b, s, h] to [b, s, h] whose cut layers, norms, attention and MLP come from
    here: then its gradients, cuts and proofs work as for ours. Between them use elementwise operations only,
    through `elementwise` where they are more than sums and products, so that bits stay independent of the
    layout. What communicates otherwise is built of `backend.tensor_parallel.mappings` over `tp`, the
    tensor-parallel group, with `numerics`; `tokens` says which tokens of each sequence this rank holds between
    cut layers, None all. `made` are the layers made so far, by name: the block holds each of them as a
    submodule, and no parameter besides theirs (`own_block`).
    """

    def __init__(self, layers: LayerContext):
        self._layers = layers
        self.model: ModelSpec = layers.model
        self.tp: Group = layers.tp
        self.numerics: Numerics = layers.numerics
        self.tokens: OwnedTokens | None = layers.tokens
        self.made: dict[nn.Module, str] = {}
        self._is_built = False

    def finish(self) -> None:
        """The block is there: it makes no more layers, because nobody would train them."""
        self._is_built = True

    def _make(self, name: str, made: Made) -> Made:
        if self._is_built:
            raise PlanError(
                f"a block makes {name} while it runs, and nobody would train it. Make all layers where "
                "the block is made."
            )
        self.made[made] = name
        return made

    def norm(self, name: str) -> nn.Module:
        """The model's norm, e.g. `layers.0.mlp.norm`."""
        return self._make(name, Norm(self._layers, name))

    def column_linear(self, name: str, *, gather_output: bool = False, frozen: bool = False) -> ColumnParallelLinear:
        """A linear layer whose output features are cut, e.g. `layers.0.mlp.up`. Parts that are fused into one (gate and
        up-projection) come apart with `backend.tensor_parallel.split_fused`; `frozen` weights are not trained."""
        return self._make(name, ColumnParallelLinear(self._layers, name, gather_output=gather_output, frozen=frozen))

    def row_linear(self, name: str, *, input_is_parallel: bool = True, frozen: bool = False) -> RowParallelLinear:
        """A linear layer whose input features are cut, e.g. `layers.0.mlp.down`; `input_is_parallel=False`
        where they are not yet."""
        return self._make(
            name, RowParallelLinear(self._layers, name, input_is_parallel=input_is_parallel, frozen=frozen)
        )

    def whole_linear(self, name: str) -> WholeLinear:
        """A linear layer that no rank cuts, e.g. `layers.0.attention.kv_down`."""
        return self._make(name, WholeLinear(self._layers, name))

    def attention(self, layer: int) -> nn.Module:
        """The attention of a layer, without its norm."""
        made = (LatentAttention if self.model.is_mla else Attention)(self._layers, layer)
        return self._make(f"{layer_prefix(layer)}.attention", made)

    def mlp(self, layer: int) -> nn.Module:
        """The MLP of a layer, or its router and experts, without its norm."""
        name = f"{layer_prefix(layer)}.mlp"
        if self.model.layer_is_moe(layer):
            return self._make(name, MoE(self._layers, layer))
        return self._make(name, MLP(self._layers, name, recomputed="mlp" in self._layers.recomputed_modules))

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """An elementwise function of a contiguous tensor, with bits that do not depend on its length."""
        return self._layers.numerics.elementwise(function, x)

    def part(self, name: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """`function(*tensors)`, during which the host asks the device for nothing: in a layer with experts, what may
        be captured without them. `name` is its own among all parts of the stage."""
        return self._layers.part(name, function, *tensors)

    def recomputed(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)`, which keeps its inputs only and runs again when its backward comes."""
        return recomputed(self._layers, function, *tensors)

    def dropout(self, operation: str, x_BSH: Tensor) -> Tensor:
        """A hidden state with the model's share of elements dropped in training. Every use needs an `operation`
        name of its own, e.g. `layers.0.mlp`, which with the step and an element's place in the whole tensor says
        whether it is dropped."""
        return hidden_dropout(self._layers, operation, x_BSH)

    def observe(self, name: str, tensor_BSH: Tensor) -> None:
        """Shows a hidden state to whoever compares runs."""
        self._layers.observe(name, tensor_BSH)


BlockFactory = Callable[[BlockContext, int], nn.Module]
"""`block(context, layer)` makes the transformer layer with this global index."""


def make_blocks(layers: LayerContext, factory: BlockFactory, numbers: Iterable[int]) -> list[nn.Module]:
    """The transformer layers of a stage with these global indices. Raises `PlanError` for one that cannot be
    trained (`own_block`)."""
    blocks: list[nn.Module] = []
    earlier: dict[nn.Module, str] = {}
    for layer in numbers:
        context = BlockContext(layers)
        block = factory(context, layer)
        check_block(block, layer, made=context.made, earlier=earlier)
        context.finish()
        earlier |= context.made
        blocks.append(block)
    return blocks


def run_layer(context: LayerContext, layer: int, block: nn.Module, x_BSH: Tensor) -> Tensor:
    """The transformer layer with this global index, computed again in its backward where the plan says so: one part,
    unless it has experts, whose tokens the host counts."""
    run = functools.partial(recomputed_layer, context, layer, block)
    if context.model.layer_is_moe(layer):
        return run(x_BSH)
    made: Tensor = context.part(layer_prefix(layer), run, x_BSH)
    return made


class TransformerBlock(nn.Module):
    """Attention and MLP, each added to its input (GPT-2, Llama), or both to the input of the one norm that they share
    (GPT-J, Falcon). Norms come before them, behind them (OLMo 2) or both (Gemma 2, GLM-4)."""

    def __init__(self, context: BlockContext, layer: int):
        super().__init__()
        self.context = context
        self.prefix = layer_prefix(layer)
        model = context.model
        self.attention_norm = self._norm("attention.norm", model.pre_norms)
        self.attention = context.attention(layer)
        self.attention_post_norm = self._norm("attention.post_norm", model.post_norms)
        self.mlp_norm = self._norm("mlp.norm", model.pre_norms and not model.parallel_block)
        self.mlp = context.mlp(layer)
        self.mlp_post_norm = self._norm("mlp.post_norm", model.post_norms)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH, normed = self.context.part(f"{self.prefix}.attention", self._attend, x_BSH)
        transformed = self.mlp(normed)
        self.context.observe(f"{self.prefix}.mlp", transformed)
        return self._added(x_BSH, "mlp", self._normed(self.mlp_post_norm, "mlp.post_norm", transformed))

    def _attend(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """What the MLP's result is added to, and its input."""
        normed = self._normed(self.attention_norm, "attention.norm", x_BSH)
        attended = self.attention(normed)
        self.context.observe(f"{self.prefix}.attention", attended)
        attended = self._normed(self.attention_post_norm, "attention.post_norm", attended)
        x_BSH = self._added(x_BSH, "attention", attended)
        return x_BSH, normed if self.context.model.parallel_block else self._normed(self.mlp_norm, "mlp.norm", x_BSH)

    def _norm(self, name: str, has: bool) -> nn.Module | None:
        return self.context.norm(f"{self.prefix}.{name}") if has else None

    def _normed(self, norm: nn.Module | None, name: str, x_BSH: Tensor) -> Tensor:
        """`x` through a norm that the model may not have."""
        if norm is None:
            return x_BSH
        normed: Tensor = norm(x_BSH)
        self.context.observe(f"{self.prefix}.{name}", normed)
        return normed

    def _added(self, x_BSH: Tensor, half: str, y_BSH: Tensor) -> Tensor:
        """The residual stream with what a half of the layer makes, times the model's factor."""
        y_BSH, times = self.context.dropout(f"{self.prefix}.{half}", y_BSH), self.context.model.residual_multiplier
        return x_BSH + (y_BSH if times == 1 else y_BSH * times)
