"""What our own backend holds besides saved activations: weight gradients before they are summed, and what
REDUCE_GRAD and STEP bring.

Weight gradients never pass through autograd (`backend.gradients.gradients`). In fast numerics each is computed into the
sum of its parameter (`backend.numerics.token_product`), in exact ones it is a tensor of its own; at once, or in W,
until which a closure per layer holds its input and its output's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.layout.stage_parameters import stage_parameters
from ...core.machine.host import EXCHANGED_BYTES
from ...core.plan.plan import Plan
from ...core.program import local_elements, num_shards, tied_ends
from ...core.program.buckets import gradient_buckets
from .own_zero import sharded_reduce_bytes, sharded_step_bytes
from .tape import Node
from .tensors import LayerTensors

FP32_BYTES = 4

PRODUCT_ROWS = 256
"""Rows of a weight's gradient that are held besides the sum where a library cannot add a narrow product to an fp32 sum
(`ROWS_AT_ONCE` of the backend)."""

NORM_BEFORE = ("attention.qkv", "mlp.up")
"""Nodes of a product that bring the norm before it with them, if they keep its input: its own weight gradient needs
that and its output's gradient."""

EXACT_REDUCE = 4
"""The same of exact numerics over gloo (`Group.tree_all_reduce`): flat and by node; besides them cut and arrived, later
gathered and the result. Through shared memory what arrives is added up where it lies."""


def own_nodes(nodes: Sequence[Node], tensors: LayerTensors) -> tuple[Node, ...]:
    """A tape with the weight gradients as tensors of their own, and with what W needs of norms, tables and biases."""
    return tuple(_own(node, tensors) for node in nodes)


def _own(node: Node, tensors: LayerTensors) -> Node:
    hidden, row = tensors.hidden, tensors.tokens * tensors.element
    inputs, gradients = node.weight_input_bytes, node.weight_gradient_bytes
    weight = _product_bytes(inputs // row, gradients // row, tensors)
    if node.name == "embedding.tokens":
        inputs, gradients = node.saved_bytes, hidden
        weight = _lookup_bytes(tensors)
    elif _has_norm(node, tensors):
        inputs, gradients = inputs + hidden, gradients + hidden
    return node._replace(
        backward_bytes=node.backward_bytes + weight,
        weight_bytes=weight,
        weight_input_bytes=inputs,
        weight_gradient_bytes=gradients,
    )


def _has_norm(node: Node, tensors: LayerTensors) -> bool:
    """Whether W of a node needs what the gradient of a norm's weights is made of."""
    if node.name in NORM_BEFORE:
        return node.saved_bytes > 0 and tensors.plan.model.pre_norms
    return node.name == "head.norm" or node.name.endswith(".post_norm")


def _product_bytes(takes: int, makes: int, tensors: LayerTensors) -> int:
    """What the gradient of a weight [makes, takes] needs besides its sum."""
    plan = tensors.plan
    if plan.numerics.mode == "exact":
        return takes * makes * FP32_BYTES
    summed = plan.precision.gradient_dtype or "fp32"
    operands = "fp32" if plan.precision.dtype == "fp32" else "bf16"
    adds_narrow = plan.cluster.collective_library == "nccl" and summed == "fp32"  # cuBLAS can
    if operands == summed or adds_narrow:
        return 0
    return takes * min(makes, PRODUCT_ROWS) * tensors.element


def _lookup_bytes(tensors: LayerTensors) -> int:
    """What the gradient of the token table needs besides its sum: of fp32 sums the rows that are added, with those of
    other tensor-parallel ranks as zeros, else a table."""
    plan, hidden_size = tensors.plan, tensors.plan.model.hidden_size
    if plan.numerics.mode == "exact" or plan.precision.gradient_dtype == "bf16":
        return (tensors.vocabulary + 1) * hidden_size * FP32_BYTES
    copies = 2 if tensors.element < FP32_BYTES else 1
    return copies * tensors.whole // tensors.element * FP32_BYTES


def own_reduce_bytes(plan: Plan, stage: int, gradients_bytes: int) -> int:
    """What REDUCE_GRAD of a stage holds besides its sums; a stage without copies is not reduced."""
    if plan.num_copies(stage) == 1:
        return 0
    if plan.layout.zero:
        return sharded_reduce_bytes(plan, stage, gradients_bytes)
    if plan.numerics.mode == "exact":
        if plan.cluster.collective_library == "shm":
            return gradients_bytes + _exchanged_bytes(plan, stage, gradients_bytes)
        return gradients_bytes * EXACT_REDUCE
    if plan.precision.gradient_dtype != "bf16":  # flat, where they are added up
        return gradients_bytes + _exchanged_bytes(plan, stage, round(gradients_bytes * _largest_bucket(plan, stage)))
    # the result, and flat what is being reduced
    return gradients_bytes + round(gradients_bytes * _largest_bucket(plan, stage))


def _exchanged_bytes(plan: Plan, stage: int, flat_bytes: int) -> int:
    """What a sum over CPUs holds besides so many bytes. Of few over gloo (`exchanged_all_reduce` of the backend): of
    two members all is sent to both and arrives from both; of more a part padded to equal lengths, its sum, and all
    parts twice while they are put together."""
    copies = plan.num_copies(stage)
    if plan.cluster.collective_library == "shm":  # the sum; of more members than two also the own part of it
        return flat_bytes if copies == 2 else flat_bytes + flat_bytes // copies
    if plan.cluster.collective_library != "gloo" or flat_bytes > EXCHANGED_BYTES:
        return 0
    return 4 * flat_bytes if copies == 2 else 3 * flat_bytes + flat_bytes // copies


def _largest_bucket(plan: Plan, stage: int) -> float:
    """The largest share of a stage's gradients that is reduced at a time: all of them where there are no buckets."""
    if plan.data_parallel.bucket_bytes is None:
        return 1.0
    buckets = gradient_buckets(plan, stage)
    sizes = [sum(local_elements(plan, usage.parameter, 0) for usage in bucket.usages) for bucket in buckets]
    return max(sizes, default=0) / max(1, sum(sizes))


def own_step_bytes(plan: Plan, pp_rank: int, stages: Sequence[int], gradients_bytes: int) -> int:
    """The most that STEP of a rank holds besides `gradients_bytes` of sums.

    First a tied table's two sums are put together; where they lie on two ranks each is sent twice and arrives next to
    the other's. Gradients are divided and clipped where they lie, and the update is one pass over what is there.
    """
    parameters = [parameter for stage in stages for parameter in stage_parameters(plan.model, plan.stages[stage])]
    sizes = [FP32_BYTES * local_elements(plan, parameter, 0) for parameter in parameters]
    tables = [
        size for size, parameter in zip(sizes, parameters, strict=True) if parameter.name.startswith("embedding.tokens")
    ]
    tied = 0
    if plan.model.tied_embeddings and tables:
        tied = 4 * tables[0] if tied_ends(plan, pp_rank) else sum(tables)
    if plan.layout.zero:
        return sharded_step_bytes(plan, stages, gradients_bytes, tied_bytes=tied // num_shards(plan, stages[0]).dense)
    return max(tied, sum(sizes) - gradients_bytes)
