"""Local improvement: moves on the critical path, accepted late.

Only a change on a longest path can shorten a schedule, and there only one that breaks a *block* (what a rank runs
without a pause on that path): moving an action out of it, to before its first or after its last, or its first or last
further in (Grabowski, Nowicki and Zdrzalka 1986, "A block approach for single-machine scheduling"; the neighbourhood of
job-shop searches since). A W is on the path only because it stands in the way, so this also moves W into the bubbles.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .search_problem import Codes, Problem, Rows, Times, evaluate, peak_held

HISTORY = 30
"""Length of the list of late-acceptance hill climbing (Burke and Bykov 2017): a move may be as bad as the
schedule this many moves ago."""


def improve(
    problem: Problem, rows: Rows, *, evaluations: int, target_s: float, seed: int = 0
) -> tuple[Rows, Times, int]:
    """The best order found from `rows`, its times, and how many orders were evaluated; stops early at `target_s`.

    Deterministic: moves are drawn from a generator with a fixed seed.
    """
    codes, draw = problem.codes, random.Random(seed)
    times = best_times = evaluate(codes, rows)
    best, used, failures = rows, 1, 0
    history = [_cost(times)] * HISTORY
    blocks = critical_blocks(codes, rows, times)
    while used < evaluations and best_times.makespan_s > target_s and blocks and failures < 1000:
        move = _draw_move(draw, blocks)
        row = _moved(problem, rows, *move)
        if row is None:
            failures += 1
            continue
        failures = 0
        candidate = [row if rank == move[0] else other for rank, other in enumerate(rows)]
        candidate_times = evaluate(codes, candidate)
        cost, late = _cost(candidate_times), used % HISTORY
        used += 1
        if cost <= history[late] or cost <= _cost(times):
            rows, times = candidate, candidate_times
            blocks = critical_blocks(codes, rows, times)
            if cost < _cost(best_times):
                best, best_times = rows, times
        history[late] = min(history[late], _cost(times))
    return best, best_times, used


def _cost(times: Times) -> tuple[float, float]:
    return times.makespan_s, times.total_s


def critical_blocks(codes: Codes, rows: Rows, times: Times) -> list[tuple[int, int, int]]:
    """(rank, first position, last position) of the blocks of one longest path that hold at least two actions."""
    blocks = []
    path = _critical_path(codes, rows, times)
    rank, last = next(path)
    first = last
    for next_rank, position in path:
        if next_rank == rank and position == first - 1:
            first = position
            continue
        blocks.append((rank, first, last))
        rank, first, last = next_rank, position, position
    blocks.append((rank, first, last))
    return [block for block in blocks if block[1] < block[2]]


def _critical_path(codes: Codes, rows: Rows, times: Times) -> Iterator[tuple[int, int]]:
    """(rank, position) along one longest path, backwards from the action that ends last."""
    end_s, N = times.end_s, codes.num_cells
    place = {code: (rank, position) for rank, row in enumerate(rows) for position, code in enumerate(row)}
    num_microbatches = 1 + max(codes.microbatch)
    rank, position = place[max((row[-1] for row in rows if row), key=lambda code: end_s[code])]
    while True:
        yield rank, position
        code = rows[rank][position]
        before_s = end_s[rows[rank][position - 1]] if position else 0.0
        maker = (
            code + (-num_microbatches if code < N else num_microbatches) if codes.need[code] != codes.nothing else None
        )
        if maker is not None and end_s[maker] + codes.send_s[maker] > before_s:
            rank, position = place[maker]
        elif position:
            position -= 1
        else:
            return


def _draw_move(draw: random.Random, blocks: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """(rank, from, to): an action of a block to one of its ends, an end to inside of it, or two
    neighbours exchanged."""
    rank, first, last = blocks[draw.randrange(len(blocks))]
    inside = draw.randint(first, last)
    source, target = (
        (inside, last),
        (inside, first),
        (last, inside),
        (first, inside),
        (inside, min(last, inside + 1)),
    )[draw.randrange(5)]
    return rank, source, target


def _moved(problem: Problem, rows: Rows, rank: int, source: int, target: int) -> list[int] | None:
    """The rank's row with one action moved, or None where that changes nothing, the order of F, I and W forbids
    it or memory is short."""
    codes, row = problem.codes, rows[rank]
    code = row[source]
    if source == target:
        return None
    if source < target:
        if any(codes.before(code, other) for other in row[source + 1 : target + 1]):
            return None
        moved = [*row[:source], *row[source + 1 : target + 1], code, *row[target + 1 :]]
    else:
        if any(codes.before(other, code) for other in row[target:source]):
            return None
        moved = [*row[:target], code, *row[target:source], *row[source + 1 :]]
    return moved if peak_held(codes, moved) <= problem.capacity[rank] else None
