"""What a rank sends for its data, before the actions of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model.blocks import num_losses
from .work import Collective, Operations

if TYPE_CHECKING:
    from ..plan.plan import Plan

TOKEN_BYTES = 8
"""Tokens, their targets, those of multi-token prediction and the beginnings of documents are sent as int64, and with
tokens that do not count the number of those that do."""


def load_batch(plan: Plan, tp_rank: int = 0, dp_rank: int = 0) -> Operations:
    """Tokens and targets of a data-parallel rank, from the one tensor-parallel rank that opens the data to
    the others of its group."""
    if plan.layout.tp == 1:
        return ()
    first, last = plan.samples_of(dp_rank)
    num_tokens = (last - first) * plan.batch.sequence // plan.layout.cp
    num_numbers = (1 + num_losses(plan.model) + plan.train.packed) * num_tokens + (plan.train.ignore_token is not None)
    sent_bytes = TOKEN_BYTES * num_numbers * (plan.layout.tp - 1) if tp_rank == 0 else 0
    return (Collective("data", "all_to_all", "tp", plan.layout.tp, sent_bytes),)
