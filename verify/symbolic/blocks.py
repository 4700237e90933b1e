"""Embedding, transformer layer and head as sequences of layers, forward and backward, on expressions;
see `symbolic_layers`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...core.layout.stages import StageLayers
from ...core.model.blocks import layer_prefix, stage_blocks
from ...core.model.model import ModelSpec
from ...core.model.operators import layer_operators
from ...core.model.parameters import Parameter, layer_parameters
from ...core.model.roles import Role
from ...core.plan.plan import Plan
from ...core.program import Op, Operations, recomputed_modules, recomputes_whole
from .attention import GroupedAttention, LatentAttention
from .ends import embedding, head, multi_token
from .expressions import Expression, symbol
from .layers import Difference, Phase, Ranks, named
from .mlp import DenseMlp, SparseMlp
from .parts import Gradients, mapped, norm_gradients, normed, residual
from .tensors import Part

Works = Sequence[Sequence[Op]]
"""Of every tensor-parallel rank, the works of one block."""


@dataclass(frozen=True)
class Block:
    """A part of a stage: its name as findings show it, the prefix of its layers' names, and the index of a transformer
    layer, or of a module of multi-token prediction."""

    name: str
    prefix: str
    layer: int | None = None
    depth: int | None = None


EMBEDDING, HEAD = Block("embedding", "embedding."), Block("head", "head.")


def blocks_of(model: ModelSpec, stage: StageLayers) -> Iterator[Block]:
    """The blocks of a stage in forward order; a module of multi-token prediction is one with its use of the head."""
    depths = itertools.count()
    for block in stage_blocks(model, stage.layers, embedding=stage.embedding, head=stage.head):
        match block.kind:
            case "embedding":
                yield EMBEDDING
            case "layer":
                yield Block(block.prefix, f"{block.prefix}.", block.layer)
            case "prediction":
                yield Block(block.prefix, f"{block.prefix}.", depth=next(depths))
            case "head" if not block.prefix:
                yield HEAD


def run_block(
    plan: Plan, block: Block, works: Works, reference: dict[tuple[Phase, str], Expression] | None
) -> tuple[Ranks, Gradients]:
    """Forward and backward of a block on all tensor-parallel ranks. Without a reference this is the one
    device, and makes it."""
    ranks = Ranks(plan, reference)
    if block is EMBEDDING:
        return ranks, embedding(ranks, works)
    if block is HEAD:
        return ranks, head(ranks, works)
    if block.depth is not None:
        return ranks, multi_token(ranks, works, block.depth, block.prefix)
    assert block.layer is not None
    layer = _TransformerLayer(ranks, block.layer, works)
    gradients = layer.run()
    known = {f"{block.prefix}{name}" for name in layer.layers}
    if plan.recompute.distribute:
        known.add(block.name)
    if reference is not None and (strange := {work.layer for work in works[0]} - known):
        ranks.differences.append(Difference("forward", sorted(strange)[0], "value", 0, "one device has no such layer"))
    return ranks, gradients


class _TransformerLayer:
    """Attention and MLP, each added to its input, between the norms that the model has; in a parallel block with one
    norm for both."""

    def __init__(self, ranks: Ranks, layer: int, works: Works):
        self.ranks = ranks
        self.prefix, self.parallel = f"{layer_prefix(layer)}.", ranks.plan.model.parallel_block
        self.recomputed_whole = recomputes_whole(ranks.plan, layer)
        self.parameters = {
            parameter.name.removeprefix(self.prefix): parameter
            for parameter in layer_parameters(ranks.plan.model, layer)
        }
        self.forward_of, self.back_of, self.weight_of, self.again_of = (
            named(self.prefix, works, what) for what in ("forward", "input_gradient", "weight_gradient", "recomputed")
        )
        roles = {operator.role for operator in layer_operators(ranks.plan.model, layer)}
        mlp = SparseMlp if Role.ROUTER in roles else DenseMlp
        self.mlp = mlp(ranks, self.prefix, self.parameters, self._phase_operations)
        kind = GroupedAttention if Role.QKV in roles else LatentAttention
        self.attention = kind(ranks, self.prefix, self.parameters, self._phase_operations)

    def run(self) -> Gradients:
        """Everything a microbatch does in this layer."""
        x = self.ranks.hidden(symbol("x"))
        saved = self._forward(x, "forward")
        if self.recomputed_whole:
            saved = self._forward(self._input_again(x), "recomputation")
        modules = recomputed_modules(self.ranks.plan)
        self.attention.repeat(modules)
        self.mlp.repeat(modules)
        return self._backward(x, saved, self.ranks.hidden(symbol("dy")))

    def _input_again(self, x: list[Part]) -> list[Part]:
        """The input from the even parts of it that the ranks keep, where the plan distributes it."""
        if not self.ranks.plan.recompute.distribute:
            return x
        size, name = self.ranks.tp, self.prefix.removesuffix(".")
        own = [replace(part, elements=(tp_rank, size)) if size > 1 else part for tp_rank, part in enumerate(x)]
        _, again = self.ranks.walk(self.again_of(name), own, [])
        return self.ranks.settle("recomputation", name, again, x)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that have operations."""
        return (*self.attention.layers, *self.mlp.layers)

    def _phase_operations(self, name: str, what: str) -> list[Operations]:
        names = {
            "forward": self.forward_of,
            "recomputed": self.again_of,
            "input_gradient": self.back_of,
            "weight_gradient": self.weight_of,
        }
        return names[what](name)

    def _forward(self, x: list[Part], phase: Phase) -> dict[str, list[Part]]:
        saved = {"attention.norm": self._normed("attention.norm", x)}
        saved["attention"] = self.attention.forward(saved["attention.norm"], phase)
        saved["middle"] = self._added(x, "attention", saved["attention"])
        saved["mlp.norm"] = saved["attention.norm"] if self.parallel else self._normed("mlp.norm", saved["middle"])
        saved["mlp"] = self.mlp.forward(saved["mlp.norm"], phase)
        saved["output"] = self._added(saved["middle"], "mlp", saved["mlp"])
        return saved

    def _backward(self, x: list[Part], saved: dict[str, list[Part]], dy: list[Part]) -> Gradients:
        gradients: Gradients = {}
        dnorm = self.mlp.backward(self._normed_back("mlp.post_norm", self._multiplied(dy), saved["mlp"], gradients))
        gradients.update(self.mlp.gradients)
        if self.parallel:
            dnorm = residual(dnorm, self.attention.backward(self._multiplied(dy)))
        else:
            dy = residual(dy, self._normed_back("mlp.norm", dnorm, saved["middle"], gradients))
            dattended = self._multiplied(dy)
            dnorm = self.attention.backward(
                self._normed_back("attention.post_norm", dattended, saved["attention"], gradients)
            )
        gradients.update(self.attention.gradients)
        self._normed_back("attention.norm", dnorm, x, gradients)
        return gradients

    def _added(self, x: list[Part], half: str, y: list[Part]) -> list[Part]:
        """The residual stream with what a half of the layer makes."""
        return residual(x, self._multiplied(self._normed(f"{half}.post_norm", y)))

    def _multiplied(self, y: list[Part]) -> list[Part]:
        """Times the model's factor: what is added to the residual stream, or its gradient."""
        return mapped("residual factor", y) if self.ranks.plan.model.residual_multiplier != 1 else y

    def _normed(self, name: str, x: list[Part]) -> list[Part]:
        """Through a norm, where the layer has it."""
        parameters = self._norm(name)
        return normed(parameters, x) if parameters else x

    def _normed_back(self, name: str, dy: list[Part], x: list[Part], gradients: Gradients) -> list[Part]:
        """The gradient of what went into a norm that the layer may have; those of its weights go to `gradients`."""
        parameters = self._norm(name)
        if not parameters:
            return dy
        gradients.update(norm_gradients(self.ranks, parameters, dy, x))
        return mapped("norm gradient", dy, x)

    def _norm(self, name: str) -> list[Parameter]:
        found = (self.parameters.get(f"{name}.{part}") for part in ("weight", "bias"))
        return [each for each in found if each is not None]
