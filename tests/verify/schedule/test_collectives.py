"""Collectives per rank: their CSV, their order, circles across communicators, and the axes of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.layout.layout import Layout
from shardproof.core.program import Collective, operations
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.calls import Calls, calls_from_csv
from shardproof.verify.schedule.check import check
from shardproof.verify.schedule.facts import Facts
from shardproof.verify.schedule.plan_facts import plan_calls
from shardproof.verify.symbolic.symbolic import prove

ONE_STAGE = Schedule.from_csv("0F0,0B0,0REDUCE_GRAD,0STEP\n")


def calls(text: str, *, axes: frozenset[str] | None = None, **degrees: int) -> Calls:
    layout = Layout(**degrees)
    placement = Placement.loop(layout.pp, layout.pp, 1)
    return calls_from_csv(text, layout, placement, gradient_axes=None if axes is None else [axes] * layout.pp)


def rules(given: Calls) -> list[str]:
    schedule = lower(build("GPipe", pp=given.layout.pp, num_microbatches=1))
    return [finding.rule for finding in check(schedule, facts=Facts(collectives=given))]


def test_calls_of_a_plan_come_back_from_their_csv(plan_of) -> None:
    plan = plan_of("1F1B")
    schedule = lower(build("1F1B", pp=3, num_microbatches=6))
    derived = plan_calls(plan, schedule)
    read = calls_from_csv(derived.to_csv(), plan.layout, schedule.placement)
    assert [read.of_rank(rank) for rank in range(12)] == [derived.of_rank(rank) for rank in range(12)]
    assert len(read.lists) == 3


def test_number_of_calls_of_a_plan_is_that_of_its_program(plan_of) -> None:
    plan = plan_of("1F1B")
    schedule = lower(build("1F1B", pp=3, num_microbatches=6))
    derived = plan_calls(plan, schedule)
    for pp_rank, row in enumerate(schedule.rows()):
        expected = sum(
            isinstance(each, Collective) for action in row for each in operations(plan, action.kind, action.stage)
        )
        assert len(derived.of_rank(plan.layout.global_rank(pp=pp_rank, tp=1, dp=1))) == expected


def test_every_malformed_cell_is_named_with_its_line() -> None:
    with pytest.raises(ScheduleError) as caught:
        calls("0F0:all_reduce:tp:a,nonsense\n0F0:all_reduce:tp\n0Z0:all_reduce:tp:a\n", tp=3)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == [
        " line 1 (global rank 0)",
        " line 2 (global rank 1)",
        " line 3 (global rank 2)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0:all_reduce:tp:a\n", "1 lines, but the layout has 2 ranks"),
        ("0F0:all_reduce:px:a\n\n", "unknown axis 'px'"),
        ("0F0:all_reduce:0+5:a\n\n", "outside the world of 2"),
        ("0F0:all_reduce:1:a\n\n", "rank 0 calls on axis '1', but is no member"),
        ("7F0:all_reduce:tp:a\n\n", "names a stage, but there are 1"),
    ],
)
def test_calls_that_do_not_fit_the_layout_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(")):
        calls(text, tp=2)


def test_swapped_microbatches_are_found_though_operation_and_size_agree() -> None:
    """A library would add microbatch 0 of one rank to microbatch 1 of the other and say nothing."""
    schedule = lower(build("GPipe", pp=1, num_microbatches=2))
    usual = "0F0:all_reduce:tp:mlp,0F1:all_reduce:tp:mlp\n"
    given = calls_from_csv(
        usual + usual + "0F1:all_reduce:tp:mlp,0F0:all_reduce:tp:mlp\n", Layout(tp=3), schedule.placement
    )
    findings = check(schedule, facts=Facts(collectives=given))
    assert [(finding.rule, finding.where) for finding in findings] == [("collective-order", "rank 0, step 1, 0F1")]
    assert findings[0].what == (
        "call 0 of rank 2 on tp (ranks 0, 1, 2) is 0F1:all_reduce:tp:mlp, where the other members call "
        "0F0:all_reduce:tp:mlp."
    )


def test_a_call_that_one_rank_never_makes_is_found() -> None:
    given = calls(
        "0F0:all_reduce:tp:a,0F0:all_reduce:tp:b\n0F0:all_reduce:tp:a\n0F0:all_reduce:tp:a,0F0:all_reduce:tp:b\n", tp=3
    )
    findings = check(ONE_STAGE, facts=Facts(collectives=given))
    assert [finding.rule for finding in findings] == ["collective-order"]
    assert "call 1 of rank 1 on tp (ranks 0, 1, 2) is missing" in findings[0].what


def test_two_orders_of_two_communicators_close_a_circle_though_each_order_agrees() -> None:
    tp, dp = "0F0:all_reduce:tp:a", "0F0:all_reduce:dp:b"
    straight, crossed = f"{tp},{dp}\n", f"{dp},{tp}\n"
    assert rules(calls(straight * 4, tp=2, dp=2)) == []
    assert rules(calls(crossed * 4, tp=2, dp=2)) == []
    assert rules(calls(straight + crossed + crossed + straight, tp=2, dp=2)) == ["collective-cycle"]


@pytest.mark.parametrize(
    ("reductions", "expected"),
    [
        (["all_reduce:dp"], True),
        (["all_to_all:dp", "all_gather:dp"], True),
        (["reduce_scatter:dp"], True),
        (["all_reduce:dp", "all_reduce:dp"], False),
        (["all_reduce:dp", "all_reduce:tp"], False),
        (["all_gather:dp"], False),
        ([], False),
    ],
)
def test_gradients_are_summed_once_over_dp_and_nothing_else(reductions: list[str], expected: bool) -> None:
    line = ",".join(f"0REDUCE_GRAD:{each}:" for each in reductions) + "\n"
    found = rules(calls(line * 6, axes=frozenset({"dp"}), tp=2, dp=3))
    assert set(found) == (set() if expected else {"gradient-axes"})


def runs(lists: list[list[str]], groups: dict[str, tuple[int, ...]]) -> bool:
    """Calls block until all members call the same; to the end, with every call matched."""
    cursors = [0] * len(lists)
    progress = True
    while progress:
        progress = False
        for group in groups.values():
            heads = {lists[rank][cursors[rank]] if cursors[rank] < len(lists[rank]) else None for rank in group}
            (head,) = heads if len(heads) == 1 else (None,)
            if head is not None and groups[head.split(":")[2]] == group:
                progress = True
                for rank in group:
                    cursors[rank] += 1
    return all(cursor == len(each) for cursor, each in zip(cursors, lists, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_lists_pass_exactly_when_a_blocking_run_ends(data: st.DataObject) -> None:
    """Four ranks, up to four communicators; one global order, then perhaps a swap on one rank or a call dropped."""
    groups = {"0+1": (0, 1), "0+2+3": (0, 2, 3), "1+3": (1, 3), "0+1+2+3": (0, 1, 2, 3)}
    order = data.draw(st.lists(st.tuples(st.sampled_from(sorted(groups)), st.sampled_from("ab")), max_size=6))
    lists = [[f"0F0:all_reduce:{axis}:{layer}" for axis, layer in order if rank in groups[axis]] for rank in range(4)]
    rank = data.draw(st.integers(0, 3))
    if len(lists[rank]) > 1:
        i, j = (data.draw(st.integers(0, len(lists[rank]) - 1)) for _ in range(2))
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    if lists[rank] and data.draw(st.booleans()):
        lists[rank].pop()
    found = rules(calls("".join(",".join(each) + "\n" for each in lists), tp=4))
    assert (found == []) == runs(lists, groups)


def test_tied_ends_of_dualpipe_and_its_copies_call_together(plan_of) -> None:
    """Stage 0 lies on ranks 0 and 3, stage 3 on 3 and 0: no pair of ends, and REDUCE_GRAD of every stage
    over two copies times dp."""
    plan = plan_of("DualPipe", tp=1, dp=2)
    schedule = lower(build("DualPipe", pp=plan.layout.pp, num_microbatches=plan.num_microbatches))
    derived = plan_calls(plan, schedule)
    assert plan.layout.pp == 4
    assert {axis for axis, _ in derived.members} == {"replica", "model", "dp"}
    assert derived.members["replica", 1][plan.layout.global_rank(pp=1)] == (2, 4, 3, 5)
    assert check(schedule, plan=plan) == []


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("sp", [False, True])
def test_a_stage_without_layers_reduces_and_gathers_nothing_and_that_is_right(plan_of, zero: int, sp: bool) -> None:
    plan = plan_of("1F1B", pp=3, zero=zero, sp=sp, mode="fast")
    plan = replace(plan, layout=replace(plan.layout, stages=f"E{'t' * 6}||{'t' * 6}L"))
    assert operations(plan, Kind.REDUCE_GRAD, 1) == operations(plan, Kind.UNSHARD, 1) == ()
    schedule = lower(build("1F1B", pp=3, num_microbatches=plan.num_microbatches))
    assert check(schedule, plan=plan) == []
    assert prove(plan, schedule).ok
