"""The blocks of a model in the order of its forward: embedding, transformer layers, modules of multi-token prediction,
head. Each lies on one stage whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .model import ModelSpec
from .operators import Operator, embedding_operators, head_operators, layer_operators, prediction_operators
from .roles import Role


@dataclass(frozen=True)
class Block:
    """`operators` are named behind `prefix`; `layer` is the number of a transformer layer.

    A module of multi-token prediction is a `prediction`, a layer that is numbered after the model's own, and a `head`.
    """

    kind: Literal["embedding", "layer", "prediction", "head"]
    prefix: str
    operators: tuple[Operator, ...]
    layer: int = -1


def layer_prefix(layer: int) -> str:
    """`layers.3` for the names of a transformer layer's parameters and operations."""
    return f"layers.{layer}"


def mtp_prefix(depth: int) -> str:
    """`mtp.0` for the names of a multi-token-prediction module's parameters and operations, but for
    its transformer layer's."""
    return f"mtp.{depth}"


def stage_blocks(model: ModelSpec, layers: range, *, embedding: bool, head: bool) -> tuple[Block, ...]:
    """Those of a stage that has so many of the layers; the head brings multi-token prediction with it."""
    first = (embedding_block(model),) if embedding else ()
    last = (*prediction_blocks(model), head_block(model)) if head else ()
    return (*first, *layer_blocks(model)[layers.start : layers.stop], *last)


@lru_cache(maxsize=256)
def model_blocks(model: ModelSpec) -> tuple[Block, ...]:
    """All of them."""
    return stage_blocks(model, range(model.num_layers), embedding=True, head=True)


def num_losses(model: ModelSpec) -> int:
    """Losses of a token: that of the next one, and those of what multi-token prediction predicts."""
    return sum(block.kind == "head" for block in model_blocks(model))


@lru_cache(maxsize=256)
def embedding_block(model: ModelSpec) -> Block:
    """The first."""
    return Block("embedding", "", embedding_operators(model))


@lru_cache(maxsize=256)
def layer_blocks(model: ModelSpec) -> tuple[Block, ...]:
    """The transformer layers."""
    return tuple(_layer(model, layer) for layer in range(model.num_layers))


@lru_cache(maxsize=256)
def prediction_blocks(model: ModelSpec) -> tuple[Block, ...]:
    """The modules of multi-token prediction, each with its layer and its use of the output head."""
    found: list[Block] = []
    for depth in range(model.num_mtp_layers):
        prefix = mtp_prefix(depth)
        found.append(Block("prediction", prefix, prediction_operators(model)))
        found.append(_layer(model, model.num_layers + depth))
        found.append(Block("head", prefix, head_operators(model, Role.OUTPUT_NORM, shared=True)))
    return tuple(found)


@lru_cache(maxsize=256)
def head_block(model: ModelSpec) -> Block:
    """The last."""
    return Block("head", "", head_operators(model, Role.HEAD_NORM, shared=model.tied_embeddings))


def _layer(model: ModelSpec, layer: int) -> Block:
    return Block("layer", layer_prefix(layer), layer_operators(model, layer), layer)
