"""Memory of every pipeline rank over one step: what stays, what activations come and go, and the peak.

Bytes of weights, gradients, optimizer state and saved activations follow from shapes and are exact for the runtime described here;
buffers are modelled. Assumed runtime: attention is a fused kernel that keeps its output and one fp32 number per query instead of
the score square (no 5as/h term of Korthikanti et al. 2022); no dropout, hence none of its masks; gradients accumulate in fp32; Adam
keeps two fp32 moments, and an fp32 master weight where weights are 16 bits; with ZeRO-2 and 3 every backward reduces its gradients
and ZeRO-3 frees gathered weights after each use, layer by layer, or stage by stage where the schedule has UNSHARD. Not counted: the
allocator's fragmentation and the CUDA context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..core.action import Kind
from ..core.errors import PlanError
from ..core.leaves import LeafSizes
from ..core.model import ModelSpec
from ..core.parameters import Parameter, stage_parameters, stage_usages
from ..core.plan import Plan
from ..core.program import message_bytes, weight_bytes
from ..core.schedule import Placement, Schedule
from ..core.stages import StageLayers
from ..core.timeline import MemorySample
from .compute import ELEMENT_BYTES
from .engine import Run

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buffers")

GRADIENT_BYTES = 4
"""Gradients accumulate in fp32."""

MOMENT_BYTES = 8
"""Two fp32 moments of Adam."""

MOST_BYTES = 2**62
"""Bytes of a rank over a step whose running sums are exact in 64 bits."""

LAYERS_IN_FLIGHT = 2
"""Layers whose gathered weights or unreduced gradients a ZeRO-3 (or 2) rank holds: the one in use and its neighbour."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank (its tensor-parallel rank 0, which holds the longest cut); what comes and goes at its peak.

    `gathered_bytes` is the part of `weights_bytes` that UNSHARD and RESHARD bring and take, none without them.
    """

    pp_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    gathered_bytes: int = 0

    @property
    def static_bytes(self) -> int:
        """What is held throughout the step."""
        return self.peak_bytes - self.activations_bytes - self.gathered_bytes

    @property
    def peak_bytes(self) -> int:
        """The most held at any time."""
        return sum(self.components().values())

    def components(self) -> dict[str, int]:
        """The peak by component, as the reports print it."""
        return {name: getattr(self, f"{name}_bytes") for name in COMPONENTS}


def rank_memories(plan: Plan, schedule: Schedule, recv_buffers: int = 2) -> tuple[RankMemory, ...]:
    """Peak memory of every pipeline rank when it runs its row of the schedule (lowered or not) in order."""
    activations, gathered = _at_peaks(plan, schedule)
    alike: dict[tuple[object, ...], RankMemory] = {}
    memories = []
    for pp_rank in range(schedule.num_ranks):
        stages, buffers = _rank_messages(schedule.placement, recv_buffers)[pp_rank]
        contents = [plan.stages[stage] for stage in stages]
        key = (buffers, *((len(c.layers), c.embedding, c.head, plan.num_copies(c.stage)) for c in contents))
        if key not in alike:
            alike[key] = _rank_memory(plan, schedule, stages, buffers)
        weights_bytes = alike[key].weights_bytes + gathered[pp_rank]
        memory = replace(alike[key], pp_rank=pp_rank, activations_bytes=activations[pp_rank])
        memories.append(replace(memory, weights_bytes=weights_bytes, gathered_bytes=gathered[pp_rank]))
    return tuple(memories)


def stage_activation_bytes(plan: Plan) -> list[int]:
    """`activation_bytes` of every stage; stages of equal content share the count."""
    alike: dict[tuple[int, bool, bool], int] = {}
    for content in plan.stages:
        key = (len(content.layers), content.embedding, content.head)
        if key not in alike:
            alike[key] = activation_bytes(plan, content.stage)
    return [alike[len(content.layers), content.embedding, content.head] for content in plan.stages]


def peak_in_flight(schedule: Schedule, per_stage: Sequence[int] | None = None) -> list[int]:
    """The most activations each rank holds at once, in bytes (`per_stage` of one microbatch) or, without sizes, in microbatches.

    A forward allocates when it starts, the backward (W where it is split) frees when it ends.
    """
    held = _held(schedule, *activation_changes(schedule, per_stage))
    return [int(held[lo:hi].max()) if hi > lo else 0 for lo, hi in pairwise(schedule.offsets.tolist())]


def _held(schedule: Schedule, allocated: np.ndarray, freed: np.ndarray) -> np.ndarray:
    """Per action what its rank holds while it runs, beside what it held before the step."""
    after = np.cumsum(allocated - freed)
    before_row = np.append(0, after)[schedule.offsets[:-1]]
    return after + freed - np.repeat(before_row, np.diff(schedule.offsets))


def _at_peaks(plan: Plan, schedule: Schedule) -> tuple[list[int], list[int]]:
    """Bytes of activations and of gathered stages on each rank when both together are most."""
    per_stage = stage_activation_bytes(plan)
    if not (schedule.actions.kind == Kind.UNSHARD).any():
        return peak_in_flight(schedule, per_stage), [0] * schedule.num_ranks
    activations = _held(schedule, *activation_changes(schedule, per_stage))
    gathered = _held(schedule, *_gather_changes(plan, schedule))
    both = activations + gathered
    peaks = [lo + int(both[lo:hi].argmax()) for lo, hi in pairwise(schedule.offsets.tolist())]
    return activations[peaks].tolist(), gathered[peaks].tolist()


def _gather_changes(plan: Plan, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Per action the bytes of gathered weights that it allocates and frees; a stage without copies is never cut, so nothing comes."""
    width = weight_bytes(plan.precision.dtype)
    size = _countable([_elements(plan, s)[0] * width if plan.num_copies(s) > 1 else 0 for s in range(schedule.num_stages)], schedule)
    of_action = size[schedule.actions.stage]
    return np.where(schedule.actions.kind == Kind.UNSHARD, of_action, 0), np.where(schedule.actions.kind == Kind.RESHARD, of_action, 0)


def activation_changes(schedule: Schedule, per_stage: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Per action what it allocates when it starts and what it frees when it ends; units as in `peak_in_flight`."""
    actions = schedule.actions
    size = _countable([1] * schedule.num_stages if per_stage is None else per_stage, schedule)
    allocates = np.isin(actions.kind, (Kind.F, Kind.OVERLAP_F_B))
    frees = np.isin(actions.kind, (Kind.B, Kind.W, Kind.OVERLAP_F_B))
    freed_stage = np.where(actions.kind == Kind.OVERLAP_F_B, actions.pair_stage, actions.stage)
    return np.where(allocates, size[actions.stage], 0), np.where(frees, size[freed_stage], 0)


def _countable(per_stage: Sequence[int], schedule: Schedule) -> np.ndarray:
    """Sizes whose sums over a schedule stay exact in 64 bits. Raises `PlanError` where they would not."""
    if (largest := max(per_stage)) * len(schedule) > MOST_BYTES:
        raise PlanError(
            f"a step allocates up to {largest * len(schedule):.2g} bytes of activations or gathered weights, more than "
            f"{MOST_BYTES:.2g} bytes, which is all that is counted. Use a smaller batch.sequence, batch.micro or model.hidden_size."
        )
    return np.asarray(per_stage, dtype=np.int64)


def memory_samples(run: Run, memories: Sequence[RankMemory], plan: Plan, global_ranks: Sequence[int]) -> tuple[MemorySample, ...]:
    """Bytes held by each rank over time: a sample where a forward or UNSHARD starts and where a backward or RESHARD ends."""
    schedule = run.graph.schedule
    kinds = (activation_changes(schedule, stage_activation_bytes(plan)), _gather_changes(plan, schedule))
    allocated, freed = (activations + gathered for activations, gathered in zip(*kinds, strict=True))
    samples: list[MemorySample] = []
    for memory, lo, hi in zip(memories, schedule.offsets[:-1].tolist(), schedule.offsets[1:].tolist(), strict=True):
        rank = int(global_ranks[memory.pp_rank])
        when = np.column_stack([run.start_s[lo:hi], run.end_s[lo:hi]]).ravel()
        change = np.column_stack([allocated[lo:hi], -freed[lo:hi]]).ravel()
        event = np.flatnonzero(change)
        event = event[np.argsort(when[event], kind="stable")]  # gathers have a lane of their own
        held = memory.static_bytes + np.cumsum(change[event])
        samples.append(MemorySample(rank, 0.0, memory.static_bytes))
        samples += [MemorySample(rank, time_s, num_bytes) for time_s, num_bytes in zip(when[event].tolist(), held.tolist(), strict=True)]
    return tuple(samples)


def activation_bytes(plan: Plan, stage: int) -> int:
    """Bytes one microbatch keeps on a stage between forward and backward.

    Korthikanti et al. 2022, section 4 and table 2, term by term for the layers there are: grouped heads, gated MLP, no dropout, and
    a fused attention. With recompute `full` only the layer's input stays; `selective` also drops what the attention core kept.
    """
    content, tokens = plan.stages[stage], plan.batch.micro_size * plan.batch.sequence
    model, tp, element = plan.model, plan.layout.tp, ELEMENT_BYTES[plan.precision.dtype]
    hidden = tokens * model.hidden_size * element // (tp if plan.layout.sequence_parallel else 1)
    total = len(content.layers) * layer_activation_bytes(plan)
    if content.embedding:
        total += 8 * tokens  # token numbers, int64
    if content.head:
        # Input of the final norm, its output, and the fp32 softmax over the local vocabulary.
        total += 2 * hidden + 4 * tokens * _local_vocabulary(plan) + 8 * tokens
    return total


def layer_activation_bytes(plan: Plan) -> int:
    """The same for one transformer layer."""
    if plan.recompute.mode == "full":
        return _hidden_bytes(plan)
    return _saved_bytes(plan)


def _hidden_bytes(plan: Plan) -> int:
    """One hidden state as it lies between layers: cut over tokens with sequence parallelism."""
    tokens = plan.batch.micro_size * plan.batch.sequence
    whole = tokens * plan.model.hidden_size * ELEMENT_BYTES[plan.precision.dtype]
    return whole // plan.layout.tp if plan.layout.sequence_parallel else whole


def _saved_bytes(plan: Plan) -> int:
    """What a layer's backward needs when the layer is not recomputed as a whole."""
    model, tp, element = plan.model, plan.layout.tp, ELEMENT_BYTES[plan.precision.dtype]
    tokens = plan.batch.micro_size * plan.batch.sequence
    heads = plan.leaf_sizes.heads.owned_items(tp, 0)[1]
    queries, keys = heads * model.query_heads_per_group * model.head_dim, heads * model.head_dim
    ffn = plan.leaf_sizes.ffn.owned_items(tp, 0)[1]
    norms = 4 * _hidden_bytes(plan)  # input and output of both norms
    attention = tokens * element * (queries + 2 * keys + queries)  # queries, keys, values, and the output product's input
    statistics = 0 if plan.recompute.mode == "selective" else 4 * tokens * heads * model.query_heads_per_group
    mlp = tokens * element * ffn * ((2 if model.gated else 1) + 1)  # before and after the activation
    return norms + attention + statistics + mlp


def _rank_memory(plan: Plan, schedule: Schedule, stages: tuple[int, ...], message_buffers: int) -> RankMemory:
    """All but the activations of the memory of a rank that holds `stages`. ZeRO cuts each stage over all its copies."""
    zero, dtype = plan.layout.zero, plan.precision.dtype
    gathers = zero == 3 and not (schedule.actions.kind == Kind.UNSHARD).any()
    master = 0 if dtype == "fp32" else 4
    elements = [(*_elements(plan, stage), plan.num_copies(stage)) for stage in stages]
    return RankMemory(
        pp_rank=0,
        weights_bytes=sum(_shard(parameters * weight_bytes(dtype), copies if zero == 3 else 1) for parameters, _, copies in elements),
        gradients_bytes=sum(_shard(gradients * GRADIENT_BYTES, copies if zero >= 2 else 1) for _, gradients, copies in elements),
        optimizer_bytes=sum(_shard(parameters * (MOMENT_BYTES + master), copies if zero else 1) for parameters, _, copies in elements),
        activations_bytes=0,
        buffers_bytes=_buffer_bytes(plan, stages, message_buffers, gathers=gathers),
    )


def _elements(plan: Plan, stage: int) -> tuple[int, int]:
    """Parameter and gradient elements of a stage on tensor-parallel rank 0; stages of equal content share the count."""
    content = plan.stages[stage]
    last = content.last_layer - content.first_layer
    return _content_elements(plan.model, plan.leaf_sizes, plan.layout.tp, replace(content, stage=0, first_layer=0, last_layer=last))


@lru_cache(maxsize=1024)
def _content_elements(model: ModelSpec, leaf_sizes: LeafSizes, tp: int, content: StageLayers) -> tuple[int, int]:
    def count(parameters: Iterable[Parameter]) -> int:
        return sum(math.prod(s.stop - s.start for s in leaf_sizes.local_slices(parameter, tp, 0)) for parameter in parameters)

    return count(stage_parameters(model, content)), count(usage.parameter for usage in stage_usages(model, content))


def _buffer_bytes(plan: Plan, stages: tuple[int, ...], message_buffers: int, *, gathers: bool) -> int:
    """Messages under way, ZeRO's gathered layers, and the largest working set of one layer. Modelled."""
    layout = plan.layout
    layer_elements, _ = _content_elements(plan.model, plan.leaf_sizes, layout.tp, StageLayers(0, 0, 1, embedding=False, head=False))
    sharded = LAYERS_IN_FLIGHT * layer_elements if any(plan.num_copies(stage) > 1 for stage in stages) else 0
    total = sharded * weight_bytes(plan.precision.dtype) if gathers else 0
    total += sharded * GRADIENT_BYTES if layout.zero >= 2 else 0
    total += message_buffers * message_bytes(plan)
    return total + max(_working_bytes(plan, stage) for stage in stages)


@lru_cache(maxsize=256)
def _rank_messages(placement: Placement, recv_buffers: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Per pipeline rank its stages, and the messages it may hold outside its activations: for each peer and direction the receives
    posted ahead, and one send."""
    lanes: list[set[tuple[int, bool, str]]] = [set() for _ in range(placement.num_ranks)]
    for stage, owners in enumerate(placement.ranks):
        for neighbour, sent, received in ((stage + 1, "F", "B"), (stage - 1, "B", "F")):
            if 0 <= neighbour < placement.num_stages:
                for pp_rank in owners:
                    for peer in set(placement.ranks[neighbour]) - {pp_rank}:
                        lanes[pp_rank] |= {(peer, True, sent), (peer, False, received)}
    counts = [sum(1 if sending else 1 + recv_buffers for _, sending, _ in held) for held in lanes]
    return tuple((placement.stages_of(pp_rank), count) for pp_rank, count in enumerate(counts))


def _working_bytes(plan: Plan, stage: int) -> int:
    """Gradients of one layer's activations while its backward runs; with recompute `full` also the recomputed activations; at the head
    the 16-bit logits and their gradient."""
    content, model, element = plan.stages[stage], plan.model, ELEMENT_BYTES[plan.precision.dtype]
    tokens = plan.batch.micro_size * plan.batch.sequence
    ffn = plan.leaf_sizes.ffn.owned_items(plan.layout.tp, 0)[1]
    layer = tokens * element * (ffn * (3 if model.gated else 2) + 2 * model.hidden_size)
    if plan.recompute.mode == "full":
        layer += _saved_bytes(plan)
    head = tokens * _local_vocabulary(plan) * (element + 4) if content.head else 0
    return max(layer, head)


def _local_vocabulary(plan: Plan) -> int:
    return plan.leaf_sizes.vocab.owned_items(plan.layout.tp, 0)[1]


def _shard(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
