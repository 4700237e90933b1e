"""Where ranks lie: places against the coordinates of the layout, spreads against counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.rank_map import NOWHERE, rank_map, spread_text
from shardproof.core.plan.module import ModuleLayout

layouts = st.builds(
    Layout,
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 3)),
    dp=st.sampled_from((2, 4)),
    cp=st.sampled_from((1, 2)),
    ep=st.sampled_from((1, 2)),
    etp=st.sampled_from((None, 1)),
    order=st.sampled_from(("tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp", "pp-tp-cp-ep-dp")),
)


def map_of(*parts: Layout, per_node: int = 8, per_rack: int = 0):
    return rank_map(parts, devices_per_node=per_node, nodes_per_leaf=per_rack, title="t")


@settings(max_examples=40)
@given(layouts)
def test_places_are_the_coordinates_of_the_layout(layout: Layout) -> None:
    found = map_of(layout)
    expert_names = {"ep": "ep", "etp": "tp"}
    for axis in found.axes:
        for rank in range(layout.world_size):
            if axis.name in expert_names:
                expected = layout.expert_coordinates(rank)[expert_names[axis.name]]
            else:
                expected = layout.coordinates(rank)[axis.name]
            assert axis.place[rank] == expected
    named = {axis.name for axis in found.axes}
    assert named & {"tp", "cp", "dp", "pp"} == {name for name, size in layout.sizes.items() if size > 1}


def test_spreads_count_nodes_and_racks_of_a_group() -> None:
    """512 ranks in nodes of 8 and racks of 32: a pipeline rank has 64 of them, 8 nodes."""
    found = map_of(Layout(tp=4, pp=8, dp=16), per_rack=32)
    assert (found.num_nodes, found.num_racks) == (64, 2)
    assert [spread_text(axis, found.num_racks) for axis in found.axes] == [
        "128 groups of 4, each on 1 node in 1 rack",
        "32 groups of 16, each on 8 nodes in 1 rack",
        "64 groups of 8, each on 8 nodes in 2 racks",
    ]
    assert found.only("pp").axes[0].first == tuple(range(0, 512, 64))
    with pytest.raises(LayoutError, match=r"over cp here. Axes of more than one place: tp, dp, pp\."):
        found.only("cp")


def test_modules_are_an_axis_and_have_no_place_on_axes_of_others() -> None:
    found = map_of(Layout(tp=2, dp=2), ModuleLayout(pp=2, first_rank=4))
    places = {axis.name: axis.place.tolist() for axis in found.axes}
    assert places == {
        "tp": [0, 1, 0, 1, NOWHERE, NOWHERE],
        "dp": [0, 0, 1, 1, NOWHERE, NOWHERE],
        "pp": [NOWHERE] * 4 + [0, 1],
        "module": [0, 0, 0, 0, 1, 1],
    }
    assert spread_text(found.axes[0], 1) == "2 groups of 2, each on 1 node"


def test_groups_of_several_sizes_are_said_to_be_so() -> None:
    found = map_of(Layout(tp=4), ModuleLayout(tp=2, first_rank=4))
    said = [spread_text(axis, found.num_racks) for axis in found.axes]
    assert said == ["2 groups of 2 to 4, each on 1 node", "2 modules, each on 1 node"]
