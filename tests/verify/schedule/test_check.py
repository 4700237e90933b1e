"""`check`: silent on every schedule that runs right, and on no other. The oracle is a plain blocking
execution of the lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.base.findings import DEGREES
from shardproof.core.plan.keys import KEYS
from shardproof.core.schedule import CATALOG, build, lower
from shardproof.core.schedule.action import PER_MICROBATCH, Action, Kind
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.check import check, examine
from shardproof.verify.schedule.facts import ActivationMemory, Buffers, Facts
from shardproof.verify.schedule.rules import COLLECTIVE_RULES, RULES, View
from shardproof.verify.schedule.rules.memory import peak_in_flight

VEE = "0F0,0F1,5F0,5I0,5F1,5B1,5W0,0B0,0B1\n1F0,1F1,4F0,4F1,4I0,4B1,4W0,1B0,1B1\n2F0,3F0,2F1,3F1,3B0,2B0,3I1,3W1,2B1\n"
PAIRS = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
TWO_DIRECTIONS = "0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n"


@st.composite
def builds(draw: st.DrawFn, max_pp: int = 7, max_microbatches: int = 13) -> Schedule:
    name = draw(st.sampled_from(sorted(CATALOG)))
    vpp = CATALOG[name].nearest_vpp(draw(st.integers(2, 4)))
    pp, num_microbatches = draw(st.sampled_from(legal_sizes(name, vpp, range(1, max_pp + 1), max_microbatches)))
    return build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def legal_sizes(name: str, vpp: int, degrees: range, max_microbatches: int) -> list[tuple[int, int]]:
    sizes = [(pp, m) for pp in degrees for m in range(1, max_microbatches + 1)]
    return [(pp, m) for pp, m in sizes if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=m) is None]


@st.composite
def lowered_with_messages(draw: st.DrawFn) -> Schedule:
    special = draw(st.sampled_from([None, None, None, VEE, PAIRS, TWO_DIRECTIONS]))
    if special is not None:
        return lower(Schedule.from_csv(special))
    name = draw(st.sampled_from(sorted(CATALOG)))
    vpp = CATALOG[name].nearest_vpp(2)
    pp, num_microbatches = draw(st.sampled_from(legal_sizes(name, vpp, range(2, 5), 4)))
    return lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches))


def runs_right(schedule: Schedule) -> bool:
    """Executes the rows blocking and in order, messages as rendezvous, and watches every value. Shares
    no code with the rules."""
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
                value, step, receive = (
                    (("out", s, m), 1, Kind.RECV_F) if action.kind is Kind.SEND_F else (("grad", s, m), -1, Kind.RECV_B)
                )
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
    return all(cursor == len(row) for cursor, row in zip(cursors, rows, strict=True)) and _complete(
        schedule, values, done
    )


def _compute(
    action: Action, rank: int, schedule: Schedule, have: set, rows: list, position: int, last_stage: int
) -> bool:
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


@pytest.mark.parametrize(
    "text", [VEE, PAIRS, TWO_DIRECTIONS], ids=["vee with I and W", "overlapped pairs", "two directions"]
)
def test_vee_split_backwards_pairs_and_replicas_pass(text: str) -> None:
    schedule = Schedule.from_csv(text)
    assert check(schedule) == []
    assert runs_right(lower(schedule))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_example_of_a_rule_breaks_that_rule_once_and_no_other(rule) -> None:
    findings = check(Schedule.from_csv(rule.example), facts=rule.example_facts, warnings=rule.severity == "warning")
    assert [finding.rule for finding in findings] == [rule.name]
    assert findings[0].hint == rule.hint and findings[0].severity == rule.severity


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_finding_of_a_rule_has_its_place_and_the_key_it_is_about_as_data(rule) -> None:
    """That the place is the one in words, a fixture checks for all tests of this folder."""
    (found,) = check(Schedule.from_csv(rule.example), facts=rule.example_facts, warnings=rule.severity == "warning")
    absent = {"missing-forward": 1, "missing-backward": 1, "missing-reduction": None, "missing-step": None}
    assert found.rank is not None and (found.action is None) == (rule.name in absent)
    if rule.name in absent:
        assert found.microbatch == absent[rule.name]
    if rule in COLLECTIVE_RULES:
        assert found.axis is not None and found.key == (f"layout.{found.axis}" if found.axis in DEGREES else None)
    else:
        assert found.key == rule.key and found.key in {key.dotted for key in KEYS}


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


@settings(max_examples=300)
@given(lowered_with_messages(), st.data())
def test_swapping_two_actions_is_found_exactly_when_the_result_does_not_run_right(
    schedule: Schedule, data: st.DataObject
) -> None:
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
def test_moving_one_action_is_found_exactly_when_the_result_does_not_run_right(
    schedule: Schedule, data: st.DataObject
) -> None:
    rows = [list(row) for row in schedule.rows()]
    row = data.draw(st.sampled_from(rows))
    action = row.pop(data.draw(st.integers(0, len(row) - 1)))
    row.insert(data.draw(st.integers(0, len(row))), action)
    mutant = with_rows(schedule, rows)
    assert (check(mutant) == []) == runs_right(mutant)


@settings(max_examples=200)
@given(lowered_with_messages(), st.data())
def test_changing_one_number_or_the_kind_of_an_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in schedule.rows()]
    row = data.draw(st.sampled_from(rows))
    place = data.draw(st.integers(0, len(row) - 1))
    old = row[place]
    changes = [replace(old, stage=stage) for stage in range(schedule.num_stages)]
    if old.microbatch is not None:
        changes += [replace(old, microbatch=microbatch) for microbatch in range(schedule.num_microbatches)]
        changes += [Action(old.stage, kind, old.microbatch) for kind in PER_MICROBATCH - {Kind.OVERLAP_F_B}]
    changed = [action for action in changes if action != old]
    if changed:
        row[place] = data.draw(st.sampled_from(changed))
        assert check(with_rows(schedule, rows)) != []


def naive(built: Schedule) -> Schedule:
    """Messages as one would write them first: each receive right before its use, each send right
    after its value is made."""
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
        [
            each
            for action in row
            for each in (*before.get((rank, str(action)), ()), action, *after.get((rank, str(action)), ()))
        ]
        for rank, row in enumerate(built.rows())
    ]
    return with_rows(built, rows)


def test_naive_messages_of_interleaved_p3_close_a_ring_over_three_ranks() -> None:
    """Everybody sends forward and nobody receives: the last rank sends to the first one's next chunk."""
    findings = check(naive(build("Interleaved1F1B", pp=3, vpp=2, num_microbatches=3)))
    assert [(finding.rule, finding.where) for finding in findings] == [("rendezvous-cycle", "rank 0, step 5, 0SEND_F2")]
    assert findings[0].what == (
        "rank 0 in 0SEND_F2 waits for 1RECV_F2; rank 1 in 1SEND_F1 waits for 2RECV_F1; rank 2 in 2SEND_F0 waits for "
        "3RECV_F0: "
        "rank 0 -> rank 1 -> rank 2 -> rank 0 is a circle. Only buffered sends get past it."
    )


def test_naive_messages_of_1f1b_deadlock_and_of_gpipe_do_not() -> None:
    assert [finding.rule for finding in check(naive(build("1F1B", pp=3, num_microbatches=5)))] == ["rendezvous-cycle"]
    assert check(naive(build("GPipe", pp=3, num_microbatches=5))) == []


def test_many_places_of_one_fault_are_counted_not_listed() -> None:
    rows = [
        [action for action in row if action.kind is not Kind.B]
        for row in build("GPipe", pp=2, num_microbatches=50).rows()
    ]
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
    examination = examine(schedule, facts=Facts(buffers=Buffers(1, 1, 1, 1, 1)), warnings=True)
    assert bool(examination.violations) == bool(examination.findings)
