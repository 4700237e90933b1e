"""Each pass against torch's own, against brute force, and on random legal schedules of every placement."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import (
    CATALOG,
    add_unshard,
    build,
    lower,
    merge_backward,
    split_backward,
)
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.messages import add_messages, unit_times
from shardproof.core.schedule.passes import add_reductions, add_steps
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.simulator.engine.engine import run_schedule
from shardproof.verify.schedule.check import check

BUILT = [
    ("GPipe", 1, 3, 4),
    ("1F1B", 1, 5, 8),
    ("1F1B", 1, 6, 3),
    ("Interleaved1F1B", 2, 2, 4),
    ("Interleaved1F1B", 3, 3, 6),
    ("Interleaved1F1B", 4, 4, 8),
    ("LoopedBFS", 5, 2, 4),
    ("InterleavedZeroBubble", 2, 3, 6),
    ("ZBH1", 1, 3, 6),
    ("ZBVZeroBubble", 2, 3, 6),
    ("DualPipeV", 2, 3, 8),
]
"""name, vpp, pp, microbatches."""

COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)


def built(name: str, vpp: int, pp: int, num_microbatches: int) -> Schedule:
    return build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def errors(schedule: Schedule) -> list[str]:
    return [str(finding) for finding in check(schedule) if finding.severity == "error"]


def row(schedule: Schedule, pp_rank: int = 0) -> str:
    return ",".join(map(str, schedule.row(pp_rank)))


def compute_of(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions if action.kind in COMPUTE] for actions in schedule.rows()]


@st.composite
def legal(draw: st.DrawFn, kinds: tuple[str, ...] = ("loop", "vee", "replicated", "explicit")) -> Schedule:
    """Any order in which the actions of any placement can run, with full, split and overlapped
    backwards: a random walk."""
    kind, pp, m = draw(st.sampled_from(kinds)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    pp = max(pp, 2) if kind == "replicated" else pp
    chance = draw(st.randoms(use_true_random=False))
    if kind == "replicated":
        m = max(m, 2)
        ranks = [tuple(chance.sample(range(pp), chance.choice((1, 2)))) for _ in range(draw(st.integers(1, 5)))]
        placement = Placement("replicated", pp, tuple(ranks), m)
    elif kind == "explicit":
        placement = Placement("explicit", pp, tuple((chance.randrange(pp),) for _ in range(draw(st.integers(1, 6)))), m)
    else:
        placement = Placement.vee(pp, m) if kind == "vee" else Placement.loop(pp, pp * draw(st.integers(1, 3)), m)
    return Schedule.from_rows("random", placement, random_walk(placement, chance))


def random_walk(placement: Placement, chance: random.Random) -> list[list[Action]]:
    last, m = placement.num_stages - 1, placement.num_microbatches
    cells = [(stage, microbatch) for stage in range(last + 1) for microbatch in range(m)]
    forwards, backwards, weights = set(cells), set(cells), set[tuple[int, int]]()
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    while forwards or backwards or weights:
        ready_f = sorted((s, i) for s, i in forwards if s == 0 or (s - 1, i) not in forwards)
        ready_b = sorted((s, i) for s, i in backwards - forwards if s == last or (s + 1, i) not in backwards)
        pairs = [(f, b) for f in ready_f for b in ready_b if placement.rank_of(*f) == placement.rank_of(*b)]
        kind = chance.choice("F" * bool(ready_f) + "BI" * bool(ready_b) + "W" * bool(weights) + "O" * bool(pairs))
        if kind == "O":
            forward, backward = chance.choice(pairs)
            rows[placement.rank_of(*forward)].append(Action.overlap(*forward, *backward))
            forwards.remove(forward)
            backwards.remove(backward)
            continue
        left = {"F": forwards, "B": backwards, "I": backwards, "W": weights}[kind]
        cell = chance.choice({"F": ready_f, "B": ready_b, "I": ready_b, "W": sorted(weights)}[kind])
        rows[placement.rank_of(*cell)].append(Action(cell[0], Kind[kind], cell[1]))
        left.remove(cell)
        if kind == "I":
            weights.add(cell)
    return rows


def blocking_run_ends(schedule: Schedule) -> bool:
    """Lists executed in order; a send ends only together with its receive, a replica's reduction
    together with the other's."""
    rows = [list(actions) for actions in schedule.rows()]
    placement = schedule.placement
    at = [0] * len(rows)

    def partner(action: Action, rank: int) -> tuple[Action, int] | None:
        match action.kind:
            case Kind.SEND_F:
                other = Action(action.stage + 1, Kind.RECV_F, action.microbatch)
            case Kind.SEND_B:
                other = Action(action.stage - 1, Kind.RECV_B, action.microbatch)
            case Kind.REDUCE_GRAD if len(placement.ranks[action.stage]) == 2:
                return action, sum(placement.ranks[action.stage]) - rank
            case _:
                return None
        return other, placement.rank_of(other.stage, other.microbatch)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(rows):
            while at[rank] < len(actions) and actions[at[rank]].kind not in (Kind.RECV_F, Kind.RECV_B):
                other = partner(actions[at[rank]], rank)
                if other is not None:
                    token, peer = other
                    if at[peer] == len(rows[peer]) or rows[peer][at[peer]] != token:
                        break
                    at[peer] += 1
                at[rank] += 1
                moved = True
    return at == [len(actions) for actions in rows]


@pytest.mark.parametrize("max_active_stages", [None, 2])
@pytest.mark.parametrize("pp", [1, 2, 3, 6])
@pytest.mark.parametrize("name", CATALOG)
def test_every_schedule_of_the_catalog_is_right_and_free_of_deadlock_once_lowered(
    name: str, pp: int, max_active_stages: int | None
) -> None:
    entry, sizes = CATALOG[name], [(vpp, m) for vpp in (1, 2, 3) for m in (1, 6, 12, 13)]
    legal_sizes = [(vpp, m) for vpp, m in sizes if entry.problem(pp=pp, vpp=vpp, num_microbatches=m) is None]
    for vpp, m in legal_sizes:
        lowered = lower(build(name, pp=pp, vpp=vpp, num_microbatches=m), max_active_stages=max_active_stages)
        assert errors(lowered) == []
        assert blocking_run_ends(lowered)


@given(legal())
@settings(max_examples=120, deadline=None)
def test_no_legal_order_of_any_placement_deadlocks_once_lowered(schedule: Schedule) -> None:
    lowered = lower(schedule)
    assert compute_of(split_backward(lowered)) == compute_of(split_backward(schedule))
    assert errors(lowered) == []
    assert blocking_run_ends(lowered)


@given(legal())
@settings(max_examples=50, deadline=None)
def test_lowering_merges_a_backward_exactly_where_neither_a_message_nor_anything_else_comes_between(
    schedule: Schedule,
) -> None:
    unmerged = add_messages(add_steps(add_reductions(schedule)))
    assert lower(schedule) == merge_backward(unmerged)
    sent = {(action.stage, action.microbatch) for action in unmerged.actions if action.kind is Kind.SEND_B}
    merged = compute_of(lower(schedule)) != compute_of(schedule)
    waits = [
        kinds
        for row in unmerged.rows()
        for kinds in pairwise(row)
        if (kinds[0].kind, kinds[1].kind) == (Kind.I, Kind.W)
    ]
    adjacent = [
        first for first, second in waits if (first.stage, first.microbatch) == (second.stage, second.microbatch)
    ]
    assert merged == bool(adjacent)
    assert not [first for first in adjacent if (first.stage, first.microbatch) in sent]


@given(legal(("replicated",)), st.integers(2, 4))
@settings(max_examples=50, deadline=None)
def test_two_direction_schedules_with_gathers_run_on_every_legal_order(
    schedule: Schedule, max_active_stages: int
) -> None:
    lowered = lower(schedule, max_active_stages=max_active_stages)
    assert errors(lowered) == []
    assert blocking_run_ends(lowered)


@given(legal(), st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_the_rules_hold_after_each_pass(schedule: Schedule, max_active_stages: int) -> None:
    for each in (
        lambda s: s,
        merge_backward,
        split_backward,
        merge_backward,
        lambda s: add_unshard(s, max_active_stages),
        add_reductions,
        add_steps,
        add_messages,
    ):
        schedule = each(schedule)
        assert errors(schedule) == []


@given(legal())
@settings(max_examples=30, deadline=None)
def test_passes_leave_their_argument_as_it_was(schedule: Schedule) -> None:
    before = [column.copy() for column in schedule.actions.columns]
    for each in (merge_backward, split_backward, add_unshard, add_reductions, add_steps, add_messages, lower):
        each(schedule)
    assert all(np.array_equal(a, b) for a, b in zip(before, schedule.actions.columns, strict=True))


def test_both_ranks_of_a_pair_that_end_forwards_together_do_not_both_send_first() -> None:
    """Two directions on two ranks: 0F0 on rank 0 and 0F1 on rank 1 end at once, each needed by the other rank."""
    lowered = lower(Schedule.from_csv("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n"))
    assert row(lowered, 0).startswith("0F0,0SEND_F0,1RECV_F1,")
    assert row(lowered, 1).startswith("0F1,1RECV_F0,0SEND_F1,")
    assert blocking_run_ends(lowered)


@pytest.mark.parametrize(
    ("name", "vpp", "pp", "num_microbatches"),
    [
        ("1F1B", 1, 8, 32),
        ("GPipe", 1, 7, 28),
        ("LoopedBFS", 2, 6, 24),
        ("LoopedBFS", 3, 5, 30),
        ("Interleaved1F1B", 4, 8, 24),
    ],
)
def test_blocking_rounds_are_at_most_1_6_per_message_of_the_busiest_rank(
    name: str, vpp: int, pp: int, num_microbatches: int
) -> None:
    """Were all stages of a moment to send in ascending order, each rank would wait for all below it: twice as
    many rounds and more."""
    lowered = lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches))
    rows = [
        [str(action) for action in actions if action.kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)]
        for actions in lowered.rows()
    ]
    most, rounds = max(map(len, rows)), 0
    while any(rows):
        heads = {cells[0] for cells in rows if cells}
        going = {cell for cell in heads if counterpart(cell) in heads}
        rows = [cells[1:] if cells and cells[0] in going else cells for cells in rows]
        rounds += 1
    assert rounds <= 1.6 * most


def counterpart(cell: str) -> str:
    action = Action.from_str(cell)
    match action.kind:
        case Kind.SEND_F:
            return str(Action(action.stage + 1, Kind.RECV_F, action.microbatch))
        case Kind.RECV_F:
            return str(Action(action.stage - 1, Kind.SEND_F, action.microbatch))
        case Kind.SEND_B:
            return str(Action(action.stage - 1, Kind.RECV_B, action.microbatch))
        case _:
            return str(Action(action.stage + 1, Kind.SEND_B, action.microbatch))


def test_replicas_list_their_reductions_in_one_order_as_soon_as_both_are_ready() -> None:
    """DualPipe p=4, m=10: of the outer stages, 0 is last on rank 0 and on rank 3; every pair of ranks lists
    its shared stages in the same way."""
    lowered = lower(build("DualPipe", pp=4, num_microbatches=10))
    order = [[action.stage for action in actions if action.kind is Kind.REDUCE_GRAD] for actions in lowered.rows()]
    assert order[0] == order[3]
    assert order[1] == order[2]
    assert sorted(order[0]) == [0, 3]
    assert sorted(order[1]) == [1, 2]


def test_replicas_of_a_list_with_messages_reduce_at_its_end_by_stage() -> None:
    """Its messages may have any order, which a reduction between them could tie into a circle."""
    lowered = lower(Schedule.from_csv("0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n"))
    retained = [
        [str(action) for action in actions if action.kind not in (Kind.REDUCE_GRAD, Kind.STEP)]
        for actions in lowered.rows()
    ]
    with_messages = Schedule.from_csv("\n".join(",".join(cells) for cells in retained))
    again = lower(with_messages)
    for rank in range(2):
        assert row(again, rank) == ",".join([*retained[rank], "0REDUCE_GRAD", "1REDUCE_GRAD", "0STEP"])
    assert errors(again) == []
    assert row(add_reductions(add_steps(with_messages)), 1) == row(again, 1)


# --- UNSHARD and RESHARD ---


def gaps(actions: list[Action]) -> list[tuple[str, list[int], list[int]]]:
    """Per compute action (and the end): its token, stages freed since the one before (sorted), and
    stages gathered, in order."""
    found, freed, gathered = [], list[int](), list[int]()
    for action in [*actions, None]:
        if action is not None and action.kind is Kind.RESHARD:
            freed.append(action.stage)
        elif action is not None and action.kind is Kind.UNSHARD:
            gathered.append(action.stage)
        else:
            found.append((str(action), sorted(freed), gathered))
            freed, gathered = [], []
    return found


@pytest.mark.parametrize("max_active_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", BUILT, ids=str)
def test_unshard_equals_torchs_pass(sizes: tuple[str, int, int, int], max_active_stages: int) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = built(*sizes)
    if max_active_stages == 1 and (schedule.actions.kind == Kind.OVERLAP_F_B).any():
        pytest.skip("a pair needs two stages: refused, see below")
    ours = add_unshard(schedule, max_active_stages)
    for rank, actions in enumerate(schedule.rows()):
        theirs = torch_schedules._add_unshard_reshard(
            [torch_schedules._Action.from_str(str(action)) for action in actions], max_active_stages
        )
        assert gaps(list(ours.row(rank))) == gaps([Action.from_str(str(action)) for action in theirs])


@given(legal(), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_never_more_than_max_active_stages_are_gathered_and_what_computes_is(
    schedule: Schedule, max_active_stages: int
) -> None:
    for actions in add_unshard(schedule, max_active_stages).rows():
        gathered = set[int]()
        for action in actions:
            if action.kind is Kind.UNSHARD:
                assert action.stage not in gathered
                gathered.add(action.stage)
                assert len(gathered) <= max_active_stages
            elif action.kind is Kind.RESHARD:
                gathered.remove(action.stage)
            else:
                assert {part.stage for part in action.parts} <= gathered
        assert gathered == set()


def num_gathers(schedule: Schedule, max_active_stages: int) -> list[int]:
    return [
        sum(action.kind is Kind.UNSHARD for action in actions)
        for actions in add_unshard(schedule, max_active_stages).rows()
    ]


def test_breadth_first_p3_m6_v4_gathers_7_times_with_one_stage_active_and_depth_first_at_every_change_of_chunk() -> (
    None
):
    """2v-1: each chunk once per direction, but the last one stays over the turn (Lamy-Poirier 2023, section 4.2)."""
    assert num_gathers(build("LoopedBFS", pp=3, vpp=4, num_microbatches=6), 1) == [7, 7, 7]
    depth_first = build("Interleaved1F1B", pp=3, vpp=4, num_microbatches=6)
    changes = [int(np.count_nonzero(np.diff(actions.stage))) for actions in depth_first.rows()]
    assert num_gathers(depth_first, 1) == [1 + count for count in changes]
    assert num_gathers(depth_first, 4) == [4, 4, 4]


def test_one_stage_per_rank_is_gathered_once_and_freed_after_its_reduction() -> None:
    lowered = lower(build("1F1B", pp=2, num_microbatches=2), max_active_stages=1)
    assert row(lowered, 1) == "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD,1STEP"


def test_gathers_that_a_file_has_are_kept() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,0F1,0B0,0RESHARD,0UNSHARD,0B1,0RESHARD")
    assert (
        row(lower(schedule, max_active_stages=3))
        == "0UNSHARD,0F0,0F1,0B0,0RESHARD,0UNSHARD,0B1,0REDUCE_GRAD,0RESHARD,0STEP"
    )


def test_gathers_are_freed_before_the_step_of_a_lowered_list() -> None:
    lowered = lower(Schedule.from_csv("0F0,0B0"))
    assert row(add_unshard(lowered)) == "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD,0STEP"


@pytest.mark.parametrize(("cells", "least"), [("0F0,0B0", 1), ("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1", 2)])
def test_too_few_active_stages_are_refused_with_the_least_that_suffice(cells: str, least: int) -> None:
    schedule = Schedule.from_csv(cells)
    assert errors(add_unshard(schedule, least)) == []
    with pytest.raises(ScheduleError, match=rf"max_active_stages={least - 1} does not suffice.*Use {least}\."):
        add_unshard(schedule, least - 1)


# --- reductions ---


@pytest.mark.parametrize("sizes", BUILT, ids=str)
def test_reductions_equal_torchs_pass(sizes: tuple[str, int, int, int]) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = built(*sizes)
    ours = add_reductions(schedule)
    for rank, actions in enumerate(schedule.rows()):
        theirs = torch_schedules._add_reduce_grad(
            [torch_schedules._Action.from_str(str(action)) for action in actions], schedule.num_microbatches
        )
        assert row(ours, rank) == ",".join(map(str, theirs))


def test_interleaved_p2_v4_staggers_its_reductions_over_the_cool_down() -> None:
    """Chunk by chunk, the last chunk first, with backwards of the other chunks between."""
    (first, *_) = add_reductions(build("Interleaved1F1B", pp=2, vpp=4, num_microbatches=4)).rows()
    places = [(place, action.stage) for place, action in enumerate(first) if action.kind is Kind.REDUCE_GRAD]
    assert [stage for _, stage in places] == [6, 4, 2, 0]
    assert all(later - earlier > 1 for (earlier, _), (later, _) in pairwise(places))


# --- merging and splitting backwards ---


@pytest.mark.parametrize("sizes", BUILT, ids=str)
def test_merging_equals_torchs_pass(sizes: tuple[str, int, int, int]) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = split_backward(built(*sizes))
    merged = merge_backward(schedule)
    for rank, actions in enumerate(schedule.rows()):
        theirs = torch_schedules._merge_bw([torch_schedules._Action.from_str(str(action)) for action in actions])
        assert row(merged, rank) == ",".join(map(str, theirs))


@given(legal())
@settings(max_examples=30, deadline=None)
def test_merging_undoes_splitting(schedule: Schedule) -> None:
    merged = merge_backward(schedule)
    split = split_backward(schedule)
    assert not (split.actions.kind == Kind.B).any()
    assert merge_backward(split) == merged == merge_backward(merged)
    assert split_backward(merged) == split


def test_a_w_of_another_microbatch_or_behind_a_message_or_on_the_next_rank_is_not_merged() -> None:
    for cells in ("0F0,0F1,0I0,0I1,0W0,0W1", "0F0,0I0\n0W0", "0F0,1F0,1I0,0I0,1W0,0W0"):
        schedule = Schedule.from_csv(cells)
        assert merge_backward(schedule) == schedule
    lowered = lower(Schedule.from_csv("0F0,0B0\n1F0,1I0,1W0"))
    assert merge_backward(lowered) == lowered


@pytest.mark.parametrize("pp", [2, 3, 5])
def test_splitting_1f1b_lets_the_input_gradient_leave_early_so_the_bubble_shrinks(pp: int) -> None:
    """1F1B with m=8: 3(m+p-1) for F=1, B=2; split, the drain passes I alone: (p-1)(F+I) + m(F+I+W)."""
    schedule = build("1F1B", pp=pp, num_microbatches=8)
    assert run_schedule(schedule).makespan_s == 3 * (8 + pp - 1)
    assert run_schedule(split_backward(schedule)).makespan_s < 3 * (8 + pp - 1)


# --- unit times ---


@pytest.mark.parametrize("sizes", BUILT, ids=str)
def test_unit_times_are_those_of_the_engine(sizes: tuple[str, int, int, int]) -> None:
    schedule = built(*sizes)
    start, end = unit_times(schedule)
    lowered = add_messages(add_steps(add_reductions(schedule)))
    spans = {(span.global_rank, str(span.action)): (span.start_s, span.end_s) for span in run_schedule(lowered).spans}
    ours = {
        (int(rank), str(action)): (float(start[i]), float(end[i]))
        for i, (rank, action) in enumerate(zip(schedule.pp_rank, schedule.actions, strict=True))
    }
    assert {key: spans[key] for key in ours} == ours
