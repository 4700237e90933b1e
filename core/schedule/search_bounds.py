"""Lower bounds on the makespan of any schedule of a `Problem`, with their proofs.

All hold for F, I, W and for full backwards B and overlapped pairs that take the sum of their parts: such a schedule
stays feasible and ends no later when every B is cut into I and W and every pair into F, I and W. Write a(s) for the
activation units of stage s, and for one route of microbatches over the ranks, without any waiting,

    head(X)  the time before an action X can start:  head F(s) = sum over t < s of F(t) and its send;
             head I(s) = head F(S-1) + F(S-1) + sum over t > s of I(t) and its send;  head W(s) = head I(s) + I(s)
    tail(X)  the time that has to follow its end:    tail W(s) = 0;  tail I(s) = max(W(s), send + I(s-1) + tail I(s-1));
             tail F(s) = (head I(s) - head F(s) - F(s)) + I(s) + tail I(s)

Both are sums along chains in which every part waits for the one before, so they hold in every schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .action import Kind
from .search_problem import Problem, Route


@dataclass(frozen=True)
class Bound:
    """A number of seconds that no schedule beats, and which argument says so."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class _Job:
    """`count` actions of one kind and stage on one rank (or messages of one stage on one lane)."""

    count: int
    duration_s: float
    head_s: float
    tail_s: float


@dataclass(frozen=True)
class _Class:
    """The microbatches of one route in one stage: their three kinds of action on the rank that holds the stage.

    `joint` is the sum of the activations of this and all earlier stages of the route on the rank.
    """

    stage: int
    rank: int
    count: int
    activation: int
    joint: int
    forward: _Job
    backward_input: _Job
    backward_weight: _Job

    @property
    def residence_s(self) -> float:
        """Least time from the start of F to the end of W: what was sent forward has to come
        back as a gradient first."""
        return self.joint_s + self.backward_weight.duration_s

    @property
    def joint_s(self) -> float:
        """Least time from the start of F to the end of I, during which the earlier stages of the
        rank are held as well."""
        return self.backward_weight.head_s - self.forward.head_s


def lower_bound(problem: Problem) -> Bound:
    """The best of all bounds in this module; the reason names the rank or lane it speaks of."""
    classes = [each for route in problem.routes for each in _classes(problem, route)]
    bounds = [*_lane_bounds(problem)]
    for rank in range(problem.placement.num_ranks):
        here = [each for each in classes if each.rank == rank]
        if here:
            bounds += _rank_bounds(here, problem.capacity[rank], rank)
    return max(bounds, key=lambda bound: bound.seconds)


def _rank_bounds(here: list[_Class], capacity: float, rank: int) -> Iterator[Bound]:
    jobs = [job for each in here for job in (each.forward, each.backward_input, each.backward_weight)]
    yield Bound(_machine_s(jobs), f"work, head and tail of rank {rank}")
    if math.isfinite(capacity):
        yield Bound(_filling_s(here, capacity), f"forwards that rank {rank} can hold before its first gradient arrives")
        slots_s = [
            _slots_s(each, int(capacity // each.activation), each.residence_s) for each in here if each.activation
        ]
        slots_s += [_slots_s(each, int(capacity // each.joint), each.joint_s) for each in here if each.joint]
        yield Bound(max(slots_s, default=0.0), f"memory slots of rank {rank}, reused one after the other")
        yield Bound(_area_s(here, capacity), f"memory times time of rank {rank}")


def _machine_s(jobs: list[_Job]) -> float:
    """max over h, q of h + (work of the jobs with head >= h and tail >= q) + q.

    A rank and a lane run one thing at a time. Of any set of jobs the first starts no earlier than the smallest head,
    then all their work is done on this machine, and the last to end is followed by at least the smallest tail. (Carlier
    1982, "The one-machine sequencing problem", section 2; sets given by a head and a tail are enough for the maximum.)
    """
    best = 0.0
    for head_s in {job.head_s for job in jobs}:
        work_s = 0.0
        for job in sorted((job for job in jobs if job.head_s >= head_s), key=lambda job: -job.tail_s):
            work_s += job.count * job.duration_s
            best = max(best, head_s + work_s + job.tail_s)
    return best


def _filling_s(here: list[_Class], capacity: float) -> float:
    """E + (work of the rank) - K + (least tail), with E the smallest head of its I, and K the most forward
    time that `capacity` holds.

    Before E only forwards run on the rank, as W follows I. Nothing is freed by then, so what started is held at once
    and fits: it is K seconds of work at most. The other work lies after E. Counting F and I alone, the last of them is
    an I or is followed by one, so the smallest tail of the I is added; with W the tail is 0. On rank 0 of p equal
    stages, with room for p microbatches, E is pF + (p-1)I and K is pF: m(F+I+W) + (p-1)I, which is the makespan of
    ZB-H1 for F = I = W. ZB-H1 is therefore optimal there.
    """
    earliest_s = min(each.backward_input.head_s for each in here)
    held_s = _most_forward_s(here, capacity)
    critical_s = sum(each.count * (each.forward.duration_s + each.backward_input.duration_s) for each in here)
    weight_s = sum(each.count * each.backward_weight.duration_s for each in here)
    tail_s = min(each.backward_input.tail_s for each in here)
    return earliest_s - held_s + critical_s + max(weight_s, tail_s)


def _most_forward_s(here: list[_Class], capacity: float) -> float:
    """An upper bound on the forward time of activations that fit together: exact for equal activations, else
    the fractional knapsack."""
    free, total_s = capacity, 0.0
    whole = len({each.activation for each in here}) == 1
    for each in sorted(
        here, key=lambda each: -each.forward.duration_s / each.activation if each.activation else -math.inf
    ):
        room = (
            free // each.activation
            if whole and each.activation
            else free / each.activation
            if each.activation
            else math.inf
        )
        count = min(each.count, room)
        free -= count * each.activation
        total_s += count * each.forward.duration_s
    return total_s


def _slots_s(each: _Class, slots: int, residence_s: float) -> float:
    """head F + q R + r F + F + tail F, for n microbatches of which k at most are held at once, each for
    R: q, r = divmod(n-1, k).

    When the i-th forward (in order of start, from 0) starts, at most k-1 others are held, so i-k+1 have ended, and
    the last start among those is at least R ago: start(i) >= start(i-k) + R. Forwards of one rank do not overlap:
    start(r) >= head F + r F. So start(n-1) >= head F + r F + q R, and F and its tail follow. Used twice, with k =
    floor(capacity / units):

    - for the units of the stage alone, R being its whole residence;
    - for those of the stage and all earlier ones of the rank together, R being the time from F to the end of I: the
      earlier stages are held since before that F, and neither their W nor this one's can end before that I does.
    """
    rounds, rest = divmod(each.count - 1, slots)
    forward = each.forward
    return forward.head_s + rounds * residence_s + (rest + 1) * forward.duration_s + forward.tail_s


def _area_s(here: list[_Class], capacity: float) -> float:
    """(least head F) + sum of n a R over the stages of the rank / capacity: what is held, integrated over time, is n a
    R at least, and is never above `capacity` between the first forward and the end."""
    area = sum(each.count * each.activation * each.residence_s for each in here)
    return min(each.forward.head_s for each in here) + (area / capacity if area else 0.0)


def _classes(problem: Problem, route: Route) -> list[_Class]:
    """Heads and tails of a route, by stage."""
    forward_s, input_s, weight_s = problem.forward_s, problem.backward_input_s, problem.backward_weight_s
    num_stages, count = len(route.ranks), len(route.microbatches)
    hops_s = _hops_s(problem, route)
    forward_head, input_head = [0.0] * num_stages, [0.0] * num_stages
    for stage in range(1, num_stages):
        forward_head[stage] = forward_head[stage - 1] + forward_s[stage - 1] + hops_s[0][stage - 1]
    input_head[-1] = forward_head[-1] + forward_s[-1]
    for stage in range(num_stages - 2, -1, -1):
        input_head[stage] = input_head[stage + 1] + input_s[stage + 1] + hops_s[1][stage]
    input_tail = [weight_s[0]]
    for stage in range(1, num_stages):
        input_tail.append(max(weight_s[stage], hops_s[1][stage - 1] + input_s[stage - 1] + input_tail[stage - 1]))
    classes: list[_Class] = []
    for stage, rank in enumerate(route.ranks):
        forward_tail = input_head[stage] - forward_head[stage] - forward_s[stage] + input_s[stage] + input_tail[stage]
        jobs = (
            _Job(count, forward_s[stage], forward_head[stage], forward_tail),
            _Job(count, input_s[stage], input_head[stage], input_tail[stage]),
            _Job(count, weight_s[stage], input_head[stage] + input_s[stage], 0.0),
        )
        joint = sum(problem.activation[other] for other in route.stages_on(rank) if other <= stage)
        classes.append(_Class(stage, rank, count, problem.activation[stage], joint, *jobs))
    return classes


def _hops_s(problem: Problem, route: Route) -> tuple[list[float], list[float]]:
    """Seconds of the message between stages s and s+1, forward and backward: 0 on one rank."""
    crossing = [here != there for here, there in pairwise(route.ranks)]
    forward = [problem.send_s[stage] if crosses else 0.0 for stage, crosses in enumerate(crossing)]
    return forward, [problem.send_s[stage + 1] if crosses else 0.0 for stage, crosses in enumerate(crossing)]


def _lane_bounds(problem: Problem) -> Iterator[Bound]:
    """The one-machine bound of every lane: the messages of one direction between two ranks
    are sent one after the other."""
    lanes: dict[tuple[int, int, Kind], list[_Job]] = {}
    for route in problem.routes:
        hops_s, classes = _hops_s(problem, route), _classes(problem, route)
        for below, above in pairwise(classes):
            for kind, source, target in ((Kind.SEND_F, below, above), (Kind.SEND_B, above, below)):
                made, used = (each.forward if kind is Kind.SEND_F else each.backward_input for each in (source, target))
                send_s = hops_s[kind is Kind.SEND_B][below.stage]
                job = _Job(below.count, send_s, made.head_s + made.duration_s, used.duration_s + used.tail_s)
                if source.rank != target.rank:
                    lanes.setdefault((source.rank, target.rank, kind), []).append(job)
    for (source_rank, target_rank, kind), jobs in lanes.items():
        yield Bound(_machine_s(jobs), f"messages ({kind.name}) from rank {source_rank} to rank {target_rank}")
