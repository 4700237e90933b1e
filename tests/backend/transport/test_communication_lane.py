"""What a communication lane was given and has made is not kept by its thread."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardproof.backend.base.recorder import Recorder
from shardproof.backend.transport.overlap import CommunicationLane


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_lane_has_let_go_of_its_input_and_result_when_the_result_is_taken(often: None) -> None:
    lane = CommunicationLane(torch.device("cpu"), Recorder())
    for number in range(1000):
        given = torch.full((4,), float(number))

        def work(given: Tensor = given) -> Tensor:
            return given + 1

        result = lane.start(work, given)()
        assert result[0] == number + 1
        ends = weakref.ref(given), weakref.ref(result)
        del given, work, result
        assert [end() for end in ends] == [None, None], f"kept after {number} others"


def test_what_a_lane_raises_is_raised_to_who_asks() -> None:
    def fails() -> Tensor:
        raise ValueError("as it must")

    with pytest.raises(ValueError, match="as it must"):
        CommunicationLane(torch.device("cpu"), Recorder()).start(fails)()
