"""Which microbatches, and which stages, share memory."""

from __future__ import annotations

import pytest

from shardproof.backend.pipeline.slots import places_of, slots_of
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.catalog import build


def test_1f1b_of_4_ranks_has_a_slot_for_each_microbatch_in_flight() -> None:
    schedule = lower(build("1F1B", pp=4, num_microbatches=8))
    found = [slots_of(schedule.row(pp_rank))[pp_rank] for pp_rank in range(4)]
    assert [max(slots.values()) + 1 for slots in found] == [4, 3, 2, 1]
    assert [found[0][microbatch] for microbatch in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("name", ["ZBH1", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_no_two_microbatches_have_a_slot_between_a_forward_and_its_weight_gradients(name: str) -> None:
    vpp = 1 if name == "ZBH1" else 2
    schedule = lower(build(name, pp=4, vpp=vpp, num_microbatches=16))
    for pp_rank in range(4):
        row = schedule.row(pp_rank)
        slots, taken = slots_of(row), set[tuple[int, int]]()
        for part in (part for action in row for part in action.parts if part.microbatch is not None):
            if part.kind is Kind.F:
                slot = part.stage, slots[part.stage][part.microbatch]
                assert slot not in taken
                taken.add(slot)
            elif part.kind in (Kind.B, Kind.W):
                taken.remove((part.stage, slots[part.stage][part.microbatch]))
        assert max(slot for of in slots.values() for slot in of.values()) < 15  # fewer than there are microbatches


def test_stages_that_are_never_together_share_a_place() -> None:
    schedule = lower(build("Interleaved1F1B", pp=2, vpp=4, num_microbatches=4), max_active_stages=2)
    places = places_of(schedule.row(0))
    assert set(places) == {0, 2, 4, 6} and set(places.values()) <= {0, 1, 2}
    together: set[int] = set()
    for action in schedule.row(0):
        if action.kind is Kind.UNSHARD:
            assert places[action.stage] not in {places[other] for other in together - {action.stage}}
            together.add(action.stage)
        elif action.kind is Kind.RESHARD:
            together.discard(action.stage)
