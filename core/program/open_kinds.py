"""What the sum of a gradient over a sequence is made of, where context parallelism cuts sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..layout.stage_parameters import Usage
from ..model.blocks import num_losses
from ..model.parameters import TABLES

if TYPE_CHECKING:
    from ..plan.plan import Plan

OpenKind = Literal["blocks", "tokens", "heads", "whole"]
OPEN_KINDS: tuple[OpenKind, ...] = ("blocks", "tokens", "heads", "whole")
"""What a gradient's sum over a sequence is made of: token blocks, the finer ones of norms and biases, those of every
head; whole are gradients that every context-parallel rank has, because it knows the whole sequence. In the order in
which they lie in the flat vector."""


def open_kind(plan: Plan, usage: Usage) -> tuple[int, int]:
    """The kind, by its place in `OPEN_KINDS`, and how many uses of the parameter leave a sum open:
    gradients lie in this order."""
    kind, uses = _kind(plan, usage)
    return OPEN_KINDS.index(kind), uses


def _kind(plan: Plan, usage: Usage) -> tuple[OpenKind, int]:
    name, heads = usage.parameter.name, num_losses(plan.model)
    if name in TABLES:
        return ("blocks", heads) if usage.role == "output" and plan.model.tied_embeddings else ("whole", 0)
    if name == "head.output.weight":
        return "blocks", heads
    if len(usage.parameter.shape) > 1:
        return "blocks", 1
    return ("heads", 1) if ".query_norm." in name or ".key_norm." in name else ("tokens", 1)
