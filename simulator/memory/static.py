"""What a pipeline rank holds throughout the step: weights, gradients, optimizer state, and
buffers that never go away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ...core.layout.layout import Layout
from ...core.layout.leaves import LeafSizes
from ...core.model.model import ModelSpec
from ...core.model.operators import Kind, Operator
from ...core.model.parameters import operator_parameters
from ...core.plan.plan import Plan
from ...core.program import Held, held_elements, held_gradients, num_shards, stage_groups, weight_bytes
from ...core.program.buckets import sums_are_sharded
from ...core.program.offload import MASTER_BYTES
from ...core.program.optimizer_state import moment_numbers, table_moments
from ..stack.memory_profile import MemoryProfile
from .tensors import LayerTensors, num_rotary_tables, rotary_table_bytes

FP32_BYTES = 4

TOKEN_BYTES = 8
"""An id of a token: int64."""

LAYERS_IN_FLIGHT = 2
"""Layers whose gathered weights or unreduced gradients a ZeRO-3 (or 2) rank holds: the one in use and its neighbour."""


class StageElements(NamedTuple):
    """Elements of a stage on tensor-parallel rank 0: of its parameters, with the rows that pad the tables, of its sums
    of gradients, and of the moments of its optimizer; and the parts that ZeRO cuts them into."""

    padded: Held
    gradients: Held
    shards: Held
    moments: Held


def elements_of(plan: Plan, profile: MemoryProfile, stage: int) -> StageElements:
    """Those of a stage. Elements depend on tensor and expert parallelism alone, shards on the copies."""
    held, padded = held_elements(plan, stage), padded_elements(plan, profile, stage)
    dense, expert = held_gradients(plan, stage)
    extra, moments = padded.dense - held.dense, moment_numbers(plan, stage)
    moments = Held(moments.dense + table_moments(plan) * extra, moments.expert)
    return StageElements(padded, Held(dense + extra, expert), num_shards(plan, stage), moments)


def weights_bytes(plan: Plan, profile: MemoryProfile, elements: StageElements) -> int:
    """Weights of a stage as they rest: 16 bits (fp32 where they are, or where ZeRO-3 keeps them so), cut with ZeRO-3.

    With fp8 also 16 bits: a weight by rows and by columns for the two products that read it (fp8_param_gather, which
    NeMo's recipes turn on: nemo/collections/llm/recipes/precision/mixed_precision.py).
    """
    width, held, shards = weight_bytes(plan.precision.dtype), elements.padded, elements.shards
    width = MASTER_BYTES if profile.fp32_weights else width
    # its part rests in fp32 only
    if profile.separate_gradients and plan.layout.zero == 3 and plan.precision.dtype != "fp32":
        whole = width * sum(count for count, parts in zip(held, shards, strict=True) if parts == 1)
        # but in 16 bits where its fp32 weights are in host memory
        parts = sum(-(-count // parts) for count, parts in zip(held, shards, strict=True) if parts > 1)
        return whole + int(width * parts * plan.offload.optimizer * plan.offload.masters)
    return _cut(held, shards, width, cut=plan.layout.zero == 3)


def gradients_bytes(plan: Plan, profile: MemoryProfile, elements: StageElements) -> int:
    """Accumulated gradients of a stage, cut with ZeRO-2 and 3; by our own backend where it reduces them
    after every microbatch."""
    width = profile.gradient_bytes(plan.precision.dtype)
    cut = sums_are_sharded(plan) if profile.separate_gradients else plan.layout.zero >= 2
    return _cut(elements.gradients, elements.shards, width, cut=cut)


def optimizer_bytes(plan: Plan, profile: MemoryProfile, elements: StageElements) -> int:
    """The optimizer's moments and the fp32 master weights of a stage, cut with ZeRO, without what rests in host
    memory."""
    whole = _updated_bytes(plan, elements, _master_bytes(plan, profile), FP32_BYTES)
    return whole - offloaded_optimizer_bytes(plan, profile, elements)


def offloaded_optimizer_bytes(plan: Plan, profile: MemoryProfile, elements: StageElements) -> int:
    """Those of the moments of a stage that rest in host memory, and the fp32 master weights with them. Modelled:
    exactly the share that is asked for; ours are whole parameters, as many of a rank's as are at least that."""
    if not plan.offload.optimizer:
        return 0
    masters = _master_bytes(plan, profile) * plan.offload.masters
    return int(_updated_bytes(plan, elements, masters, FP32_BYTES) * plan.offload.optimizer)


def _master_bytes(plan: Plan, profile: MemoryProfile) -> int:
    return 0 if plan.precision.dtype == "fp32" or profile.fp32_weights else MASTER_BYTES


def _updated_bytes(plan: Plan, elements: StageElements, width: int, moment_width: int = 0) -> int:
    """So many bytes of every element that a rank updates, and of every number of its moments."""
    num_bytes = Held(
        *(
            width * held + moment_width * moments
            for held, moments in zip(elements.padded, elements.moments, strict=True)
        )
    )
    return _cut(num_bytes, elements.shards, 1, cut=plan.layout.zero >= 1)


def step_bytes(plan: Plan, profile: MemoryProfile, elements: StageElements) -> int:
    """What the optimizer step holds in addition: fp32 copies of 16-bit gradients (Megatron's
    Float16OptimizerWithFloat16Params)."""
    if profile.gradient_bytes(plan.precision.dtype) >= MASTER_BYTES or plan.layout.zero >= 2:
        return 0
    return _updated_bytes(plan, elements, MASTER_BYTES)


def gathered_bytes(plan: Plan, stage: int) -> int:
    """Weights of a stage that UNSHARD brings; a stage without copies is never cut, so nothing comes."""
    shards, held = num_shards(plan, stage), held_elements(plan, stage)
    return weight_bytes(plan.precision.dtype) * sum(
        count for count, parts in zip(held, shards, strict=True) if parts > 1
    )


@lru_cache(maxsize=1024)
def buffers_bytes(plan: Plan, profile: MemoryProfile, stages: tuple[int, ...], *, gathers: bool) -> int:
    """ZeRO's gathered layers and buckets, scratch of the product libraries, placeholders for gradients, and
    tables that are kept."""
    contents = [plan.stages[stage] for stage in stages]
    total = 0
    if profile.stores_tables and plan.model.position == "rope" and not plan.train.packed:
        total += rotary_table_bytes(plan) * sum(num_rotary_tables(plan.model, content.layers) for content in contents)
    if any(max(num_shards(plan, stage)) > 1 for stage in stages):
        layer = max((_unit_elements(plan, stage) for stage in stages), default=0)
        total += LAYERS_IN_FLIGHT * layer * weight_bytes(plan.precision.dtype) if gathers else 0
        if plan.layout.zero >= 2 and not profile.separate_gradients:
            total += LAYERS_IN_FLIGHT * layer * profile.gradient_bytes(plan.precision.dtype)
    if profile.workspace_bytes:
        own = (group for stage in stages for group in stage_groups(plan, stage) if group.kind == "layer")
        total += profile.workspace_bytes * (1 + profile.grouped_workspaces * any(group.has_experts for group in own))
    if any(content.head for content in contents):
        total += profile.head_workspace_bytes + (
            LayerTensors(plan, profile).gathered if profile.head_gather_buffer else 0
        )
    if profile.placeholder_gradients:
        shapes = {shape for content in contents for shape in _stage_shapes(plan, profile, content.stage)}
        total += weight_bytes(plan.precision.dtype) * sum(rows * columns for rows, columns in shapes)
    if plan.runtime.cuda_graphs:
        total += graph_input_bytes(plan)
    return total


def graph_input_bytes(plan: Plan) -> int:
    """Tokens and targets, and the documents they belong to, of all microbatches of a step, where captured graphs read
    them (`backend.pipeline.graphs`). A graph's pool is counted as the activations that lie in it."""
    tokens = plan.num_microbatches * plan.batch.micro_size * plan.batch.sequence // plan.layout.cp
    return tokens * (2 + plan.train.packed) * TOKEN_BYTES


def padded_elements(plan: Plan, profile: MemoryProfile, stage: int) -> Held:
    """Parameter elements of a stage on tensor-parallel rank 0, with the rows that pad the tables."""
    dense, expert = held_elements(plan, stage)
    content, model = plan.stages[stage], plan.model
    extra = LayerTensors(plan, profile).vocabulary - plan.leaf_sizes.vocab.owned_items(plan.layout.tp, 0)[1]
    if not extra:
        return Held(dense, expert)
    shared = model.tied_embeddings and content.embedding and content.head
    return Held(dense + extra * model.hidden_size * (content.embedding + content.head - shared), expert)


def _cut(held: Held, shards: Held, width: int, *, cut: bool) -> int:
    if not cut:
        return width * (held.dense + held.expert)
    return -(-held.dense * width // shards.dense) - (-held.expert * width // shards.expert)


def _unit_elements(plan: Plan, stage: int) -> int:
    """Elements of the heaviest layer of a stage, which is gathered and reduced as one."""
    layers = (group for group in stage_groups(plan, stage) if group.kind == "layer")
    sizes = (_layer_elements(plan.model, group.operators, plan.leaf_sizes, plan.layout) for group in layers)
    return max(sizes, default=0)


@lru_cache(maxsize=256)
def _layer_elements(model: ModelSpec, operators: tuple[Operator, ...], leaf_sizes: LeafSizes, layout: Layout) -> int:
    """Elements of one layer on tensor-parallel rank 0. Experts are cut evenly over ep*etp."""
    return sum(
        parameter.num_elements // (layout.ep * layout.expert_tp)
        if parameter.expert
        else math.prod(part.stop - part.start for part in leaf_sizes.local_slices(parameter, layout.tp, 0))
        for parameter in operator_parameters(model, operators)
    )


def _stage_shapes(plan: Plan, profile: MemoryProfile, stage: int) -> Iterator[tuple[int, int]]:
    """Local shapes of the weights whose gradients products add in place: every linear layer's but the router's."""
    tensors = LayerTensors(plan, profile)
    for group in stage_groups(plan, stage):
        if group.kind in ("layer", "prediction"):
            for operator in group.operators:
                if operator.kind is Kind.LINEAR and not (operator.fp32 or operator.shared):
                    yield tensors.held(operator.makes), tensors.held(operator.takes)
    if plan.stages[stage].head:
        yield tensors.vocabulary, plan.model.hidden_size
