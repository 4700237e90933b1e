"""The automatic zero-bubble schedule with a memory limit (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import inf
from typing import Literal

from ..base.errors import ScheduleError
from .placement import Placement
from .schedule import Schedule
from .search_problem import Problem, Rows, evaluate, split_rows, to_schedule
from .search_rules import Rule, dispatch
from .zero_bubble import staggered

Seconds = float | Sequence[float]
"""One duration for all stages, or one per stage."""


def zb_auto(
    pp: int,
    num_microbatches: int,
    memory_limit: int | None = None,
    forward_s: Seconds = 1,
    backward_input_s: Seconds = 1,
    backward_weight_s: Seconds = 1,
    send_s: Seconds = 0,
) -> Schedule:
    """The best of several orders for the given times, in which no rank holds more than `memory_limit`
    activations from F to W.

    The limit counts microbatches of one stage and is p by default, the memory of 1F1B. Best is the shortest longest
    time between a rank's first and last action (`Timeline.idle_inside_s`), then the shortest makespan. Orders tried:
    the pattern of ZB-H1 and ZB-H2 stretched to the limit (which is theirs for p and 2p-1, so this is never worse than
    they are), and the paper's heuristic, the pipeline run once with forwards up to the limit, I before W, and W where a
    rank would wait or has no room; its hyperparameters (who goes first; how much of a W has to fit into a gap) are all
    tried, which takes some 40 us per action (p=16, m=256: 0.7 s). Raises `ScheduleError`.
    """
    limit = pp if memory_limit is None else memory_limit
    if not isinstance(limit, int) or limit < 1:
        raise ScheduleError(
            f"memory_limit={limit!r} activations per rank: it takes a whole number of at least 1. "
            f"Use memory_limit={pp}."
        )
    times = {
        "forward_s": forward_s,
        "backward_input_s": backward_input_s,
        "backward_weight_s": backward_weight_s,
        "send_s": send_s,
    }
    problem = Problem(
        Placement.loop(pp, pp, num_microbatches),
        **{name: _per_stage(name, value, pp) for name, value in times.items()},
        activation=(1,) * pp,
        capacity=(float(limit),) * pp,
    )
    return to_schedule(problem, "ZBAuto", _best(problem, _orders(problem, limit)))


def _best(problem: Problem, orders: Iterator[Rows]) -> Rows:
    """The cheapest order; the first that leaves its busiest rank no idle time ends the search."""
    best, best_cost = next(orders), (inf, inf)
    for rows in chain([best], orders):
        cost = _cost(problem, rows)
        if cost < best_cost:
            best, best_cost = rows, cost
        if best_cost[0] <= problem.busiest_s:
            break
    return best


def _orders(problem: Problem, limit: int) -> Iterator[Rows]:
    """All orders that are tried."""
    pp, num_microbatches = problem.placement.num_ranks, problem.placement.num_microbatches
    hops = [pp - 1 - rank for rank in range(pp)]
    for held in [limit] + [smaller for smaller in (2 * pp - 1, pp) if smaller < limit]:
        capped = [min(hop + min(hop, max(0, held - pp)), held - 1) for hop in hops]
        spread = [hop * (held - 1) // max(1, pp - 1) for hop in hops]
        for warmups in (capped, spread):
            yield split_rows(staggered("ZBAuto", num_microbatches, warmups, limit=held))
    preferences: tuple[Literal["I", "turns"], ...] = ("I", "turns")
    for prefer, patience in product(preferences, (0.0, 0.5, 1.0)):
        yield dispatch(problem, Rule(prefer=prefer, chunk="first come", patience=patience))


def _cost(problem: Problem, rows: Rows) -> tuple[float, float]:
    """(longest time from a rank's first to its last action, makespan)."""
    times, duration_s = evaluate(problem.codes, rows), problem.codes.duration_s
    spans_s = [times.end_s[row[-1]] - times.end_s[row[0]] + duration_s[row[0]] for row in rows]
    return max(spans_s), times.makespan_s


def _per_stage(name: str, value: Seconds, num_stages: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
    if len(values) != num_stages:
        raise ScheduleError(
            f"{name} has {len(values)} values for {num_stages} stages. Give one number, or one per stage."
        )
    if any(not 0 <= each < inf for each in values):
        raise ScheduleError(f"{name} has a value that is no duration: {values}. Use finite seconds of at least 0.")
    return values
