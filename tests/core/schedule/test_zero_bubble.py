"""ZB-H1, ZB-H2, ZBAuto and interleaved zero bubble against the closed forms of Qi et al. 2023, Table 2, and torch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build
from shardproof.core.schedule.interleaved_zero_bubble import uneven_rounds
from shardproof.simulator.engine.engine import run_schedule

TIMES = [(1, 1, 1), (4, 5, 3), (3, 6, 2), (5, 3, 4), (2, 2, 1)]
SIZES = [(1, 3), (2, 4), (3, 5), (3, 9), (4, 8), (5, 12), (6, 20), (8, 16)]
UNEQUAL = list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3)))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "num_microbatches"), SIZES)
def test_zbh1_idles_p_minus_1_times_f_plus_i_minus_w_and_holds_p(pp, num_microbatches, times, bubble, peak) -> None:
    forward, backward_input, backward_weight = times
    built = build("ZBH1", pp=pp, num_microbatches=num_microbatches)
    if backward_weight <= forward:
        assert bubble(built, *times) == (pp - 1) * (forward + backward_input - backward_weight)
    assert peak(built) == pp


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(pp, max(m, 2 * pp - 1)) for pp, m in SIZES])
def test_zbh2_idles_p_minus_1_times_f_plus_i_minus_2w_and_holds_2p_minus_1(
    pp, num_microbatches, times, bubble, peak
) -> None:
    forward, backward_input, backward_weight = times
    built = build("ZBH2", pp=pp, num_microbatches=num_microbatches)
    if backward_weight <= forward and 2 * backward_weight <= forward + backward_input:
        assert bubble(built, *times) == (pp - 1) * (forward + backward_input - 2 * backward_weight)
    assert peak(built) == 2 * pp - 1


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 9), (3, 12), (5, 20)])
@pytest.mark.parametrize(("name", "num_weights"), [("ZBH1", 1), ("ZBH2", 2)])
def test_the_closed_forms_hold_for_exactly_the_times_that_the_docstrings_name(
    name, num_weights, pp, num_microbatches, bubble
) -> None:
    """With many microbatches: W <= F, and for ZB-H2 also 2W <= F+I. Elsewhere ranks wait in the
    steady state and idle more."""
    built = build(name, pp=pp, num_microbatches=num_microbatches)
    for f, i, w in UNEQUAL:
        form = (pp - 1) * (f + i - num_weights * w)
        inside = w <= f and num_weights * w <= f + i
        assert (bubble(built, f, i, w) == form) if inside else (bubble(built, f, i, w) > form), (f, i, w)


@pytest.mark.parametrize(("pp", "num_microbatches"), [(3, 5), (4, 8), (6, 20)])
def test_zero_bubble_is_zero_per_rank_while_the_makespan_adds_the_ramp(pp, num_microbatches, bubble) -> None:
    """ZB-H2 with F=I=W: no rank waits once it has begun, and rank r begins r forwards late; the
    step takes 3m + (p-1)."""
    built = build("ZBH2", pp=pp, num_microbatches=num_microbatches)
    assert bubble(built) == 0
    assert run_schedule(built).makespan_s == 3 * num_microbatches + pp - 1
    assert bubble(build("1F1B", pp=pp, num_microbatches=num_microbatches)) == 3 * (pp - 1)


@pytest.mark.parametrize("name", ["ZBH1", "ZBH2", "ZBAuto"])
def test_with_fewer_microbatches_than_ranks_all_are_warm_up(name, bubble, peak) -> None:
    """p=4, m=2: the last rank runs F and I of both, 3 hops lie before it and 3 behind, and one W is left
    when the last I is back."""
    built = build(name, pp=4, num_microbatches=2)
    assert str(built.row(0)[1]) == "0F1"
    assert (bubble(built), peak(built)) == (2 * 2 + 2 * 3 + 1 - 2 * 3, 2)


def test_zbh1_p3_m4_by_hand() -> None:
    assert build("ZBH1", pp=3, num_microbatches=4).to_csv().splitlines() == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
    ]


@pytest.mark.parametrize(
    ("times", "send"),
    [((1, 1, 1), 0), ((4, 5, 3), 0), ((3, 6, 2), 0), ((2, 4, 3), 0), ((10, 11, 9), 1), ((1, 3, 2), 0)],
)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (2, 6), (3, 9), (5, 15), (6, 6), (8, 5)])
def test_zbauto_is_never_worse_than_zbh1_at_p_and_zbh2_at_2p_minus_1(
    pp, num_microbatches, times, send, bubble, peak
) -> None:
    options = dict(zip(("forward_s", "backward_input_s", "backward_weight_s", "send_s"), (*times, send), strict=True))
    for limit, name in ((pp, "ZBH1"), (2 * pp - 1, "ZBH2"), (3 * pp, "ZBH2")):
        built = build("ZBAuto", pp=pp, num_microbatches=num_microbatches, memory_limit=limit, **options)
        assert bubble(built, *times, send) <= bubble(
            build(name, pp=pp, num_microbatches=num_microbatches), *times, send
        )
        assert peak(built) <= limit


@pytest.mark.parametrize("times", [(1, 1, 1), (4, 5, 3), (3, 6, 2)])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(3, 12), (4, 16), (6, 24)])
def test_zbauto_turns_every_activation_beyond_p_into_one_w_less_of_bubble(pp, num_microbatches, times, bubble) -> None:
    """(p-1)(F+I-W) - (limit-p)W, from ZB-H1 at p over ZB-H2 at 2p-1 to nothing: a straight line of
    memory against bubble."""
    forward, backward_input, backward_weight = times
    names = ("forward_s", "backward_input_s", "backward_weight_s")
    for limit in range(pp, 2 * pp + 1):
        built = build(
            "ZBAuto",
            pp=pp,
            num_microbatches=num_microbatches,
            memory_limit=limit,
            **dict(zip(names, times, strict=True)),
        )
        line = (pp - 1) * (forward + backward_input - backward_weight) - (limit - pp) * backward_weight
        assert bubble(built, *times) == max(0, line)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_zbauto_runs_with_less_memory_than_1f1b(limit, bubble, peak) -> None:
    """With one activation the next microbatch enters rank 0 after the W of the one before: 2p+1 slots each, m times."""
    built = build("ZBAuto", pp=4, num_microbatches=6, memory_limit=limit)
    assert peak(built) == limit
    assert bubble(built) > bubble(build("ZBAuto", pp=4, num_microbatches=6))
    if limit == 1:
        assert run_schedule(built).makespan_s == 6 * (2 * 4 + 1)


@settings(max_examples=40)
@given(data=st.data())
def test_zbauto_keeps_its_limit_for_uneven_stages(peak, data: st.DataObject) -> None:
    """Any times per stage: within the limit, and not longer than ZB-H1 where that fits."""
    pp, num_microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    limit = data.draw(st.integers(1, 2 * pp + 1))
    per_stage = st.lists(st.integers(1, 9), min_size=pp, max_size=pp)
    times = [data.draw(per_stage) for _ in range(3)]
    options = dict(zip(("forward_s", "backward_input_s", "backward_weight_s"), times, strict=True))
    built = build("ZBAuto", pp=pp, num_microbatches=num_microbatches, memory_limit=limit, **options)
    assert peak(built) <= limit
    if limit >= pp:
        plain = run_schedule(build("ZBH1", pp=pp, num_microbatches=num_microbatches), *times)
        ours = run_schedule(built, *times)
        work = [num_microbatches * sum(stage) for stage in zip(*times, strict=True)]
        spans = [max(line.idle_inside_s(rank) + work[rank] for rank in range(pp)) for line in (ours, plain)]
        assert spans[0] <= spans[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0}, "memory_limit=0 activations per rank.*Use memory_limit=3"),
        ({"memory_limit": 2.5}, "whole number"),
        ({"forward_s": (1, 2)}, "forward_s has 2 values for 3 stages"),
        ({"send_s": -1}, "send_s has a value that is no duration"),
    ],
)
def test_zbauto_refuses_limits_and_times_that_mean_nothing(options, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        build("ZBAuto", pp=3, num_microbatches=4, **options)


@pytest.mark.parametrize("times", [(1, 1, 1), (4, 5, 3), (2, 3, 2)])
@pytest.mark.parametrize(
    ("pp", "vpp", "num_microbatches"), [(2, 2, 4), (3, 2, 6), (3, 3, 9), (4, 2, 8), (5, 4, 10), (6, 2, 12), (4, 3, 10)]
)
def test_interleaved_zero_bubble_divides_the_bubble_of_zbh1_by_the_chunks(
    pp, vpp, num_microbatches, times, bubble, peak
) -> None:
    forward, backward_input, backward_weight = times
    built = build("InterleavedZeroBubble", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    group = num_microbatches // (num_microbatches // pp)
    assert bubble(built, *times) == (pp - 1) * (forward + backward_input - backward_weight)
    assert peak(built) == (vpp - 1) * group + pp


@pytest.mark.parametrize(("pp", "vpp", "num_microbatches"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (4, 2, 10), (5, 2, 3)])
def test_interleaved_zero_bubble_is_torchs_order(pp, vpp, num_microbatches) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    theirs = visualizer.get_schedule_ops("InterleavedZeroBubble", pp, num_microbatches, num_stages_per_rank=vpp)
    ours = build("InterleavedZeroBubble", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    assert [[str(each) for each in row] for row in ours.rows()] == [
        [str(each) for each in row if each is not None] for row in theirs
    ]


@given(pp=st.integers(1, 9), vpp=st.integers(2, 3), num_microbatches=st.integers(1, 40))
def test_rounds_of_unequal_size_are_refused_with_the_nearest_that_work(pp, vpp, num_microbatches) -> None:
    if num_microbatches % max(1, num_microbatches // pp) == 0:
        assert uneven_rounds(pp, num_microbatches) is None
        return
    with pytest.raises(ScheduleError, match="rounds of equal size") as caught:
        build("InterleavedZeroBubble", pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    below, above = (int(word) for word in str(caught.value).rsplit("Use ", 1)[1].split() if word.isdigit())
    between = range(below + 1, above)
    assert num_microbatches in between and all(uneven_rounds(pp, each) for each in between)
    assert uneven_rounds(pp, below) is None and uneven_rounds(pp, above) is None
