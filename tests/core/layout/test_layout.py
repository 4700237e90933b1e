"""Layouts: groups partition the world, coordinates round-trip, and Megatron's rank order is reproduced."""

import json
import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.layout import AXES, Layout, rank_groups

FACTS = json.loads((DATA / "layout_facts.json").read_text())["facts"]
DENSE_AXES = ("tp", "cp", "dp", "pp")


def facts(area: str) -> list[dict]:
    chosen = [fact for fact in FACTS if fact["area"] == area]
    assert chosen, area
    return chosen


@st.composite
def layouts(draw) -> Layout:
    degrees = {axis: draw(st.sampled_from([1, 2, 3, 4, 5, 6])) for axis in DENSE_AXES}
    order = "-".join(draw(st.permutations(AXES)))
    divisors = [n for n in range(1, 7) if degrees["tp"] * degrees["cp"] * degrees["dp"] % n == 0]
    etp = draw(st.sampled_from(divisors))
    ep = draw(st.sampled_from([n for n in divisors if degrees["tp"] * degrees["cp"] * degrees["dp"] % (n * etp) == 0]))
    return Layout(**degrees, ep=ep, etp=etp, order=order)


axis_products = st.lists(st.sampled_from(DENSE_AXES), min_size=1, max_size=4, unique=True).map("-".join)


@given(layouts(), axis_products)
def test_groups_partition_the_world_into_groups_of_the_axis_sizes(layout, axes):
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {math.prod(layout.sizes[axis] for axis in axes.split("-"))}


@given(layouts(), st.sampled_from(["tp", "ep", "dp", "tp-ep", "ep-dp", "pp"]))
def test_expert_groups_partition_the_same_world(layout, axes):
    groups = layout.expert_groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {math.prod(layout.expert_sizes[axis] for axis in axes.split("-"))}


@given(layouts(), st.data())
def test_coordinates_round_trip_and_stay_below_their_degrees(layout, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    coordinates = layout.coordinates(rank)
    assert layout.global_rank(**coordinates) == rank
    assert set(coordinates) == set(DENSE_AXES)
    assert all(0 <= coordinates[axis] < getattr(layout, axis) for axis in DENSE_AXES)


@given(layouts(), axis_products, st.data())
def test_group_of_a_rank_is_the_one_listed_group_that_holds_it(layout, axes, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert [group for group in layout.groups(axes) if rank in group] == [layout.group_of(rank, axes)]


@given(layouts(), axis_products)
def test_members_of_a_group_differ_only_in_the_axes_of_the_group(layout, axes):
    fixed = [axis for axis in DENSE_AXES if axis not in axes.split("-")]
    for group in layout.groups(axes):
        assert len({tuple(layout.coordinates(rank)[axis] for axis in fixed) for rank in group}) == 1


@given(layouts())
def test_ranks_count_up_along_the_leftmost_axis_of_the_order(layout):
    axis = next((name for name in layout.order.split("-") if layout.sizes[name] > 1), None)
    if axis is not None:
        assert layout.groups(axis)[0] == list(range(layout.sizes[axis]))


@pytest.mark.parametrize("order", ["-".join(order) for order in permutations(("tp", "dp", "pp"))])
def test_every_order_of_three_axes_numbers_ranks_by_its_strides(order):
    layout = Layout(tp=3, dp=2, pp=5, order=order)
    strides, stride = {}, 1
    for axis in order.split("-"):
        strides[axis], stride = stride, stride * getattr(layout, axis)
    for tp in range(3):
        for dp in range(2):
            for pp in range(5):
                assert (
                    layout.global_rank(tp=tp, dp=dp, pp=pp)
                    == tp * strides["tp"] + dp * strides["dp"] + pp * strides["pp"]
                )


def test_groups_of_several_axes_do_not_depend_on_the_order_they_are_named_in():
    layout = Layout(tp=2, cp=3, dp=2, pp=2)
    assert layout.groups("dp-cp") == layout.groups("cp-dp")


@pytest.mark.parametrize(
    "fact", facts("rank_groups"), ids=lambda fact: f"{fact['input']['order']}:{fact['input']['token']}"
)
def test_megatron_rank_groups(fact):
    given_ = fact["input"]
    assert (
        rank_groups(given_["order"], given_["sizes"], given_["token"], given_.get("rank_offset", 0)) == fact["expected"]
    )


@pytest.mark.parametrize(
    "fact", facts("rank_groups_expert"), ids=lambda fact: f"{fact['input']['order']}:{fact['input']['token']}"
)
def test_megatron_expert_groups(fact):
    given_, sizes = fact["input"], fact["input"]["sizes"]
    assert rank_groups(given_["order"], sizes, given_["token"]) == fact["expected"]
    dense_dp = sizes["dp"] * sizes["ep"]
    layout = Layout(tp=sizes["tp"], dp=dense_dp, pp=sizes["pp"], ep=sizes["ep"], etp=sizes["tp"], order=given_["order"])
    assert layout.expert_groups(given_["token"]) == fact["expected"]
    assert layout.world_size == given_["world"]


@pytest.mark.parametrize("fact", facts("hyper_grid"), ids=lambda fact: str(fact["input"]["group"]))
def test_megatron_grids_of_ranks(fact):
    given_ = fact["input"]
    axes = "-".join(given_["group"]) if isinstance(given_["group"], list) else given_["group"]
    expected = fact["expected"]["ranks"] if isinstance(fact["expected"], dict) else fact["expected"]
    sizes = dict(zip(given_["dims"], given_["shape"], strict=True))
    assert rank_groups("-".join(given_["dims"]), sizes, axes, given_.get("rank_offset", 0)) == expected


CLOSED_FORM = facts("rank_groups_closed_form")[0]["input"]


@pytest.mark.parametrize("numbers", [tuple(numbers) for numbers in CLOSED_FORM["tuples"]], ids=str)
def test_rank_groups_follow_the_closed_form_for_35_published_tuples(numbers):
    nodes, gpus, tp, pp, cp, ep = numbers
    world = nodes * gpus
    dp = world // (tp * pp * cp)
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, order=CLOSED_FORM["order_dense"] + "-ep")
    stage = world // pp
    starts = range(0, world, stage)
    assert layout.groups("tp") == [list(range(i, i + tp)) for i in range(0, world, tp)]
    assert layout.groups("pp") == [list(range(i, world, stage)) for i in range(stage)]
    assert layout.groups("cp") == [
        list(range(b + i, b + tp * cp, tp)) for b in range(0, world, tp * cp) for i in range(tp)
    ]
    assert layout.groups("dp") == [list(range(s + i, s + stage, tp * cp)) for s in starts for i in range(tp * cp)]
    assert layout.groups("dp-cp") == [list(range(s + i, s + stage, tp)) for s in starts for i in range(tp)]
    assert layout.groups("tp-dp-cp") == [list(range(s, s + stage)) for s in starts]
    model_groups = [list(members) for members in zip(*layout.groups("dp-cp"), strict=True)]
    assert sorted(sorted(group) for group in layout.groups("tp-pp")) == sorted(sorted(group) for group in model_groups)
    for rank in (0, world // 2, world - 1):
        at = layout.coordinates(rank)
        assert rank == at["tp"] + tp * (at["cp"] + cp * (at["dp"] + dp * at["pp"]))


@pytest.mark.parametrize("numbers", [tuple(numbers) for numbers in CLOSED_FORM["tuples"]], ids=str)
def test_expert_groups_follow_the_closed_form_for_35_published_tuples(numbers):
    nodes, gpus, tp, pp, cp, ep = numbers
    world = nodes * gpus
    layout = Layout(tp=tp, cp=cp, dp=world // (tp * pp * cp), pp=pp, ep=ep, order="tp-cp-ep-dp-pp")
    stage = world // pp
    assert layout.expert_dp == stage // (tp * ep)
    assert layout.expert_groups("ep") == [
        list(range(b + i, b + tp * ep, tp)) for b in range(0, world, tp * ep) for i in range(tp)
    ]
    assert layout.expert_groups("dp") == [
        list(range(s + i, s + stage, tp * ep)) for s in range(0, world, stage) for i in range(tp * ep)
    ]


def test_pipeline_neighbours_of_8_ranks_with_tp2_pp4_are_2_ranks_away():
    assert facts("pipeline_neighbours")[0]["expected"]["next"] == "(r+2)%8"
    layout = Layout(tp=2, pp=4)
    for rank in range(8):
        group = layout.group_of(rank, "pp")
        here = group.index(rank)
        assert group[(here + 1) % 4] == (rank + 2) % 8
        assert group[(here - 1) % 4] == (rank - 2) % 8
        assert group[0] == rank % 2


def test_an_order_without_an_axis_above_one_is_refused():
    assert facts("rank_groups_errors")[0]["input"]["order"] == "tp-dp"
    with pytest.raises(LayoutError, match="does not name pp"):
        rank_groups("tp-dp", {"tp": 2, "dp": 1, "pp": 2}, "tp")
    with pytest.raises(LayoutError, match="does not name pp"):
        Layout(tp=2, pp=2, order="tp-dp")


def test_a_group_over_no_axis_of_the_order_is_refused():
    with pytest.raises(LayoutError, match="names xp"):
        Layout(tp=2).groups("xp")


def test_a_negative_rank_offset_is_refused():
    with pytest.raises(LayoutError, match="rank_offset=-1"):
        rank_groups("tp-dp", {"tp": 2, "dp": 2}, "tp", -1)


def test_interleaving_without_a_pipeline_is_refused_as_megatron_does():
    with pytest.raises(LayoutError, match="vpp=2 needs a pipeline"):
        Layout(vpp=2)


def test_every_broken_rule_of_a_layout_is_reported_together():
    with pytest.raises(LayoutError) as caught:
        Layout(tp=4, dp=3, ep=5, zero=7, vpp=2, order="tp-tp-dp")
    message = str(caught.value)
    assert len(caught.value.problems) == 4
    for expected in ("zero=7", "vpp=2", "order='tp-tp-dp'", "etp*ep=20 does not divide tp*cp*dp=12"):
        assert expected in message


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"dp": -2}, {"etp": 0}, {"pp": 1.5}, {"cp": True}])
def test_degrees_are_whole_numbers_of_at_least_one(degrees):
    with pytest.raises(LayoutError, match="whole number of at least 1"):
        Layout(**degrees)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(LayoutError, match="global rank 6 is outside the world of 6"):
        Layout(tp=3, dp=2).coordinates(6)
