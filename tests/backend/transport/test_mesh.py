"""Meshes open exactly what layout and schedule need, for every rank, over both transports,
without waiting in a circle."""

from functools import partial

import pytest
import torch

from shardproof.backend.transport.memory import MemoryWorld
from shardproof.backend.transport.mesh import Mesh, links_of
from shardproof.core.layout.layout import Layout
from shardproof.core.schedule import build, lower


def lowered(pp, num_microbatches=2, vpp=1):
    name = "Interleaved1F1B" if vpp > 1 else "1F1B"
    return lower(build(name, pp=pp, num_microbatches=num_microbatches, vpp=vpp))


def mesh_job(transport, payload):
    """What a rank's mesh holds, after every group gathered its members and every channel carried the source's rank."""
    layout, schedule = payload
    mesh = Mesh(transport, layout, schedule)
    here = torch.tensor(transport.global_rank)
    groups = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "model": mesh.model, "embedding": mesh.embedding}
    groups |= {"tp-gradients": mesh.tp_gradients}
    groups |= {"tp_cp-gradients": mesh.tp_cp_gradients} if layout.cp > 1 else {}
    members = {
        axis: group and (group.axis, [t.item() for t in group.all_gather(here)]) for axis, group in groups.items()
    }
    arrived = {}
    for link in links_of(schedule):  # one order for all, so that blocking calls end
        if mesh.coordinates["pp"] in link[1:]:
            channel = mesh.channel(*link)
            if transport.global_rank == channel.source:
                channel.send(here)
            else:
                arrived[link] = channel.receive((), torch.int64).item()
    return mesh.coordinates, members, mesh.links, arrived


def rank_at(layout, coordinates, **where):
    return layout.global_rank(**{**coordinates, **where})


def check(results, layout, schedule):
    last = schedule.placement.rank_of(schedule.num_stages - 1)
    for here, (coordinates, members, links, arrived) in enumerate(results):
        pp = coordinates["pp"]
        at = partial(rank_at, layout, coordinates)
        assert at() == here
        assert members["tp"] == ("tp", [at(tp=i) for i in range(layout.tp)])
        assert members["cp"] == ("cp", [at(cp=i) for i in range(layout.cp)])
        assert members["dp"] == ("dp", [at(dp=i, cp=j) for i in range(layout.dp) for j in range(layout.cp)])
        assert members["tp-gradients"] == (members["tp"] if layout.tp > 1 else None)
        if layout.cp > 1:
            both = ("tp_cp", [at(cp=i, tp=j) for i in range(layout.cp) for j in range(layout.tp)])
            assert members["tp_cp-gradients"] == (both if layout.tp > 1 else None)
        assert sorted(members["model"][1]) == sorted(at(tp=i, pp=j) for i in range(layout.tp) for j in range(layout.pp))
        joins = last != 0 and pp in (0, last)
        assert members["embedding"] == (("embedding", [at(pp=0), at(pp=last)]) if joins else None)
        assert set(links) == {link for link in links_of(schedule) if pp in link[1:]}
        assert arrived == {link: at(pp=link[1]) for link in links if link[2] == pp}


LAYOUTS = [
    (Layout(), lowered(1)),
    (Layout(tp=2, pp=2, dp=2), lowered(2)),
    (Layout(tp=3, pp=2), lowered(2)),
    (Layout(tp=2, cp=3, order="cp-tp-dp-ep-pp"), lowered(1)),
    (Layout(cp=2, dp=2, pp=2), lowered(2)),
    (Layout(pp=3, dp=2, order="dp-pp-tp-cp-ep"), lowered(3)),
    (Layout(tp=2, pp=2, vpp=2), lowered(2, vpp=2)),
    (Layout(pp=5), lowered(5)),
]


@pytest.mark.parametrize(
    ("layout", "schedule"),
    LAYOUTS,
    ids=["1", "tp2pp2dp2", "tp3pp2", "tp2cp3-cp-first", "cp2dp2pp2", "pp3dp2-dp-first", "tp2pp2vpp2", "pp5"],
)
@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_every_group_and_channel_of_a_layout_joins_the_right_ranks(workers, transport, layout, schedule):
    check(workers(layout.world_size, transport).run(mesh_job, (layout, schedule)), layout, schedule)


def test_links_of_1f1b_on_3_ranks_are_two_neighbour_pairs_in_both_directions():
    assert links_of(lowered(3)) == (("B", 1, 0), ("B", 2, 1), ("F", 0, 1), ("F", 1, 2))
    assert links_of(lowered(3), 2) == (("B", 2, 1), ("F", 1, 2))


def test_links_of_interleaved_close_the_ring():
    assert links_of(lowered(3, num_microbatches=3, vpp=2)) == (
        *(("B", 0, 2), ("B", 1, 0), ("B", 2, 1)),
        *(("F", 0, 1), ("F", 1, 2), ("F", 2, 0)),
    )


def test_one_pipeline_rank_has_no_links():
    assert links_of(lowered(1)) == ()


def test_a_mesh_refuses_what_does_not_fit_and_names_the_channels_it_has():
    transport = MemoryWorld(2).transport(0)
    with pytest.raises(ValueError, match="the layout has 4 ranks, but 2 were started"):
        Mesh(transport, Layout(tp=2, pp=2), lowered(2))
    with pytest.raises(ValueError, match=r"the layout has pp=2, but schedule .* is for 3 pipeline ranks"):
        Mesh(transport, Layout(pp=2), lowered(3))
    mesh = Mesh(transport, Layout(pp=2), lowered(2))
    with pytest.raises(ValueError, match=r"pipeline rank 0 has no channel F 1->0: .* Its channels: B 1->0, F 0->1"):
        mesh.channel("F", 1, 0)
