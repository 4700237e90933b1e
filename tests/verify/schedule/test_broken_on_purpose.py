"""Nine ways to break a schedule, done to every schedule of the catalog: each is found under its rule name,
and none on a right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest

from shardproof.core.base.errors import ScheduleError
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.schedule import CATALOG, build, lower
from shardproof.core.schedule.action import RECEIVES, SENDS, Action, Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.calls import communicators
from shardproof.verify.schedule.check import check
from shardproof.verify.schedule.facts import BUFFER_KINDS, Buffers, Facts, LayerHoldings
from shardproof.verify.schedule.plan_facts import plan_calls
from shardproof.verify.schedule.rules import View
from shardproof.verify.schedule.rules.buffers import least_rings

Broken = tuple[Schedule, Facts]
SIZES = ((1, 3), (2, 2), (2, 5), (3, 1), (3, 6), (4, 8), (5, 7), (6, 12), (8, 3))


@lru_cache
def lowered(name: str) -> Schedule:
    """A schedule of the catalog at about four ranks."""
    vpp = CATALOG[name].nearest_vpp(2)
    sizes = [(pp, m) for pp, m in ((3, 6), (4, 8)) if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=m) is None]
    pp, num_microbatches = sizes[0]
    return lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches))


def with_rows(schedule: Schedule, rows: list[list[Action]]) -> Schedule:
    return Schedule.from_rows("broken", schedule.placement, rows)


def peer(schedule: Schedule, action: Action) -> int:
    step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    return schedule.placement.rank_of(action.stage + step, action.microbatch)


def swapped_receives(schedule: Schedule) -> Iterator[Broken]:
    """Two receives from one rank that follow each other, the other way round on the receiving side."""
    for rank, row in enumerate(schedule.rows()):
        lanes: dict[tuple, list[int]] = {}
        for place, action in enumerate(row):
            if action.kind in RECEIVES:
                lanes.setdefault((action.kind, peer(schedule, action)), []).append(place)
        for places in lanes.values():
            for i, j in pairwise(places):
                rows = [list(each) for each in schedule.rows()]
                rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
                yield with_rows(schedule, rows), Facts()


def head_to_head_sends(schedule: Schedule) -> Iterator[Broken]:
    """A receive moved behind the next send to the same rank, where nothing between uses what is received:
    both ranks send first."""
    for rank, row in enumerate(schedule.rows()):
        actions = list(row)
        for i, receive in enumerate(actions):
            if receive.kind not in RECEIVES:
                continue
            kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
            for j in range(i + 1, len(actions)):
                parts = actions[j].parts
                if any(
                    part.kind in kinds and (part.stage, part.microbatch) == (receive.stage, receive.microbatch)
                    for part in parts
                ):
                    break
                if actions[j].kind in RECEIVES and peer(schedule, actions[j]) == peer(schedule, receive):
                    break
                if actions[j].kind in SENDS and peer(schedule, actions[j]) == peer(schedule, receive):
                    rows = [list(each) for each in schedule.rows()]
                    rows[rank].insert(j, rows[rank].pop(i))
                    yield with_rows(schedule, rows), Facts()
                    break


def repeated(schedule: Schedule, kinds: frozenset[Kind] | set[Kind]) -> Iterator[Broken]:
    for rank, row in enumerate(schedule.rows()):
        for place, action in enumerate(row):
            if action.kind in kinds:
                rows = [list(each) for each in schedule.rows()]
                rows[rank].insert(place + 1, action)
                yield with_rows(schedule, rows), Facts()


def duplicate_send(schedule: Schedule) -> Iterator[Broken]:
    yield from repeated(schedule, SENDS)


def double_backward(schedule: Schedule) -> Iterator[Broken]:
    yield from repeated(schedule, {Kind.B, Kind.I, Kind.W})


def gradient_reduced_twice(schedule: Schedule) -> Iterator[Broken]:
    yield from repeated(schedule, {Kind.REDUCE_GRAD})


def microbatch_never_forwarded(schedule: Schedule) -> Iterator[Broken]:
    for rank, row in enumerate(schedule.rows()):
        for place, action in enumerate(row):
            if action.kind in (Kind.F, Kind.OVERLAP_F_B):
                rows = [list(each) for each in schedule.rows()]
                rows[rank][place : place + 1] = action.parts[1:]
                yield with_rows(schedule, rows), Facts()


def buffer_reused_before_its_send_ended(schedule: Schedule) -> Iterator[Broken]:
    for name in ("outputs", "input_gradients"):
        rings = least_rings(View(schedule), name)
        for stage, ring in enumerate(rings):
            if ring > 1:
                fewer = Buffers(**{name: (*rings[:stage], ring - 1, *rings[stage + 1 :])})
                yield schedule, Facts(buffers=fewer)


def layer_lost(schedule: Schedule) -> Iterator[Broken]:
    holdings = whole(schedule)
    for stage, content in enumerate(holdings.stages):
        for layer in content:
            retained = tuple(each for each in content if each != layer)
            yield (
                schedule,
                Facts(
                    layers=replace(holdings, stages=(*holdings.stages[:stage], retained, *holdings.stages[stage + 1 :]))
                ),
            )


def whole(schedule: Schedule) -> LayerHoldings:
    """Two layers on each stage."""
    names = tuple(f"layers.{layer}" for layer in range(2 * schedule.num_stages))
    return LayerHoldings(names, tuple(names[2 * stage : 2 * stage + 2] for stage in range(schedule.num_stages)))


BREAKS: tuple[tuple[str, Callable[[Schedule], Iterator[Broken]]], ...] = (
    ("message-order", swapped_receives),
    ("rendezvous-cycle", head_to_head_sends),
    ("duplicate-message", duplicate_send),
    ("duplicate-action", double_backward),
    ("missing-forward", microbatch_never_forwarded),
    ("buffer-reuse", buffer_reused_before_its_send_ended),
    ("missing-layer", layer_lost),
    ("repeated-reduction", gradient_reduced_twice),
)

WITHOUT_A_PLACE = {"rendezvous-cycle": {"GPipe", "LoopedBFS"}}
"""GPipe and its interleaved form have all forwards before all backwards: no receive has a send behind
it that can go first."""


@pytest.mark.parametrize("name", sorted(CATALOG))
@pytest.mark.parametrize(("rule", "breaks"), BREAKS, ids=[breaks.__name__ for _, breaks in BREAKS])
def test_every_break_of_every_schedule_is_found_under_its_rule(name: str, rule: str, breaks) -> None:
    cases = list(breaks(lowered(name)))
    if name not in WITHOUT_A_PLACE.get(rule, ()):
        assert cases, f"{breaks.__name__} has no place in {name}"
    for schedule, facts in cases[:: max(1, len(cases) // 12)]:
        assert rule in {finding.rule for finding in check(schedule, facts=facts)}, schedule.to_csv()


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_two_collectives_swapped_on_one_rank_are_found_and_name_the_rank(name: str, plan_of) -> None:
    plan = plan_of(name)
    schedule = lower(build(name, pp=plan.layout.pp, vpp=plan.layout.vpp, num_microbatches=plan.num_microbatches))
    calls = plan_calls(plan, schedule)
    broken = 0
    for rank in range(0, plan.layout.world_size, 3):
        own = list(calls.of_rank(rank))
        pairs = [
            (i, j)
            for i, j in zip(range(len(own)), range(1, len(own)), strict=False)
            if communicators(own[i]) == communicators(own[j]) and own[i].identity != own[j].identity
        ]
        for i, j in pairs[:: max(1, len(pairs) // 3)]:
            swapped = own.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            list_of = (*calls.list_of[:rank], len(calls.lists), *calls.list_of[rank + 1 :])
            facts = Facts(collectives=replace(calls, lists=(*calls.lists, tuple(swapped)), list_of=list_of))
            findings = check(schedule, plan=plan, facts=facts)
            assert {finding.rule for finding in findings} == {"collective-order"}
            assert any(f"rank {rank} on {own[i].axis}" in finding.what for finding in findings)
            broken += 1
    assert broken >= 4


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_no_right_schedule_breaks_any_rule(name: str) -> None:
    """Compute-only and lowered, with memory, layers, and rings just large enough."""
    checked = 0
    for pp, num_microbatches in SIZES:
        vpp = CATALOG[name].nearest_vpp(2)
        if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=num_microbatches) is not None:
            continue
        built = build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
        schedule = lower(built)
        rings = {kind: least_rings(View(schedule), kind) for kind in BUFFER_KINDS}
        facts = Facts(layers=whole(schedule), buffers=Buffers(**rings))
        assert check(built, facts=facts) == []
        assert check(schedule, facts=facts) == []
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("name", sorted(CATALOG))
@pytest.mark.parametrize(
    "choice", [{}, {"zero": 1, "mode": "fast"}, {"sp": True, "mode": "fast"}, {"tp": 1, "dp": 3}, {"dp": 1}]
)
def test_no_right_plan_breaks_any_rule(name: str, choice: dict, plan_of) -> None:
    plan = plan_of(name, **choice)
    schedule = build(name, pp=plan.layout.pp, vpp=plan.layout.vpp, num_microbatches=plan.num_microbatches)
    assert check(schedule, plan=plan) == []
    lowered_schedule = lower(schedule)
    calls = plan_calls(plan, lowered_schedule)
    assert check(lowered_schedule, plan=plan, facts=Facts(collectives=calls)) == []


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_stages_gathered_by_unshard_are_called_in_one_order_and_right(name: str, plan_of) -> None:
    """ZeRO-3 with two stages gathered at a time: UNSHARD is a collective over data parallelism too."""
    # fast numerics reduce after every microbatch, exact ones before the step
    plan = plan_of(name, zero=3, mode="exact")
    plan = replace(plan, schedule=replace(plan.schedule, max_active_stages=2))
    schedule = lower(schedule_for(plan))
    assert check(schedule, plan=plan) == []
    calls = plan_calls(plan, schedule, per_microbatch=False)
    assert {call.action.kind for each in calls.lists for call in each} == {Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.STEP}


@pytest.mark.parametrize("name", ["1F1B", "DualPipe", "ZBVZeroBubble"])
def test_actions_on_other_ranks_of_a_plan_are_findings_and_no_crash(name: str, plan_of) -> None:
    plan = plan_of(name)
    schedule = lower(schedule_for(plan))
    assert check(schedule, plan=plan) == []
    for rank, row in enumerate(schedule.rows()):
        for place in range(0, len(row), 3):
            rows = [list(each) for each in schedule.rows()]
            rows[(rank + 1) % len(rows)].append(rows[rank].pop(place))
            assert check(with_rows(schedule, rows), plan=plan) != []


def test_a_schedule_of_another_size_than_the_plan_is_refused(plan_of) -> None:
    with pytest.raises(ScheduleError, match="has 2 ranks and 2 stages, but the plan has pp=3"):
        check(build("1F1B", pp=2, num_microbatches=6), plan=plan_of("1F1B"))
