"""The parameters that a pipeline stage holds, and the gradient sums that it makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..model.blocks import stage_blocks
from ..model.model import ModelSpec
from ..model.parameters import TOKEN_TABLE, Parameter, block_parameters, token_table
from .stages import StageLayers


@dataclass(frozen=True)
class Usage:
    """One place where a parameter's gradient is summed. `role` is `embedding` or `output` for a
    shared table, else empty.

    A shared table is used at both ends of the model, possibly on two ranks: each end has a sum of its own, and the
    finished sums are added, embedding first. Layers of one stage that use the same parameter (heads of multi-token
    prediction) share a sum, in which they are counted by `use`.
    """

    parameter: Parameter
    role: Literal["", "embedding", "output"] = ""
    use: int = 0

    @cached_property
    def key(self) -> str:
        """`name`, or `name@role` for a tied table."""
        return f"{self.parameter.name}@{self.role}" if self.role else self.parameter.name


def stage_parameters(model: ModelSpec, stage: StageLayers) -> tuple[Parameter, ...]:
    """The parameters a stage holds, in canonical order. A token table that the head or multi-token prediction uses lies
    on the first and on the last stage."""
    blocks = stage_blocks(model, stage.layers, embedding=stage.embedding, head=stage.head)
    found = [parameter for block in blocks for parameter in block_parameters(model, block)]
    if model.shares_table and stage.head and not stage.embedding:
        found.append(token_table(model))
    return tuple(found)


def stage_usages(model: ModelSpec, stage: StageLayers) -> tuple[Usage, ...]:
    """The gradient sums of a stage, in canonical order: one per parameter, two for a shared table used at
    both ends of one stage."""
    usages: list[Usage] = []
    for parameter in stage_parameters(model, stage):
        if model.shares_table and parameter.name == TOKEN_TABLE:
            usages += [Usage(parameter, "embedding")] if stage.embedding else []
            usages += [Usage(parameter, "output")] if stage.head else []
        else:
            usages.append(Usage(parameter))
    return tuple(usages)
