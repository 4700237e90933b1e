"""What our own backend holds beside saved activations: weight gradients before they are summed, and what REDUCE_GRAD and STEP bring.

Weight gradients never pass through autograd (`backend.tensor_parallel.gradients`): each is a tensor of its own, added to the sum of its
parameter at once, or in W, until which a closure per layer holds its input and its output's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..core.parameters import stage_parameters
from ..core.plan import Plan
from ..core.program import local_elements, tied_ends
from .memory_tape import Node
from .memory_tensors import LayerTensors

FP32_BYTES = 4

NORM_BEFORE = ("attention.qkv", "mlp.up")
"""Nodes of a product that bring the norm before it with them: its own weight gradient needs its input and its output's gradient."""

FAST_REDUCE = 2
"""Copies of the gradients that fast numerics hold while they are reduced, beside the sums: flat, and the result."""

EXACT_REDUCE = 4
"""The same of exact numerics (`backend.numerics.tree.sum_over`): flat and by node; beside them cut and arrived, later gathered and the
result."""

SQUARE_BYTES = 16
"""fp64 copy and fp64 square of an element while fast numerics add up squares."""


def own_nodes(nodes: Sequence[Node], tensors: LayerTensors) -> tuple[Node, ...]:
    """A tape with the weight gradients as tensors of their own, and with what W needs of norms, tables and biases."""
    return tuple(_own(node, tensors) for node in nodes)


def _own(node: Node, tensors: LayerTensors) -> Node:
    hidden, row = tensors.hidden, tensors.tokens * tensors.element
    inputs, gradients = node.weight_input_bytes, node.weight_gradient_bytes
    weight = inputs // row * (gradients // row) * FP32_BYTES
    if node.name == "embedding.tokens":
        inputs, gradients = node.saved_bytes, hidden
        weight = (tensors.vocabulary + 1) * tensors.plan.model.hidden_size * FP32_BYTES
    elif node.name in NORM_BEFORE or node.name == "head.norm":
        inputs, gradients = inputs + hidden, gradients + hidden
    return replace(
        node,
        backward_bytes=node.backward_bytes + weight,
        weight_bytes=weight,
        weight_input_bytes=inputs,
        weight_gradient_bytes=gradients,
    )


def own_reduce_bytes(plan: Plan, stage: int, gradients_bytes: int) -> int:
    """What REDUCE_GRAD of a stage holds beside its sums; a stage without copies is not reduced."""
    if plan.num_copies(stage) == 1:
        return 0
    return gradients_bytes * (FAST_REDUCE if plan.numerics.mode == "fast" else EXACT_REDUCE)


def own_step_bytes(plan: Plan, pp_rank: int, stages: Sequence[int], gradients_bytes: int) -> int:
    """The most that STEP of a rank holds beside `gradients_bytes` of sums.

    First the divided gradients come while the sums are still there, and a tied table's two sums are put together (exchanged where they
    lie on two ranks). When the sums are gone the largest tensor's squares are added up; then the clipped gradients come and the
    root and quotient of one tensor beside the quotient of the one before (torch.optim.adamw, `_single_tensor_adamw`).
    """
    parameters = [parameter for stage in stages for parameter in stage_parameters(plan.model, plan.stages[stage])]
    sizes = [FP32_BYTES * local_elements(plan, parameter, 0) for parameter in parameters]
    held, largest = sum(sizes), max(sizes, default=0)
    decayed = [size for size, parameter in zip(sizes, parameters, strict=True) if parameter.decay]
    updated = max((before + 2 * size for before, size in pairwise([0, *decayed])), default=2 * largest)
    tables = [size for size, parameter in zip(sizes, parameters, strict=True) if parameter.name.startswith("embedding.tokens")]
    tied = 0
    if plan.model.tied_embeddings and tables:
        tied = 2 * tables[0] if tied_ends(plan, pp_rank) else tables[0]
    squares = SQUARE_BYTES // FP32_BYTES * largest if plan.numerics.mode == "fast" else 0
    return max(held + tied, held + squares - gradients_bytes, 2 * held + updated - gradients_bytes)
