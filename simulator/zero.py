"""What ZeRO-2 and 3 cost a stack beside the bytes they send: units that nothing covers, and tensors that go one by one."""

from __future__ import annotations

from ..core.parameters import stage_parameters
from ..core.plan import Plan
from ..core.program import num_shards
from .compute import host_s

PERSISTENT_ELEMENTS = 100_000
"""Elements up to which ZeRO-3 leaves a tensor whole (deepspeed/runtime/zero/constants.py, stage3_param_persistence_threshold)."""

LIST_CALLS = 2
"""Calls of the host for each part of a list that is gathered or scattered: a view and a copy. Counted."""


def table_share(plan: Plan, stage: int, num_elements: int) -> float:
    """Share of a stage's parameters that lie in its tables, of which tied ones are one."""
    content, model = plan.stages[stage], plan.model
    tables = content.embedding + content.head - (model.tied_embeddings and content.embedding and content.head)
    return tables * model.vocab_size * model.hidden_size / plan.layout.tp / num_elements


def alone_s(plan: Plan, stage: int, ring_s: float) -> float:
    """Seconds that one pass over a stage's weights takes longer where every tensor is gathered or scattered alone, in a list with a part
    for each rank: the latency of a ring and the host's calls. Small tensors rest on every rank."""
    tensors = sum(each.num_elements > PERSISTENT_ELEMENTS for each in stage_parameters(plan.model, plan.stages[stage]))
    return tensors * (ring_s + host_s(plan.cluster, LIST_CALLS * num_shards(plan, stage).dense))
