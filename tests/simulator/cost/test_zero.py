"""What nothing overlaps with under ZeRO-2 and 3: gathers that are not begun early enough, and reductions in the
only queue to a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Held, held_elements
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.communication import Place
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.cost.zero import shared_card_s, uncovered, units
from shardproof.simulator.engine.attribution import Sort
from shardproof.simulator.stack.profiles import PROFILES
from shardproof.simulator.stack.transformer_engine import FSDP_UNIT_ELEMENTS

FSDP = PROFILES["megatron-fsdp"]


def plan(layout: Layout, stack: str = "megatron-fsdp") -> Plan:
    return product_plan(
        layout, model="mixtral-8x7b", cluster="dgx-h100", samples=layout.dp * 4, sequence=4096, profile=stack
    )


@pytest.mark.parametrize(
    ("dense", "expert", "forward", "backward"),
    [
        (100e6, 200e6, (0, 0), (0, 0)),  # the next block is under way, all of it
        (250e6, 220e6, (0, 1), (1, 0)),  # from one unit only the nearest of the next block is reached
        (100e6, 500e6, (1, 1), (1, 0)),
        (500e6, 100e6, (0, 1), (1, 1)),
        (300e6, 0, (0, 0), (0, 0)),  # one unit a block
        (400e6, 0, (1, 1), (1, 1)),
    ],
)
def test_gathers_reach_as_far_as_400_million_parameters_are_under_way(dense, expert, forward, backward):
    whole = plan(Layout(dp=8, ep=8, zero=3))
    unit = Held(int(dense), int(expert))
    for way, late in ((False, forward), (True, backward)):
        found = uncovered(whole, FSDP, unit, backward=way)
        assert (found.dense, found.expert) == late


def test_units_of_a_block_are_its_dense_weights_and_its_experts_unless_all_ranks_hold_them():
    cut, whole = plan(Layout(dp=8, ep=8, zero=3)), plan(Layout(dp=8, zero=3))
    hidden, expert = 4096, 3 * 4096 * 14336
    attention = 2 * hidden * hidden + 2 * hidden * 1024
    # router, two norms, and the final norm over 32 blocks
    dense = attention + 8 * hidden + 2 * hidden + 2 * hidden // 64
    assert units(cut, 0, held_elements(cut, 0)) == Held(dense, expert)
    assert units(whole, 0, held_elements(whole, 0)) == Held(dense + 8 * expert, 0)


def test_one_queue_leaves_nothing_during_a_reduction_and_what_is_gathered_where_it_was():
    layout = Layout(tp=2, dp=32, ep=8, zero=3, sequence_parallel=True)
    queue, queues = Pricing(plan(layout)), Pricing(plan(layout), shared={})
    queues.profile = replace(FSDP, one_queue=False)
    reduced_s = queue._after_microbatch_s(Place(0, 0))
    assert queue.seconds(Kind.F, 0) == queues.seconds(Kind.F, 0)
    assert queue.seconds(Kind.B, 0).dp_comm > reduced_s > queues.seconds(Kind.B, 0).dp_comm


def test_without_sequence_parallelism_reductions_have_a_queue_of_their_own():
    assert not uncovered(plan(Layout(dp=8, ep=8, zero=3)), FSDP, Held(1, 1), backward=True).reduced
    assert uncovered(
        plan(Layout(tp=2, dp=8, ep=8, zero=3, sequence_parallel=True)), FSDP, Held(1, 1), backward=True
    ).reduced


def test_a_block_of_more_than_400_million_parameters_is_gathered_and_reduced_alone():
    chosen = plan(Layout(dp=64, zero=3))
    assert sum(units(chosen, 0, held_elements(chosen, 0))) > FSDP_UNIT_ELEMENTS
    pricing, other = Pricing(chosen), Pricing(plan(Layout(dp=64, zero=3), "megatron-te"))
    gathered_s = pricing._communication(Kind.UNSHARD, Place(0, 0)).dp_comm
    assert (
        pricing.seconds(Kind.F, 0).dp_comm == pytest.approx(gathered_s, rel=1e-6)
        and other.seconds(Kind.F, 0).dp_comm < gathered_s
    )


@pytest.mark.parametrize(
    ("crossing", "covering", "hidden", "longer"),
    [
        (2.0, 10.0, 0.0, 0.0),
        (2.0, 10.0, 5.0, 0.5),  # half of the exchanges meet weights, and take twice as long as alone
        (2.0, 10.0, 10.0, 2.0),  # the card is never free: both must fit on it
        (8.0, 10.0, 5.0, 3.0),
        (2.0, 10.0, 20.0, 12.0),
    ],
)
def test_exchanges_between_nodes_share_cards_with_the_weights_that_are_sent_meanwhile(
    crossing, covering, hidden, longer
):
    assert shared_card_s(crossing, covering, hidden) == pytest.approx(longer)


def test_experts_in_one_node_share_no_cards_with_gathered_weights():
    apart = Layout(tp=2, dp=32, ep=8, zero=3, sequence_parallel=True)
    pricings = {ep: Pricing(plan(replace(apart, ep=ep))) for ep in (4, 8)}
    place = Place(0, 0)
    work = {ep: pricing._work(Kind.F, place, False) for ep, pricing in pricings.items()}
    assert pricings[4]._crossing_s(work[4], place) == 0
    assert pricings[8]._crossing_s(work[8], place) == work[8].ep_comm > 0
    assert pricings[8].seconds(Kind.F, 0).dp_comm > with_cards_of_its_own(pricings[8].plan).seconds(Kind.F, 0).dp_comm


def with_cards_of_its_own(plan: Plan) -> Pricing:
    """Prices as if what layers send between nodes met nothing on its way."""
    pricing = Pricing(plan, shared={})
    pricing._crossing_s = lambda work, place: 0.0
    return pricing


def test_the_overlapped_reduction_and_gather_of_zero_1_share_cards_with_exchanges_too():
    chosen = plan(Layout(tp=4, dp=32, ep=8, zero=1, sequence_parallel=True), "megatron-te")
    sharing, alone = Pricing(chosen), with_cards_of_its_own(chosen)
    last = Sort(Kind.REDUCE_GRAD, 0, -1, 0)
    assert sharing.reduction_overlap(last)[1] > alone.reduction_overlap(last)[1]
    assert sharing.seconds(Kind.STEP, 0).dp_comm > alone.seconds(Kind.STEP, 0).dp_comm
