"""What the host still gives to a device where layers are captured graphs."""

from __future__ import annotations

from ...core.model.model import ModelSpec
from ...core.model.parameters import block_parameters
from ...core.program import Group

LAYER_CALLS = 2
"""Launches of a captured layer's forward, or backward: a copy of what comes in, and the graph
(`backend.ranks.graphed_part`, torch.cuda.make_graphed_callables). Counted."""

VECTOR_CALLS = 2
"""The gradient of a norm's weight, or of a bias, is copied out of the graph and added to its sum. Counted."""


def sum_calls(model: ModelSpec, group: Group) -> int:
    """Launches of our backend that add the weight gradients of a microbatch, of one part of a group, to their sums
    after a replay: a product for each matrix, `VECTOR_CALLS` for each vector. Other stacks capture them too."""
    parameters = [parameter for block in group.blocks for parameter in block_parameters(model, block)]
    return sum(1 if len(parameter.shape) > 1 else VECTOR_CALLS for parameter in parameters)
