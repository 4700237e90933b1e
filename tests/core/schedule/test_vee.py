"""ZBV (Qi et al. 2023, section 6; torch) and V-Half, V-Min (Qi et al. 2024) against the papers' closed
forms, in half-stage units."""

from __future__ import annotations

import pytest

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, vee_memory
from shardproof.simulator.engine.engine import run_schedule

LIMITS = {"VHalf": lambda pp: 2 * ((pp + 2) // 2), "VMin": lambda pp: 2 * ((pp + 4) // 3)}
RANKS = [3, 4, 5, 6, 7, 8, 9, 11, 14]


def vee(name: str, pp: int, num_microbatches: int):
    return build(name, pp=pp, vpp=2, num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("pp", "num_microbatches"), [(1, 3), (2, 3), (3, 5), (3, 12), (4, 8), (5, 9), (6, 20), (8, 15)]
)
def test_zbv_has_no_bubble_and_the_memory_of_1f1b(pp, num_microbatches, bubble, peak) -> None:
    """F=I=W, m >= 2p-1: nothing idle inside, 2p half activations, and a step of 6m + (p-1) slots, the
    ramp of the last rank."""
    built = vee("ZBVZeroBubble", pp, num_microbatches)
    assert (bubble(built), peak(built)) == (0, 2 * pp)
    assert run_schedule(built).makespan_s == 6 * num_microbatches + pp - 1


@pytest.mark.parametrize("times", [(2, 2, 1), (4, 5, 3), (3, 6, 2), (10, 11, 9)])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 6), (3, 9), (5, 10), (6, 12)])
def test_zbv_idles_2_p_minus_1_times_i_minus_w_for_unequal_times(pp, num_microbatches, times, bubble) -> None:
    assert bubble(vee("ZBVZeroBubble", pp, num_microbatches), *times) == 2 * (pp - 1) * (times[1] - times[2])


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (3, 7), (4, 8), (5, 3), (6, 1)])
def test_zbv_is_torchs_order(pp, num_microbatches) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    theirs = visualizer.get_schedule_ops("ZBVZeroBubble", pp, num_microbatches, num_stages_per_rank=2)
    ours = vee("ZBVZeroBubble", pp, num_microbatches)
    assert [[str(each) for each in row] for row in ours.rows()] == [
        [str(each) for each in row if each is not None] for row in theirs
    ]


@pytest.mark.parametrize("pp", RANKS)
@pytest.mark.parametrize("name", ["VHalf", "VMin"])
def test_vhalf_holds_half_and_vmin_a_third_and_both_idle_6p_minus_1_minus_3_times_that(name, pp, bubble, peak) -> None:
    """Activations floor((p+2)/2) and floor((p+4)/3) of whole stages, that is twice as many halves; m from p on."""
    limit = LIMITS[name](pp)
    for num_microbatches in (pp, 2 * pp, 3 * pp + 1):
        built = vee(name, pp, num_microbatches)
        assert bubble(built) == 6 * pp - 1 - 3 * limit
        assert peak(built) == limit


@pytest.mark.parametrize("pp", RANKS)
def test_bubbles_are_within_a_half_and_two_thirds_of_1f1b(pp, bubble) -> None:
    """The rates of the authors' table, B/2 and 2B/3: 3(p-1) and 4(p-1) of the 6(p-1) slots that 1F1B idles."""
    whole = 2 * bubble(build("1F1B", pp=pp, num_microbatches=2 * pp))
    assert whole == 6 * (pp - 1)
    assert bubble(vee("VHalf", pp, 2 * pp)) <= whole / 2
    assert bubble(vee("VMin", pp, 2 * pp)) <= 2 * whole / 3


@pytest.mark.parametrize("name", ["VHalf", "VMin", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    ("pp", "num_microbatches"), [(1, 1), (1, 5), (2, 1), (2, 2), (3, 1), (5, 2), (6, 3), (8, 1), (9, 5)]
)
def test_few_microbatches_and_one_rank_work(name, pp, num_microbatches, bubble, peak) -> None:
    """No worse than one microbatch after the other (4p forwards and gradients, two W), and within the
    memory for many of them."""
    built = vee(name, pp, num_microbatches)
    assert bubble(built) <= num_microbatches * (4 * pp + 2 - 6)
    assert peak(built) <= min(2 * num_microbatches, LIMITS[name](pp) if name in LIMITS else 2 * pp)


@pytest.mark.parametrize(
    ("name", "pp"), [("VHalf", 4), ("VHalf", 5), ("VHalf", 6), ("VHalf", 8), ("VMin", 3), ("VMin", 5)]
)
@pytest.mark.parametrize("times", [(4, 5, 3), (10, 11, 9)])
def test_the_bubble_does_not_grow_with_microbatches_for_mildly_unequal_times(name, pp, times, bubble) -> None:
    idle = [bubble(vee(name, pp, num_microbatches), *times) for num_microbatches in (2 * pp, 4 * pp, 8 * pp)]
    assert idle[0] == idle[1] == idle[2] < 2 * (pp - 1) * sum(times)


def test_vmin_p4_pays_for_unequal_times_with_every_microbatch(bubble) -> None:
    """The O(n) of the authors' table: the same F+I+W as 4+4+4, but 6 more idle per microbatch."""
    assert [bubble(vee("VMin", 4, m), 4, 5, 3) for m in (8, 16, 32)] == [87, 135, 231]


@pytest.mark.parametrize("name", ["VHalf", "VMin"])
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 6, 8])
def test_long_schedules_repeat_the_middle_of_short_ones(name, pp, monkeypatch) -> None:
    repeated = [vee(name, pp, m) for m in (2 * pp + 9, 4 * pp + 20)]
    monkeypatch.setattr(vee_memory, "_MARGIN", 10**6)
    assert repeated == [vee(name, pp, m) for m in (2 * pp + 9, 4 * pp + 20)]


@pytest.mark.parametrize("name", ["VHalf", "VMin", "ZBVZeroBubble"])
@pytest.mark.parametrize(("vpp", "offered"), [(1, "1F1B"), (3, "Interleaved1F1B")])
def test_vees_hold_two_stages_per_rank_and_nothing_else(name, vpp, offered) -> None:
    with pytest.raises(ScheduleError, match=f"needs vpp of 2, got vpp={vpp}. Use schedule {offered}, or set vpp=2"):
        build(name, pp=4, vpp=vpp, num_microbatches=8)
