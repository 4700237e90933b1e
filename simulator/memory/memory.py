"""Memory of every pipeline rank over one step: what stays, what each action brings and takes, the peak and
the action that sets it.

What a microbatch leaves between its forward and its backward, and the most either holds while it runs, comes from
tapes of the actual layers (`memory_tape`, `memory_layers`); what stays throughout from shapes (`memory_static`);
what else a software stack holds from `simulator.stack`. Bytes are those of tensors, as
`torch.cuda.max_memory_allocated` counts them; the allocator's rounding and the CUDA context come on top in
`RankMemory.reserved_bytes` and `device_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter

import numpy as np

from ...core.plan.plan import Plan
from ...core.program import message_bytes
from ...core.schedule.action import Kind
from ...core.schedule.placement import Placement
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import MemorySample
from ..engine.engine import Run
from ..stack.memory_profile import MemoryProfile
from ..stack.profiles import profile_of
from .changes import all_changes
from .peaks import peaks
from .reserved import reserved_bytes
from .sizes import stage_sizes
from .states import states_of
from .static import buffers_bytes

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buffers")

_peak_parts = attrgetter(*(f"{name}_bytes" for name in COMPONENTS))


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank (its tensor-parallel rank 0, which holds the longest cut) when it holds most.

    `activations_bytes` is what forwards have kept, `working_bytes` the part of `buffers_bytes` that only the action at
    the peak needs, `gathered_bytes` the part of `weights_bytes` that UNSHARD and RESHARD bring and take, `summed_bytes`
    the part of `gradients_bytes` that exists from the first backward to the step only. `peak_action` is the action at
    the peak, "" where it is the static state. `lasting_bytes` is the most that outlives an action: the peak without
    buffers and without what one action needs alone, as our backend measures it (`backend.pipeline.activations`).
    `reserved_bytes` is what the allocator holds at the peak, `context_bytes` what the device holds besides it.
    """

    pp_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    gathered_bytes: int = 0
    working_bytes: int = 0
    summed_bytes: int = 0
    lasting_bytes: int = 0
    peak_action: str = ""
    reserved_bytes: int = 0
    context_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """What the device itself shows (nvidia-smi)."""
        return self.reserved_bytes + self.context_bytes

    @property
    def static_bytes(self) -> int:
        """What is held throughout the step."""
        return self.peak_bytes - self.activations_bytes - self.gathered_bytes - self.working_bytes - self.summed_bytes

    @property
    def peak_bytes(self) -> int:
        """The most held at any time."""
        return sum(_peak_parts(self))

    def components(self) -> dict[str, int]:
        """The peak by component, as the reports print it."""
        return dict(zip(COMPONENTS, _peak_parts(self), strict=True))


def rank_memories(plan: Plan, schedule: Schedule, recv_buffers: int = 2) -> tuple[RankMemory, ...]:
    """Peak memory of every pipeline rank when it runs its row of the schedule (lowered or not) in order."""
    profile, sizes = profile_of(plan).memory, stage_sizes(plan)
    at_peaks, owned = peaks(plan, profile, schedule), schedule.placement.stages_of_ranks
    gathers = plan.layout.zero == 3 and not (schedule.actions.kind == Kind.UNSHARD).any()
    buffers: dict[tuple[object, ...], int] = {}
    message, overlaps = message_bytes(plan), profile_of(plan).p2p_overlap
    context = profile.zero_context_bytes if plan.layout.zero and profile.zero_context_bytes else reserved_bytes(plan)
    memories = []
    for pp_rank, (stages, lanes) in enumerate(zip(owned, _lanes(schedule.placement), strict=True)):
        peak, messages = at_peaks[pp_rank], _messages(profile, lanes, len(stages), recv_buffers, overlaps=overlaps)
        key = (messages, *(id(sizes[stage]) for stage in stages))
        if key not in buffers:
            buffers[key] = messages * message + buffers_bytes(plan, profile, stages, gathers=gathers)
        held = [sizes[stage] for stage in stages]
        static = 0 if profile.growing_gradients else sum(size.gradients_bytes for size in held)
        weights, optimizer = sum(size.weights_bytes for size in held), sum(size.optimizer_bytes for size in held)
        total = weights + optimizer + static + buffers[key] + peak.during
        memories.append(
            RankMemory(
                pp_rank=pp_rank,
                weights_bytes=weights + peak.gathered,
                gradients_bytes=static + peak.summed,
                optimizer_bytes=optimizer,
                activations_bytes=peak.retained,
                buffers_bytes=buffers[key] + peak.working,
                gathered_bytes=peak.gathered,
                working_bytes=peak.working,
                summed_bytes=peak.summed,
                lasting_bytes=weights + optimizer + static + peak.lasting,
                peak_action=peak.action,
                reserved_bytes=int(total * profile.allocator_factor),
                context_bytes=context,
            )
        )
    return tuple(memories)


def peak_in_flight(schedule: Schedule) -> list[int]:
    """The most microbatches that each rank holds at once: from the start of a forward to the end of its
    backward (W where it is split)."""
    states, microbatch = states_of(schedule), np.append(np.ones(schedule.num_stages, dtype=np.int64), 0)
    held = (states.retained + states.deferred).sum(axis=1) + microbatch[states.forward]
    return [int(held[lo:hi].max()) if hi > lo else 0 for lo, hi in pairwise(states.offsets.tolist())]


def memory_samples(
    run: Run, memories: Sequence[RankMemory], plan: Plan, global_ranks: Sequence[int]
) -> tuple[MemorySample, ...]:
    """Bytes held by each rank over time: a sample where an action that changes them starts and where it ends."""
    samples: list[MemorySample] = []
    for memory, when, since in _changes_over_time(run, memories, plan):
        rank = int(global_ranks[memory.pp_rank])
        held = memory.static_bytes + since.sum(axis=0)
        samples.append(MemorySample(rank, 0.0, memory.static_bytes))
        samples += [
            MemorySample(rank, time_s, num_bytes)
            for time_s, num_bytes in zip(when.tolist(), held.tolist(), strict=True)
        ]
    return tuple(samples)


def sample_components(run: Run, memories: Sequence[RankMemory], plan: Plan) -> np.ndarray:
    """`[samples, COMPONENTS]`: the bytes of each of `memory_samples` by component, where activations include what only
    the action that runs needs."""
    found = []
    for memory, _, since in _changes_over_time(run, memories, plan):
        lasting = memory.components()
        lasting["weights"] -= memory.gathered_bytes
        lasting["gradients"] -= memory.summed_bytes
        lasting["buffers"] -= memory.working_bytes
        lasting["activations"] = 0
        held = np.tile([lasting[name] for name in COMPONENTS], (since.shape[1] + 1, 1))
        for name, change in zip(("activations", "weights", "gradients"), since, strict=True):
            held[1:, COMPONENTS.index(name)] += change
        found.append(held)
    return np.concatenate(found)


def _changes_over_time(
    run: Run, memories: Sequence[RankMemory], plan: Plan
) -> Iterator[tuple[RankMemory, np.ndarray, np.ndarray]]:
    """Of every rank the times at which what it holds changes, and what it then holds besides what is static, `[3,
    times]`: activations, gathered weights and sums of gradients."""
    schedule = run.graph.schedule
    parts = all_changes(plan, schedule, profile_of(plan).memory)
    for memory, lo, hi in zip(memories, schedule.offsets[:-1].tolist(), schedule.offsets[1:].tolist(), strict=True):
        when = np.column_stack([run.start_s[lo:hi], run.end_s[lo:hi]]).ravel()
        changes = np.stack([np.column_stack([part.begins[lo:hi], part.ends[lo:hi]]).ravel() for part in parts])
        order = np.argsort(when, kind="stable")  # gathers have a lane of their own
        event = np.flatnonzero(changes.sum(axis=0)[order])
        yield memory, when[order][event], np.cumsum(changes[:, order], axis=1)[:, event]


def _messages(
    profile: MemoryProfile,
    lanes: frozenset[tuple[int, bool, str]],
    num_stages: int,
    recv_buffers: int,
    *,
    overlaps: bool,
) -> int:
    """Hidden states that a rank of so many stages holds outside its activations; `overlaps` says that
    messages overlap compute.

    Ours: the gradient that a backward starts from, and for each peer and direction one message that has
    come ahead of its turn: of the receives posted ahead the second is seldom filled yet, and what was sent
    is freed (`backend.pipeline.executor`). Stacks that keep no such account: the receives posted ahead, one
    send for each peer and direction, and that gradient. Megatron: the gradient last sent back; with several
    stages a rank also an output that is sent only after the next backward
    (megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving), and,
    where messages overlap compute, one receive ahead in each direction.
    """
    if profile.separate_gradients:
        return bool(lanes) + sum(not sending for _, sending, _ in lanes)
    if not profile.previous_gradient:
        return bool(lanes) + sum(1 if sending else recv_buffers for _, sending, _ in lanes)
    sends_back = any(sending and direction == "B" for _, sending, direction in lanes)
    interleaved = bool(lanes) and num_stages > 1
    ahead = 2 if interleaved and overlaps else 0
    return int(sends_back) + int(interleaved) + ahead


@lru_cache(maxsize=256)
def _lanes(placement: Placement) -> tuple[frozenset[tuple[int, bool, str]], ...]:
    """Per pipeline rank its links to others: peer, whether it sends, and the direction."""
    lanes: list[set[tuple[int, bool, str]]] = [set() for _ in range(placement.num_ranks)]
    for stage, owners in enumerate(placement.ranks):
        neighbours = [(source, "B", "F") for source in placement.sources_of(stage)]
        neighbours += [] if placement.has_loss(stage) else [(placement.target_of(stage), "F", "B")]
        for neighbour, sent, received in neighbours:
            is_own = 0 <= neighbour < placement.num_stages  # others are those of another module
            peers = set(placement.ranks[neighbour]) if is_own else {placement.rank_of(neighbour)}
            for pp_rank in owners:
                for peer in peers - {pp_rank}:
                    lanes[pp_rank] |= {(peer, True, sent), (peer, False, received)}
    return tuple(frozenset(held) for held in lanes)
