"""How plain a layout is, and an order in which of near-equal layouts the plainer one comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ...core.layout.layout import DEFAULT_ORDER
from ...core.plan.plan import Plan
from .freed import OVERLAPS, chosen_of
from .question import NEAR

PLAIN_SCHEDULES = ("1F1B", "Interleaved1F1B")
"""What every stack runs."""

Answer = TypeVar("Answer")


def num_axes(plan: Plan) -> int:
    """Things to set up besides data parallelism that the degrees and the layers need: tensor, context, pipeline and
    expert parallelism, experts cut otherwise than attention, and recomputation."""
    layout = plan.layout
    cut = (layout.tp, layout.cp, layout.pp, layout.ep)
    return sum(degree > 1 for degree in cut) + (layout.etp is not None) + (plan.recompute.mode != "none")


def complexity(plan: Plan) -> tuple[int, ...]:
    """Less for the plainer of two plans. First things to set up: those of `num_axes`, several stages to a rank, stages
    of different lengths, a schedule other than 1F1B and its interleaved form, gradients or weights in parts (ZeRO 2 and
    3), and what is searched on demand only: 8 bits, overlaps that a stack does not have by itself, another order of
    ranks, hybrid sharding. Where these are as many, what is more of a thing: pp, vpp, cp, tp, ep, the ZeRO stage."""
    layout = plan.layout
    things = num_axes(plan) + (layout.vpp > 1) + (layout.stages is not None) + (layout.zero >= 2)
    things += (plan.schedule.name not in PLAIN_SCHEDULES) + (plan.precision.dtype == "fp8")
    things += sum(value is not None for value in chosen_of(plan, OVERLAPS).values())
    things += (layout.order != DEFAULT_ORDER) + (plan.data_parallel.shard is not None)
    return things, layout.pp, layout.vpp, layout.cp, layout.tp, layout.ep, layout.zero


def plainer_first(ranked: Sequence[tuple[float, Plan, Answer]]) -> list[tuple[float, Plan, Answer]]:
    """Answers by their value, of those within `NEAR` of the best one left the plainest first."""
    left, found = sorted(ranked, key=lambda entry: entry[0]), []
    while left:
        near = [entry for entry in left if entry[0] <= left[0][0] * (1 + NEAR)]
        found += sorted(near, key=lambda entry: (complexity(entry[1]), entry[0]))
        left = left[len(near) :]
    return found
