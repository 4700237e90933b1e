"""`check`: silent on every schedule that runs right, and on no other. The oracle is a plain blocking execution of the lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.action import Action, Kind
from shardproof.core.errors import ScheduleError
from shardproof.core.schedule import Placement, Schedule
from shardproof.core.schedules import CATALOG, build, lower
from shardproof.verify.check import check, examine
from shardproof.verify.rules import RULES, ActivationMemory, View
from shardproof.verify.rules.memory import peak_in_flight

VEE = "0F0,0F1,5F0,5I0,5F1,5B1,5W0,0B0,0B1\n1F0,1F1,4F0,4F1,4I0,4B1,4W0,1B0,1B1\n2F0,3F0,2F1,3F1,3B0,2B0,3I1,3W1,2B1\n"
PAIRS = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
TWO_DIRECTIONS = "0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n"


@st.composite
def builds(draw: st.DrawFn, max_pp: int = 7, max_microbatches: int = 13) -> Schedule:
    name = draw(st.sampled_from(sorted(CATALOG)))
    vpp = draw(st.integers(2, 4)) if CATALOG[name].chunks else 1
    return build(name, pp=draw(st.integers(1, max_pp)), vpp=vpp, num_microbatches=draw(st.integers(1, max_microbatches)))


@st.composite
def lowered_with_messages(draw: st.DrawFn) -> Schedule:
    special = draw(st.sampled_from([None, None, None, VEE, PAIRS, TWO_DIRECTIONS]))
    if special is not None:
        return lower(Schedule.from_csv(special))
    name = draw(st.sampled_from(sorted(CATALOG)))
    vpp = 2 if CATALOG[name].chunks else 1
    return lower(build(name, pp=draw(st.integers(2, 4)), vpp=vpp, num_microbatches=draw(st.integers(1, 4))))


def runs_right(schedule: Schedule) -> bool:
    """Executes the rows blocking and in order, messages as rendezvous, and watches every value. Shares no code with the rules."""
    rows = [[part for action in row for part in action.parts] for row in schedule.rows()]
    values: list[set] = [set() for _ in rows]
    done: set = set()
    cursors = [0] * len(rows)
    last_stage = schedule.num_stages - 1
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            if cursors[rank] == len(row):
                continue
            action = row[cursors[rank]]
            s, m = action.stage, action.microbatch
            if (rank, str(action)) in done:
                return False
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                value, step, receive = (("out", s, m), 1, Kind.RECV_F) if action.kind is Kind.SEND_F else (("grad", s, m), -1, Kind.RECV_B)
                if value not in values[rank] or not 0 <= s + step <= last_stage:
                    return False
                peer = schedule.placement.rank_of(s + step, m)
                if peer == rank:
                    return False
                if cursors[peer] == len(rows[peer]) or rows[peer][cursors[peer]] != Action(s + step, receive, m):
                    continue
                if (peer, str(rows[peer][cursors[peer]])) in done:
                    return False
                done.add((peer, str(rows[peer][cursors[peer]])))
                values[peer].add(value)
                cursors[peer] += 1
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                continue  # its send moves it on
            elif not _compute(action, rank, schedule, values[rank], rows, cursors[rank], last_stage):
                return False
            done.add((rank, str(action)))
            cursors[rank] += 1
            progress = True
    return all(cursor == len(row) for cursor, row in zip(cursors, rows, strict=True)) and _complete(schedule, values, done)


def _compute(action: Action, rank: int, schedule: Schedule, have: set, rows: list, position: int, last_stage: int) -> bool:
    s, m = action.stage, action.microbatch
    if m is not None and schedule.placement.rank_of(s, m) != rank:
        return False
    if action.kind is Kind.F:
        have.add(("out", s, m))
        return s == 0 or ("out", s - 1, m) in have
    if action.kind in (Kind.B, Kind.I):
        again = ("grad", s, m) in have
        have.add(("grad", s, m))
        if action.kind is Kind.B:
            have.add(("weight", s, m))
        return not again and ("out", s, m) in have and (s == last_stage or ("grad", s + 1, m) in have)
    if action.kind is Kind.W:
        again = ("weight", s, m) in have
        have.add(("weight", s, m))
        return not again and ("grad", s, m) in have
    if action.kind is Kind.REDUCE_GRAD:
        mine = [k for k in range(schedule.num_microbatches) if schedule.placement.rank_of(s, k) == rank]
        return all(("weight", s, k) in have for k in mine)
    return action.kind is Kind.STEP and position == len(rows[rank]) - 1 and s == schedule.placement.stages_of(rank)[0]


def _complete(schedule: Schedule, values: list[set], done: set) -> bool:
    return all(
        all((rank, f"{stage}REDUCE_GRAD") in done for stage in schedule.placement.stages_of(rank))
        and (rank, f"{schedule.placement.stages_of(rank)[0]}STEP") in done
        and all(
            ("weight", stage, m) in values[rank]
            for stage in schedule.placement.stages_of(rank)
            for m in range(schedule.num_microbatches)
            if schedule.placement.rank_of(stage, m) == rank
        )
        for rank in range(schedule.num_ranks)
    )


def with_rows(schedule: Schedule, rows: list[list[Action]]) -> Schedule:
    return Schedule.from_rows("mutant", schedule.placement, rows)


@given(builds())
def test_every_built_schedule_passes_before_and_after_lowering(built: Schedule) -> None:
    assert check(built) == []
    assert check(lower(built)) == []


@given(builds(max_pp=5, max_microbatches=6))
def test_every_lowered_schedule_runs_blocking_in_order(built: Schedule) -> None:
    assert runs_right(lower(built))


@pytest.mark.parametrize("text", [VEE, PAIRS, TWO_DIRECTIONS], ids=["vee with I and W", "overlapped pairs", "two directions"])
def test_vee_split_backwards_pairs_and_replicas_pass(text: str) -> None:
    schedule = Schedule.from_csv(text)
    assert check(schedule) == []
    assert runs_right(lower(schedule))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_example_of_a_rule_breaks_that_rule_once_and_no_other(rule) -> None:
    findings = check(Schedule.from_csv(rule.example), rule.example_memory)
    assert [finding.rule for finding in findings] == [rule.name]
    assert findings[0].hint == rule.hint and findings[0].severity == "error"


@settings(max_examples=200)
@given(lowered_with_messages(), st.data())
def test_dropping_any_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in schedule.rows()]
    rank = data.draw(st.integers(0, len(rows) - 1))
    del rows[rank][data.draw(st.integers(0, len(rows[rank]) - 1))]
    assert check(with_rows(schedule, rows)) != []


@settings(max_examples=200)
@given(lowered_with_messages(), st.data())
def test_repeating_any_action_anywhere_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in schedule.rows()]
    source, target = (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    action = data.draw(st.sampled_from(rows[source]))
    rows[target].insert(data.draw(st.integers(0, len(rows[target]))), action)
    assert check(with_rows(schedule, rows)) != []


@settings(max_examples=500)
@given(lowered_with_messages(), st.data())
def test_swapping_two_actions_is_found_exactly_when_the_result_does_not_run_right(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in schedule.rows()]
    first, second = (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    second = data.draw(st.sampled_from([first, second]))
    i, j = data.draw(st.integers(0, len(rows[first]) - 1)), data.draw(st.integers(0, len(rows[second]) - 1))
    if first == second and data.draw(st.booleans()):
        j = min(i + 1, len(rows[first]) - 1)
    rows[first][i], rows[second][j] = rows[second][j], rows[first][i]
    mutant = with_rows(schedule, rows)
    assert (check(mutant) == []) == runs_right(mutant)


@settings(max_examples=200)
@given(lowered_with_messages(), st.data())
def test_moving_one_action_is_found_exactly_when_the_result_does_not_run_right(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in schedule.rows()]
    row = data.draw(st.sampled_from(rows))
    action = row.pop(data.draw(st.integers(0, len(row) - 1)))
    row.insert(data.draw(st.integers(0, len(row))), action)
    mutant = with_rows(schedule, rows)
    assert (check(mutant) == []) == runs_right(mutant)


def naive(built: Schedule) -> Schedule:
    """Messages as one would write them first: each receive right before its use, each send right after its value is made."""
    after: dict[tuple[int, str], list[Action]] = {}
    before: dict[tuple[int, str], list[Action]] = {}
    for rank, row in enumerate(lower(built).rows()):
        for action in row:
            computed = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                after.setdefault((rank, f"{action.stage}{computed}{action.microbatch}"), []).append(action)
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                before.setdefault((rank, f"{action.stage}{computed}{action.microbatch}"), []).append(action)
    rows = [
        [each for action in row for each in (*before.get((rank, str(action)), ()), action, *after.get((rank, str(action)), ()))]
        for rank, row in enumerate(built.rows())
    ]
    return with_rows(built, rows)


def test_naive_messages_of_interleaved_p3_close_a_ring_over_three_ranks() -> None:
    """Everybody sends forward and nobody receives: the last rank sends to the first one's next chunk."""
    findings = check(naive(build("Interleaved1F1B", pp=3, vpp=2, num_microbatches=3)))
    assert [(finding.rule, finding.where) for finding in findings] == [("rendezvous-cycle", "rank 0, step 5, 0SEND_F2")]
    assert findings[0].what == (
        "rank 0 in 0SEND_F2 waits for 1RECV_F2; rank 1 in 1SEND_F1 waits for 2RECV_F1; rank 2 in 2SEND_F0 waits for 3RECV_F0: "
        "rank 0 -> rank 1 -> rank 2 -> rank 0 is a circle."
    )


def test_naive_messages_of_1f1b_deadlock_and_of_gpipe_do_not() -> None:
    assert [finding.rule for finding in check(naive(build("1F1B", pp=3, num_microbatches=5)))] == ["rendezvous-cycle"]
    assert check(naive(build("GPipe", pp=3, num_microbatches=5))) == []


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS", "Interleaved1F1B"])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (3, 9), (4, 8), (5, 10)])
def test_torch_schedules_and_their_lowered_dumps_pass(name: str, pp: int, num_microbatches: int) -> None:
    """I and W, vees, overlapped pairs, UNSHARD and RESHARD as torch.distributed.pipelining writes them."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for with_comms in (False, True):
        rows = visualizer.get_schedule_ops(name, pp, num_microbatches, num_stages_per_rank=2, with_comms=with_comms)
        text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)
        schedule = Schedule.from_csv(text)
        assert schedule.placement.kind == ("vee" if name in ("ZBVZeroBubble", "DualPipeV") else "loop")
        assert check(schedule) == []


def test_torch_1f1b_order_with_its_missing_forward_is_found() -> None:
    """Schedule1F1B.pipeline_order of torch 2.11 and 2.13 writes 3F1..3F8 instead of 3F0..3F7 on the last of four ranks."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops("1F1B", 4, 8)
    if "3F0" in map(str, rows[3]):
        pytest.skip("this torch writes the order right")
    text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)
    findings = check(Schedule.from_csv(text))
    assert "stage 3 never runs the forward of microbatch 0." in [finding.what for finding in findings]


def test_many_places_of_one_fault_are_counted_not_listed() -> None:
    rows = [[action for action in row if action.kind is not Kind.B] for row in build("GPipe", pp=2, num_microbatches=50).rows()]
    findings = check(Schedule.from_rows("forward only", Placement.loop(2, 2, 50), rows))
    assert len(findings) == 21
    assert findings[-1].what == "the same in 80 more places."


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (3, 8), (5, 4), (6, 12)])
def test_1f1b_holds_p_minus_rank_microbatches_at_most(pp: int, num_microbatches: int) -> None:
    view = View(lower(build("1F1B", pp=pp, num_microbatches=num_microbatches)))
    assert peak_in_flight(view) == [min(pp - rank, num_microbatches) for rank in range(pp)]


def test_an_overlapped_pair_holds_both_microbatches_while_it_runs() -> None:
    assert peak_in_flight(View(Schedule.from_csv(PAIRS))) == [2, 1]


def test_memory_just_enough_passes_and_one_byte_less_names_rank_and_action() -> None:
    schedule = build("1F1B", pp=3, num_microbatches=4)
    assert check(schedule, ActivationMemory((10, 20, 30), (30, 40, 30))) == []
    findings = check(schedule, ActivationMemory((10, 20, 30), (30, 39, 30)))
    assert [(finding.rule, finding.where) for finding in findings] == [("memory-over-capacity", "rank 1, step 4, 1F1")]
    assert "40 bytes" in findings[0].what and "39 bytes" in findings[0].what


@pytest.mark.parametrize("memory", [ActivationMemory((1,), (5, 5)), ActivationMemory((1, 1), (5,))])
def test_memory_of_another_size_than_the_schedule_is_refused(memory: ActivationMemory) -> None:
    with pytest.raises(ScheduleError, match="entries, but schedule"):
        check(build("1F1B", pp=2, num_microbatches=2), memory)


CELLS = ("0F0", "0B0", "1F0", "1B0", "0F1", "0B1", "1F1", "1B1", "0I0", "0W0", "(0F1;1B0)OVERLAP_F_B")
CELLS += ("1SEND_B0", "0RECV_B0", "0SEND_F0", "1RECV_F0", "0STEP", "0UNSHARD", "1RESHARD", "0REDUCE_GRAD")


@given(st.lists(st.lists(st.sampled_from(CELLS), max_size=9), max_size=3))
def test_check_never_raises_on_anything_a_csv_can_say(cells: list[list[str]]) -> None:
    try:
        schedule = Schedule.from_csv("\n".join(map(",".join, cells)))
    except ScheduleError:
        return
    examination = examine(schedule)
    assert bool(examination.violations) == bool(examination.findings)
