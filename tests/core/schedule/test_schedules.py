"""Builders against Megatron's facts, the papers' closed forms and torch's own orders."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import ScheduleError, UnknownNameError
from shardproof.core.schedule import CATALOG, build, default_name, interleaved, lower
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.interleaved import schedule_table, warmup_counts
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule

FACTS = json.loads((DATA / "schedule_facts.json").read_text())["facts"]


def facts(area: str) -> list[dict]:
    found = [fact for fact in FACTS if fact["area"] == area]
    assert found
    return found


def tokens(built: Schedule, pp_rank: int) -> str:
    return " ".join(str(each) for each in built.row(pp_rank))


@st.composite
def builds(draw: st.DrawFn) -> Schedule:
    """Any schedule of the catalog, with sizes around and below the number of ranks."""
    name = draw(st.sampled_from(sorted(CATALOG)))
    vpp = CATALOG[name].nearest_vpp(draw(st.integers(2, 4)))
    pp, num_microbatches = draw(st.sampled_from(legal_sizes(name, vpp)))
    return build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def legal_sizes(name: str, vpp: int) -> list[tuple[int, int]]:
    """(pp, num_microbatches) that the schedule can be built for."""
    sizes = [(pp, m) for pp in range(1, 8) for m in range(1, 17)]
    return [(pp, m) for pp, m in sizes if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=m) is None]


@pytest.mark.parametrize("fact", facts("schedule_table"), ids=lambda fact: str(fact["input"]["microbatches"]))
def test_schedule_table_is_megatrons(fact: dict) -> None:
    given_ = fact["input"]
    table = schedule_table(given_["microbatches"], given_["chunks"], given_["group"])
    assert [list(entry) for entry in table] == fact["expected"]


@pytest.mark.parametrize("fact", facts("warmup_counts"), ids=lambda fact: str(sorted(fact["input"].items())))
def test_warmup_counts_are_megatrons(fact: dict) -> None:
    keys = dict(fact["input"])
    counts = warmup_counts(keys.pop("pp"), keys.pop("microbatches"), **keys)
    found = [
        {"total": c.total, "all_in_warmup": c.all_in_warmup, "warmup": c.warmup, "remaining": c.remaining}
        for c in counts
    ]
    assert found == fact["expected"]


@pytest.mark.parametrize("fact", facts("schedule_order"), ids=lambda fact: str(fact["input"]["table"]))
def test_order_of_chunks_is_megatrons(fact: dict) -> None:
    """The order list of a table and a warm-up count: +c a forward of chunk c, -c a backward, chunks from 1."""
    num_microbatches, num_chunks, group = fact["input"]["table"]
    table = schedule_table(num_microbatches, num_chunks, group)
    kinds = interleaved.one_forward_one_backward(num_microbatches * num_chunks, fact["input"]["warmup"])
    counts = interleaved.count_within_kind(kinds)
    order = [
        table[i][1] + 1 if kind == Kind.F else -(num_chunks - table[i][1])
        for kind, i in zip(kinds, counts, strict=True)
    ]
    assert order == fact["expected"]


@given(pp=st.integers(1, 6), vpp=st.integers(2, 4), num_microbatches=st.integers(1, 12))
def test_order_has_the_properties_megatron_tests(pp: int, vpp: int, num_microbatches: int) -> None:
    assert facts("schedule_order_properties")[0]["expected"]["length"] == "2*m*V"
    for row in build("Interleaved1F1B", pp=pp, vpp=vpp, num_microbatches=num_microbatches).rows():
        order = [(each.stage // pp + 1) * (1 if each.kind is Kind.F else -1) for each in row]
        assert len(order) == 2 * num_microbatches * vpp
        assert sum(order) == 0
        assert min(itertools.accumulate(order)) >= 0
        assert max(order) == vpp
        for chunk in range(1, vpp + 1):
            balance = list(itertools.accumulate((1 if o == chunk else -1 if o == -chunk else 0) for o in order))
            assert balance[-1] == 0 and min(balance) >= 0


@pytest.mark.parametrize("fact", facts("schedule_errors"), ids=lambda fact: str(fact["input"]))
def test_a_group_that_leaves_fewer_than_pp_microbatches_is_refused(fact: dict) -> None:
    """Megatron raises RuntimeError; our error names a group that works, and without a given group one is chosen."""
    keys = fact["input"]
    sizes = {"pp": keys["pp"], "vpp": keys["vpp"], "num_microbatches": keys["microbatches"]}
    with pytest.raises(ScheduleError, match="Use microbatch_group_size=7"):
        build("Interleaved1F1B", **sizes, microbatch_group_size=keys["group"])
    assert len(build("Interleaved1F1B", **sizes)) == 2 * 7 * 8


def test_default_schedule_is_megatrons_choice() -> None:
    fact = facts("schedule_selection")[0]
    ours = {"none": "1F1B", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
    assert [default_name(each["pp"], each.get("vpp", 1)) for each in fact["input"]] == [
        ours[name] for name in fact["expected"]
    ]
    assert not np.isin(lower(build("1F1B", pp=1, num_microbatches=3)).actions.kind, (Kind.SEND_F, Kind.RECV_B)).any()


def test_gpipe_runs_all_forwards_then_all_backwards_both_ascending() -> None:
    assert tokens(build("GPipe", pp=3, num_microbatches=3), 1) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_1f1b_p3_m4_as_in_the_paper() -> None:
    built = build("1F1B", pp=3, num_microbatches=4)
    assert tokens(built, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert tokens(built, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_1f1b_with_fewer_microbatches_than_ranks_warms_up_with_all_of_them() -> None:
    built = build("1F1B", pp=4, num_microbatches=2)
    assert [tokens(built, rank) for rank in range(4)] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_interleaved_p2_v2_m4() -> None:
    built = build("Interleaved1F1B", pp=2, vpp=2, num_microbatches=4)
    assert tokens(built, 0) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7, 16])
def test_1f1b_holds_min_of_m_and_p_minus_rank_microbatches(pp: int, num_microbatches: int) -> None:
    for rank, row in enumerate(build("1F1B", pp=pp, num_microbatches=num_microbatches).rows()):
        assert max(itertools.accumulate(1 if each.kind is Kind.F else -1 for each in row)) == min(
            num_microbatches, pp - rank
        )


@given(builds())
def test_every_stage_runs_every_microbatch_once_on_its_rank(built: Schedule) -> None:
    """Forward, input gradient and weight gradient; B stands for both gradients."""
    split = {Kind.F: [Kind.F], Kind.B: [Kind.I, Kind.W], Kind.I: [Kind.I], Kind.W: [Kind.W]}
    parts = [(part, rank) for rank, row in enumerate(built.rows()) for each in row for part in each.parts]
    numbers = itertools.product(range(built.num_stages), (Kind.F, Kind.I, Kind.W), range(built.num_microbatches))
    assert sorted((part.stage, kind, part.microbatch) for part, _ in parts for kind in split[part.kind]) == list(
        numbers
    )
    assert all(built.placement.rank_of(part.stage, part.microbatch) == rank for part, rank in parts)


@given(pp=st.integers(1, 6), vpp=st.integers(2, 3), num_microbatches=st.integers(1, 12), group=st.integers(-1, 14))
def test_every_group_size_is_either_built_or_refused_with_one_that_works(
    pp: int, vpp: int, num_microbatches: int, group: int
) -> None:
    sizes = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
    try:
        lower(build("Interleaved1F1B", **sizes, microbatch_group_size=group))
    except ScheduleError as error:
        offered = int(str(error).rsplit("=", 1)[1].rstrip("."))
        lower(build("Interleaved1F1B", **sizes, microbatch_group_size=offered))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("1F1B", {"pp": 2, "num_microbatches": 0}, "num_microbatches=0"),
        ("1F1B", {"pp": 0, "num_microbatches": 4}, "pp=0"),
        ("1F1B", {"pp": 2, "num_microbatches": 4.0}, "num_microbatches=4.0"),
        ("1F1B", {"pp": 2, "num_microbatches": 4, "vpp": 2}, "Interleaved1F1B"),
        ("Interleaved1F1B", {"pp": 2, "num_microbatches": 4}, "vpp of at least 2"),
        ("GPipe", {"pp": 2, "num_microbatches": 4, "microbatch_group_size": 2}, "has no option microbatch_group_size"),
    ],
)
def test_numbers_outside_a_builders_range_are_refused(name: str, keys: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(name, **keys)


def test_unknown_name_offers_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'Interleaved1F1B'"):
        build("Interleaved1FB", pp=2, num_microbatches=2)


@pytest.mark.parametrize(
    "wrong",
    [
        Action(2, Kind.F, 0),
        Action(0, Kind.F, 3),
        Action(0, Kind.F),
        Action(0, Kind.STEP, 1),
        Action(-1, Kind.F, 0),
        Action.overlap(0, 0, 2, 0),
        Action.overlap(0, 0, 1, 3),
        Action(0, Kind.F, 0, 1, 0),
    ],
    ids=lambda wrong: f"{wrong.stage}-{wrong.kind.name}-{wrong.microbatch}",
)
def test_actions_that_do_not_fit_the_placement_are_refused(wrong: Action) -> None:
    with pytest.raises(ScheduleError, match="does not fit 2 stages x 3 microbatches"):
        Schedule.from_rows("mine", Placement.loop(2, 2, 3), [[Action(0, Kind.F, 0)], [wrong]])


def test_rows_that_are_not_the_placements_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="1 rows for the 2 ranks"):
        Schedule.from_rows("mine", Placement.loop(2, 2, 1), [[Action(0, Kind.F, 0)]])


@pytest.mark.parametrize(("pp", "vpp", "num_microbatches"), [(4, 2, 8), (3, 2, 6), (2, 3, 8), (5, 2, 10)])
def test_interleaved_order_is_that_of_torch(pp: int, vpp: int, num_microbatches: int) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops("Interleaved1F1B", pp, num_microbatches, num_stages_per_rank=vpp)
    ours = build("Interleaved1F1B", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    assert [[str(each) for each in row] for row in ours.rows()] == [
        [str(each) for each in row if each is not None] for row in rows
    ]
