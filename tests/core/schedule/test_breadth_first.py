"""LoopedBFS against Lamy-Poirier 2023 and torch."""

from __future__ import annotations

import pytest

from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Action, Kind


@pytest.mark.parametrize("times", [(1, 1, 1), (4, 5, 3)])
@pytest.mark.parametrize(
    ("pp", "vpp", "num_microbatches"), [(1, 2, 3), (2, 2, 4), (3, 2, 3), (3, 4, 7), (5, 3, 9), (6, 2, 6)]
)
def test_looped_bfs_idles_as_interleaved_1f1b_and_holds_m_times_v(
    pp, vpp, num_microbatches, times, bubble, peak
) -> None:
    """(p-1)(F+B) of one chunk for m >= p; every activation of the step is held at the turn."""
    built = build("LoopedBFS", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    assert bubble(built, *times) == (pp - 1) * sum(times)
    assert peak(built) == num_microbatches * vpp


@pytest.mark.parametrize(("pp", "vpp", "num_microbatches"), [(4, 2, 3), (6, 3, 2), (5, 2, 1)])
def test_with_fewer_microbatches_than_ranks_every_round_waits_for_the_ring(pp, vpp, num_microbatches, bubble) -> None:
    """A microbatch comes back to rank 0 after p chunks, so each of v rounds in each direction takes p, not m:
    (p-1)+(v-1)(p-m) idle."""
    built = build("LoopedBFS", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    assert bubble(built) == 3 * ((pp - 1) + (vpp - 1) * (pp - num_microbatches))


def test_looped_bfs_p2_v2_m3() -> None:
    rows = build("LoopedBFS", pp=2, vpp=2, num_microbatches=3).to_csv().splitlines()
    assert rows == [
        "0F0,0F1,0F2,2F0,2F1,2F2,2B0,2B1,2B2,0B0,0B1,0B2",
        "1F0,1F1,1F2,3F0,3F1,3F2,3B0,3B1,3B2,1B0,1B1,1B2",
    ]


def test_gradients_of_a_chunk_are_reduced_before_the_backward_of_the_next() -> None:
    row = [str(each) for each in lower(build("LoopedBFS", pp=2, vpp=2, num_microbatches=3)).row(0)]
    assert row.index("2REDUCE_GRAD") < row.index("0B0") < row.index("0REDUCE_GRAD")


@pytest.mark.parametrize(("pp", "vpp", "num_microbatches"), [(2, 2, 4), (3, 2, 5), (5, 3, 4)])
def test_torch_runs_the_same_with_backwards_descending(pp, vpp, num_microbatches) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    theirs = visualizer.get_schedule_ops("LoopedBFS", pp, num_microbatches, num_stages_per_rank=vpp)
    for ours, row in zip(
        build("LoopedBFS", pp=pp, vpp=vpp, num_microbatches=num_microbatches).rows(), theirs, strict=True
    ):
        mirrored = [
            Action(each.stage, each.kind, num_microbatches - 1 - (each.microbatch or 0))
            if each.kind is Kind.B
            else each
            for each in ours
        ]
        assert [str(each) for each in mirrored] == [str(each) for each in row if each is not None]
