"""The waits of a schedule whose branches join (`core.schedule.joined`): what `graph` is for a line of stages."""

from __future__ import annotations

import numpy as np

from ...core.schedule.action import COMPUTE, RECEIVES, SENDS, Kind
from ...core.schedule.schedule import Schedule
from .graph import NUM_WAITS, Graph

MOST_INPUTS = NUM_WAITS - 1
"""Stages whose outputs may join before an action."""


def joined_graph(schedule: Schedule) -> Graph:
    """The waits of a lowered schedule whose branches join, sends buffered. A receive ends with the last send
    that feeds it listed."""
    placement, size = schedule.placement, len(schedule)
    at = {(action.kind, action.stage, action.microbatch): index for index, action in enumerate(schedule.actions)}
    waits, partner = np.full((NUM_WAITS, size), -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    rank = schedule.pp_rank.astype(np.int64)
    last_of: dict[tuple[int, str], int] = {}
    for index, action in enumerate(schedule.actions):
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        lane = "compute" if kind in COMPUTE or kind is Kind.STEP else kind.name
        sends: list[int] = []
        if kind is Kind.F:
            sends = [at[Kind.SEND_F, source, microbatch] for source in placement.sources_of(stage)]
        elif kind is Kind.B and not placement.has_loss(stage):
            sends = [at[Kind.SEND_B, placement.target_of(stage), microbatch]]
        elif kind in SENDS:
            sends = [at[Kind.F if kind is Kind.SEND_F else Kind.B, stage, microbatch]]
        elif kind is Kind.REDUCE_GRAD:
            sends = [last_of[int(rank[index]), "compute"]]
        elif kind is Kind.STEP:
            sends = [at[Kind.REDUCE_GRAD, stage, None]]
        if kind in RECEIVES:
            feeds = placement.sources_of(stage) if kind is Kind.RECV_F else (placement.target_of(stage),)
            send = Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B
            partner[index] = at[send, feeds[-1], microbatch]
            partner[[at[send, feed, microbatch] for feed in feeds]] = index
            continue
        waits[0, index] = last_of.get((int(rank[index]), lane), -1)
        waits[1 : 1 + len(sends), index] = sends
        last_of[int(rank[index]), lane] = index
    return Graph(schedule, "buffered", rank, waits, partner, np.full(size, -1, dtype=np.int64))
