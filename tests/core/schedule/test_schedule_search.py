"""`search_schedule` against exhaustive search, the simulator's engine, every named builder, and closed forms."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import CATALOG, build
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.messages import add_messages
from shardproof.core.schedule.passes import add_reductions, add_steps
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.core.schedule.search import search_schedule
from shardproof.core.schedule.search_bounds import lower_bound
from shardproof.core.schedule.search_problem import (
    Problem,
    evaluate,
    peak_held,
    split_rows,
    whole_rows,
)
from shardproof.core.schedule.search_rules import dispatch, rules
from shardproof.simulator.engine.engine import run_schedule
from shardproof.verify.schedule.check import check
from shardproof.verify.schedule.facts import ActivationMemory


@dataclass(frozen=True)
class Numbers:
    """A small search with whole numbers, so that all comparisons are exact."""

    pp: int
    vpp: int
    num_microbatches: int
    forward_s: list[int]
    backward_input_s: list[int]
    backward_weight_s: list[int]
    send_s: list[int]
    activation: list[int]
    capacity: list[int] | None

    @property
    def keywords(self) -> dict:
        return vars(self)

    @property
    def times(self) -> tuple[list[int], ...]:
        return self.forward_s, self.backward_input_s, self.backward_weight_s, self.send_s

    def problem(self, placement: Placement) -> Problem:
        capacity = (math.inf,) * self.pp if self.capacity is None else tuple(self.capacity)
        return Problem(placement, *(tuple(map(float, times)) for times in self.times), tuple(self.activation), capacity)


@st.composite
def numbers(draw: st.DrawFn, max_pp: int = 6, max_microbatches: int = 10) -> Numbers:
    """Ranks, chunks, microbatches, times, units and capacities that some schedule fits."""
    pp, vpp, m = draw(st.integers(1, max_pp)), draw(st.integers(1, 3)), draw(st.integers(1, max_microbatches))
    of_stage = lambda low, high: draw(st.lists(st.integers(low, high), min_size=pp * vpp, max_size=pp * vpp))  # noqa: E731
    times = [of_stage(1, 9) for _ in range(3)]
    send, activation = of_stage(0, 4), of_stage(1, 3)
    # Of a vee or a loop a rank holds other stages; room for the two largest-case sums fits both.
    loop = [sum(activation[rank::pp]) for rank in range(pp)]
    room = [least + draw(st.integers(0, 3 * least)) for least in loop] if draw(st.booleans()) else None
    return Numbers(pp, vpp, m, *times, send, activation, room)


def makespan_s(schedule: Schedule, given_: Numbers) -> float:
    return float(run_schedule(schedule, *given_.times).spans.end_s.max())


def peaks(schedule: Schedule, activation: list[int]) -> list[int]:
    """Per rank, the most units held when each F holds them until its B or W ends."""
    result = []
    for row in schedule.rows():
        held = most = 0
        for action in row:
            for part in action.parts:
                held += {Kind.F: 1, Kind.I: 0}.get(part.kind, -1) * activation[part.stage]
                most = max(most, held)
        result.append(most)
    return result


# The evaluation


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_evaluation_is_the_engines_to_the_last_bit(name: str) -> None:
    draw, compared = random.Random(name), 0
    for pp in (1, 2, 3, 4, 5, 6, 8):
        for m, vpp in ((1, 1), (5, 1), (16, 1), (3, 2), (16, 2), (6, 3), (12, 3)):
            try:
                schedule = build(name, pp=pp, num_microbatches=m, vpp=vpp)
            except ScheduleError:
                continue
            times = [[draw.uniform(0.1, 2.0) for _ in range(schedule.num_stages)] for _ in range(4)]
            # some messages longer than the work between them
            times[3] = [draw.choice([0.0, 0.3, 3.0]) for _ in times[3]]
            problem = Problem(schedule.placement, *map(tuple, times), (1,) * schedule.num_stages, (math.inf,) * pp)
            # `lower` also merges I and W, which rounds I + W first
            lowered = add_messages(add_steps(add_reductions(schedule)))
            ends = run_schedule(lowered, *times).spans.end_s
            assert evaluate(*whole_rows(problem, schedule)).makespan_s == ends.max()
            compared += 1
    assert compared >= 4


def test_cutting_backwards_and_pairs_never_costs_time_or_memory() -> None:
    for name, vpp in (("1F1B", 1), ("GPipe", 1), ("DualPipeV", 2), ("Interleaved1F1B", 2)):
        schedule = build(name, pp=3, num_microbatches=7, vpp=vpp)
        count = schedule.num_stages
        problem = Problem(
            schedule.placement,
            (2.0,) * count,
            (3.0,) * count,
            (1.0,) * count,
            (0.5,) * count,
            (1,) * count,
            (math.inf,) * 3,
        )
        codes, whole = whole_rows(problem, schedule)
        rows = split_rows(schedule)
        assert evaluate(problem.codes, rows).makespan_s <= evaluate(codes, whole).makespan_s
        assert (
            [peak_held(problem.codes, row) for row in rows]
            == [peak_held(codes, row) for row in whole]
            == peaks(schedule, [1] * count)
        )


# Against exhaustive search


class Exhaustive:
    """Whether any schedule ends before a given time: every rank, whenever it is free, tries all it could
    start, and waiting one second.

    Nothing here knows the library's search. Times are whole seconds, so every schedule is among those tried, except
    that after a wait only what has just arrived is started: anything else could have started before the wait. What
    cannot end in time is given up.
    """

    def __init__(self, given_: Numbers, placement: Placement, before_s: int):
        self.given, self.before_s = given_, before_s
        self.owner = [
            [placement.rank_of(stage, m) for m in range(given_.num_microbatches)]
            for stage in range(placement.num_stages)
        ]
        self.last = placement.num_stages - 1
        work = [sum(times) for times in zip(*given_.times[:3], strict=True)]
        self.left_s = [0] * given_.pp
        for stage, ranks in enumerate(self.owner):
            for rank in ranks:
                self.left_s[rank] += work[stage]
        self.clock, self.held = [0] * given_.pp, [0] * given_.pp
        # (kind, stage, microbatch) -> when its input is there
        self.ready: dict[tuple[str, int, int], int] = {
            ("F", 0, microbatch): 0 for microbatch in range(given_.num_microbatches)
        }
        self.lane_free: dict[tuple[int, int, bool], int] = {}
        self.waited = [False] * given_.pp
        self.seen: set = set()
        self.chain_s = self.chains()

    def chains(self) -> dict[tuple[str, int], int]:
        """(kind, stage) -> the least time from the start of such an action to the end of the last W
        that follows from it."""
        forward, backward, weight, send = self.given.times
        chain = {("W", stage): seconds for stage, seconds in enumerate(weight)}
        for stage in range(self.last + 1):
            hop = send[stage] if stage and self.owner[stage] != self.owner[stage - 1] else 0  # on all routes or on none
            chain["I", stage] = backward[stage] + max(weight[stage], hop + chain["I", stage - 1] if stage else 0)
        for stage in range(self.last, -1, -1):
            hop = send[stage] if stage < self.last and self.owner[stage] != self.owner[stage + 1] else 0
            chain["F", stage] = forward[stage] + (
                hop + chain["F", stage + 1] if stage < self.last else chain["I", stage]
            )
        return chain

    def finds_one(self) -> bool:
        if all(left == 0 for left in self.left_s):
            return True
        if any(left and self.clock[rank] + left >= self.before_s for rank, left in enumerate(self.left_s)):
            return False
        if any(
            max(ready_s, self.clock[self.owner[op[1]][op[2]]]) + self.chain_s[op[:2]] >= self.before_s
            for op, ready_s in self.ready.items()
        ):
            return False
        state = (
            *self.clock,
            *self.held,
            *self.waited,
            frozenset(self.ready.items()),
            frozenset(self.lane_free.items()),
        )
        if state in self.seen:
            return False
        self.seen.add(state)
        rank = min((rank for rank, left in enumerate(self.left_s) if left), key=lambda rank: self.clock[rank])
        now = self.clock[rank]
        entering = [m for kind, stage, m in self.ready if (kind, stage) == ("F", 0) and self.owner[0][m] == rank]
        for (kind, stage, microbatch), ready_s in sorted(self.ready.items()):
            if self.owner[stage][microbatch] != rank or ready_s > now or (self.waited[rank] and ready_s < now):
                continue
            if (kind, stage) == ("F", 0) and microbatch > min(entering):
                continue  # microbatches of one route are equal, so they enter in order
            if (
                kind == "F"
                and self.given.capacity
                and self.held[rank] + self.given.activation[stage] > self.given.capacity[rank]
            ):
                continue
            if self.try_starting(rank, kind, stage, microbatch):
                return True
        waited = self.waited[rank]
        self.clock[rank], self.waited[rank] = now + 1, True
        found = self.finds_one()
        self.clock[rank], self.waited[rank] = now, waited
        return found

    def try_starting(self, rank: int, kind: str, stage: int, microbatch: int) -> bool:
        before = (self.clock[:], self.held[:], self.left_s[:], dict(self.ready), dict(self.lane_free), self.waited[:])
        self.waited[rank] = False
        duration = self.given.times["FIW".index(kind)][stage]
        end = self.clock[rank] = self.clock[rank] + duration
        self.left_s[rank] -= duration
        del self.ready[kind, stage, microbatch]
        if kind == "F":
            self.held[rank] += self.given.activation[stage]
            if stage < self.last:
                self.ready["F", stage + 1, microbatch] = self.arrival(end, microbatch, stage, stage + 1)
            else:
                self.ready["I", stage, microbatch] = end
        elif kind == "I":
            self.ready["W", stage, microbatch] = end
            if stage:
                self.ready["I", stage - 1, microbatch] = self.arrival(end, microbatch, stage, stage - 1)
        else:
            self.held[rank] -= self.given.activation[stage]
        found = self.finds_one()
        self.clock, self.held, self.left_s, self.ready, self.lane_free, self.waited = before
        return found

    def arrival(self, end: int, microbatch: int, stage: int, target: int) -> int:
        source_rank, target_rank = self.owner[stage][microbatch], self.owner[target][microbatch]
        if source_rank == target_rank:
            return end
        lane = (source_rank, target_rank, target > stage)
        self.lane_free[lane] = max(end, self.lane_free.get(lane, 0)) + self.given.send_s[stage]
        return self.lane_free[lane]


SMALL = [(2, 1, 2), (2, 1, 3), (3, 1, 2), (3, 1, 3), (2, 2, 2)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("pp", "vpp", "m"), SMALL)
def test_no_schedule_at_all_is_faster_at_tiny_sizes(pp: int, vpp: int, m: int, seed: int) -> None:
    draw = random.Random(f"{pp} {vpp} {m} {seed}")
    times = [[draw.randint(1, 4) for _ in range(pp * vpp)] for _ in range(3)]
    send = [draw.randint(0, 2) for _ in range(pp * vpp)]
    room = [vpp + draw.randint(0, 2) for _ in range(pp)] if seed % 3 else None
    given_ = Numbers(pp, vpp, m, *times, send, [1] * (pp * vpp), room)
    result = search_schedule(**given_.keywords)
    placements = [Placement.loop(pp, pp * vpp, m)] + ([Placement.vee(pp, m)] if vpp == 2 else [])
    assert not any(Exhaustive(given_, placement, int(result.makespan_s)).finds_one() for placement in placements)
    # The oracle itself is awake: it finds what the search found.
    assert Exhaustive(given_, result.schedule.placement, int(result.makespan_s) + 1).finds_one()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 3), (2, 4), (4, 2)])
def test_no_two_direction_schedule_is_faster_at_tiny_sizes(pp: int, m: int, seed: int) -> None:
    draw = random.Random(f"{pp} {m} {seed}")
    times = [[draw.randint(1, 4) for _ in range(pp)] for _ in range(3)]
    given_ = Numbers(
        pp, 1, m, *times, [draw.randint(0, 2) for _ in range(pp)], [1] * pp, [2] * pp if seed % 2 else None
    )
    result = search_schedule(**given_.keywords, replicas=True)
    for placement in (Placement.loop(pp, pp, m), Placement.replicated(pp, m)):
        assert not Exhaustive(given_, placement, int(result.makespan_s)).finds_one()


@given(numbers(max_pp=3, max_microbatches=4), st.sampled_from(["loop", "vee", "replicated"]))
@settings(max_examples=60)
def test_no_schedule_ends_before_the_lower_bound(given_: Numbers, kind: str) -> None:
    """Exhaustive search, where it is quick: up to eight cells."""
    pp, m = given_.pp, given_.num_microbatches
    num_chunks = {"loop": given_.vpp, "vee": 2, "replicated": 1}[kind]
    assume(given_.vpp == num_chunks and pp * num_chunks * m <= 8 and (kind != "replicated" or pp == 2))
    loop = Placement.loop(pp, pp * given_.vpp, m)
    placement = {"loop": loop, "vee": Placement.vee(pp, m), "replicated": Placement.replicated(pp, m)}[kind]
    problem = given_.problem(placement)
    assume(all(room >= least for room, least in zip(problem.capacity, problem.smallest_capacity, strict=True)))
    assert not Exhaustive(given_, placement, math.ceil(lower_bound(problem).seconds)).finds_one()


# Against the named schedules


FITS_BY_AN_OPTION = Numbers(
    pp=4,
    vpp=1,
    num_microbatches=4,
    forward_s=[1, 1, 1, 1],
    backward_input_s=[1, 1, 1, 1],
    backward_weight_s=[1, 1, 1, 1],
    send_s=[0, 0, 0, 0],
    activation=[2, 2, 1, 2],
    capacity=[8, 6, 3, 6],
)
"""1F1B fits, ZBAuto only with its `memory_limit`."""


@example(FITS_BY_AN_OPTION)
@given(numbers())
@settings(max_examples=40)
def test_search_is_never_worse_than_a_named_schedule_that_fits_and_passes_check(given_: Numbers) -> None:
    result = search_schedule(**given_.keywords, evaluations=100)
    assert result.makespan_s == makespan_s(result.schedule, given_)
    assert result.makespan_s >= result.lower_bound_s
    assert list(result.peak_activation) == peaks(result.schedule, given_.activation)
    room = given_.capacity or [10**6] * given_.pp
    memory = ActivationMemory(stage_bytes=tuple(given_.activation), capacity_bytes=tuple(room))
    assert check(result.schedule, memory) == []
    fitting = {}
    for name in CATALOG:
        try:
            named = build(name, pp=given_.pp, num_microbatches=given_.num_microbatches, vpp=given_.vpp)
        except ScheduleError:
            continue
        fits = all(held <= limit for held, limit in zip(peaks(named, given_.activation), room, strict=True))
        if fits and all(len(owners) == 1 for owners in named.placement.ranks):
            fitting[name] = makespan_s(named, given_)
            assert result.makespan_s <= fitting[name], name
    if fitting:  # an option of a builder may do better than its default, and fit where that does not
        assert result.best_named in CATALOG and result.best_named_s <= min(fitting.values())


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (3, 6), (4, 8), (5, 12), (6, 6), (8, 32)])
def test_with_the_memory_of_1f1b_and_equal_times_zb_h1_is_proved_optimal(pp: int, m: int) -> None:
    """Qi et al. 2023: m(F+I+W) + (p-1)(F+I-W), which for F=I=W is the bound of the forwards that fit
    before the first gradient."""
    result = search_schedule(pp=pp, num_microbatches=m, capacity=pp)
    assert result.makespan_s == result.lower_bound_s == 3 * m + pp - 1
    assert result.gap == 0


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (3, 5), (5, 4)])
def test_with_room_for_one_microbatch_they_run_one_after_the_other(pp: int, m: int) -> None:
    result = search_schedule(
        pp=pp, num_microbatches=m, forward_s=2, backward_input_s=3, backward_weight_s=5, send_s=1, capacity=1
    )
    assert result.makespan_s == result.lower_bound_s == m * (2 * pp + 3 * pp + 2 * (pp - 1) + 5)


def test_uneven_vee_p4_m16_is_proved_optimal_at_848_s_which_no_named_one_reaches() -> None:
    """First and last stage hold embedding and head; the memory of 1F1B, which is room for eight
    activations of half a rank."""
    times = {
        "forward_s": [8, 7, 7, 7, 7, 7, 7, 12],
        "backward_input_s": [7, 8, 8, 8, 8, 8, 8, 11],
        "backward_weight_s": [6, 6, 6, 6, 6, 6, 6, 9],
        "send_s": 0.5,
    }
    result = search_schedule(pp=4, vpp=2, num_microbatches=16, capacity=8, evaluations=1000, **times)
    assert result.makespan_s == result.lower_bound_s == 848
    assert result.best_named_s > 848
    assert result.schedule.name == "search"
    assert float(run_schedule(result.schedule, *times.values()).spans.end_s.max()) == 848


def test_two_directions_with_less_memory_than_dualpipe_p4_m16() -> None:
    """DualPipe holds p+1 = 5 and takes 50 s; with room for 4 the search reaches the same."""
    assert search_schedule(pp=4, num_microbatches=16, capacity=5, replicas=True).best_named == "DualPipe"
    result = search_schedule(pp=4, num_microbatches=16, capacity=4, replicas=True)
    assert result.schedule.placement.kind == "replicated"
    assert result.makespan_s <= 50
    assert check(result.schedule, ActivationMemory((1,) * 4, (4,) * 4)) == []


# Rules


def test_where_two_directions_meet_memory_admits_one_though_the_other_came_first() -> None:
    """The middle rank of five has room for one microbatch, and the second direction's entered first."""
    zero = (0.0,) * 5
    placement = Placement.replicated(5, 7)
    problem = Problem(
        placement, zero, zero, (0.0, 0.0, 0.0, 6.0, 0.0), (2.0, 0.0, 0.0, 5.0, 0.0), (3, 1, 1, 2, 2), (7, 3, 1, 6, 4)
    )
    for rule in rules(problem):
        assert sum(map(len, dispatch(problem, rule))) == 3 * placement.num_stages * 7


@given(
    numbers(max_pp=5, max_microbatches=7),
    st.sampled_from(["loop", "vee", "replicated"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_every_rule_runs_every_action_once_within_its_limit_however_tight(
    given_: Numbers, kind: str, draw: random.Random
) -> None:
    pp, m = given_.pp, given_.num_microbatches
    loop = Placement.loop(pp, pp * given_.vpp, m)
    placement = {"loop": loop, "vee": Placement.vee(pp, m), "replicated": Placement.replicated(pp, m)}[kind]
    count = placement.num_stages
    units = tuple(draw.randint(1, 3) for _ in range(count))
    times = [tuple(float(draw.randint(0, 9)) for _ in range(count)) for _ in range(4)]
    least = Problem(placement, *times, units, (math.inf,) * pp).smallest_capacity
    problem = Problem(placement, *times, units, tuple(units + draw.choice([0, 0, 1, 4]) for units in least))
    for rule in draw.sample(list(rules(problem)), 5):
        rows = dispatch(problem, rule)
        cells = placement.num_stages * m
        assert sorted(code for row in rows for code in row) == [*range(cells), *range(2 * cells, 4 * cells)]
        assert evaluate(problem.codes, rows).makespan_s < math.inf
        assert all(peak_held(problem.codes, row) <= room for row, room in zip(rows, problem.capacity, strict=True))


# The edges


def test_same_arguments_give_the_same_schedule() -> None:
    given_ = {
        "pp": 5,
        "num_microbatches": 9,
        "forward_s": [3, 1, 4, 1, 5],
        "send_s": 0.7,
        "capacity": 3,
        "evaluations": 400,
    }
    first, second = search_schedule(**given_), search_schedule(**given_)
    assert first.schedule.to_csv() == second.schedule.to_csv()
    assert first == second


def test_more_evaluations_are_never_worse() -> None:
    given_ = {"pp": 3, "vpp": 2, "num_microbatches": 5, "forward_s": [3, 1, 4, 1, 5, 9], "send_s": 0.5, "capacity": 3}
    found = [search_schedule(**given_, evaluations=count).makespan_s for count in (1, 50, 2000)]
    assert found == sorted(found, reverse=True)


def test_one_rank_is_all_work_and_one_microbatch_is_one_chain() -> None:
    assert search_schedule(pp=1, num_microbatches=7, forward_s=2).makespan_s == 7 * 4
    result = search_schedule(pp=5, num_microbatches=1, send_s=2)
    assert result.makespan_s == result.lower_bound_s == 5 + 5 + 1 + 2 * 8


def test_tenths_fit_exactly() -> None:
    """Three activations of 0.1 units fit into 0.3, although in floating point their sum does not."""
    result = search_schedule(pp=3, num_microbatches=6, activation=0.1, capacity=0.3)
    assert result.best_named == "ZBH1"
    assert result.peak_activation == (0.3, 0.3, 0.3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"capacity": 1}, r"capacity=1 of rank 0 is less than the 2 units .*stages 0, 3.*The smallest capacity is 5\."),
        (
            {"capacity": [2, 6, 4]},
            r"capacity=4 of rank 2 is less than the 5 units .*stages 2, 5.*The smallest capacity is \(2, 2, 5\)\.",
        ),
        (
            {"capacity": [0.5, 0.5, 1], "activation": 0.5},
            r"capacity=0.5 of rank 0 is less than the 1 units .*is \(1, 1, 1\)\.",
        ),
        ({"capacity": -1}, "capacity has a value that cannot be"),
        ({"forward_s": [1, 2]}, "forward_s has 2 values for 6 stages"),
        ({"send_s": math.inf}, "send_s has a value that cannot be"),
        ({"replicas": True}, "replicas=True needs one stage per rank and an even pp"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be a whole number"),
        ({"evaluations": 0}, "evaluations=0 must be a whole number"),
    ],
)
def test_impossible_searches_are_refused_with_what_would_do(keywords: dict, message: str) -> None:
    given_ = {"pp": 3, "vpp": 2, "num_microbatches": 4, "activation": [1, 1, 1, 1, 1, 4]}
    with pytest.raises(ScheduleError, match=message):
        search_schedule(**(given_ | keywords))


def test_the_smallest_capacity_that_an_error_names_is_enough() -> None:
    given_ = {"pp": 3, "vpp": 2, "num_microbatches": 4, "activation": [1, 1, 1, 1, 1, 4], "evaluations": 200}
    assert max(search_schedule(**given_, capacity=5).peak_activation) == 5
    loop = search_schedule(**given_, capacity=[2, 2, 5])
    assert loop.schedule.placement.kind == "loop"
    assert loop.peak_activation == (2, 2, 5)
