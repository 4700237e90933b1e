"""What the memory model allows: the litmus tests of the field, with their known answers."""

from __future__ import annotations

import pytest

from shardproof.verify.kernels.memory_model import Op, explore


def store(place: str, value: int = 1, order: str = "relaxed") -> Op:
    return Op("store", place, value, order=order)


def load(place: str, value: int) -> Op:
    return Op("load", place, value)


def until(place: str, order: str = "relaxed") -> Op:
    return Op("until", place, 1, order=order)


@pytest.mark.parametrize(
    ("sent", "heard", "kind"),
    [
        ("release", "acquire", "ok"),
        ("relaxed", "acquire", "wrong data"),
        ("release", "relaxed", "wrong data"),
        ("relaxed", "relaxed", "wrong data"),
    ],
)
def test_a_message_is_passed_by_a_release_and_an_acquire_together(sent: str, heard: str, kind: str) -> None:
    sender = (store("data"), store("flag", 1, sent))
    assert explore([sender, (until("flag", heard), load("data", 1))]).kind == kind


def test_both_may_read_what_was_there_before_both_wrote() -> None:
    """Store buffering: whoever says that one of them must read 1 is wrong."""
    assert explore([(store("x"), load("y", 1)), (store("y"), load("x", 1))]).kind == "wrong data"


def test_a_load_may_be_done_after_a_later_relaxed_swap_but_not_after_a_release() -> None:
    """Load buffering: the reader gives the place free, and its load still has not been done."""
    for order, kind in (("relaxed", "wrong data"), ("release", "ok")):
        reader = (load("x", 0), Op("swap", "free", 1, 0, order))
        assert explore([reader, (until("free", "acquire"), store("x", 1))]).kind == kind


def test_stores_to_one_place_stay_in_order() -> None:
    writer = (store("x", 1), store("x", 2), store("flag", 1, "release"))
    assert explore([writer, (until("flag", "acquire"), load("x", 2))]).ok


def test_a_message_through_a_third_rank_arrives() -> None:
    """Releases and acquires in a chain order what the first wrote before what the last reads."""
    programs = [
        (store("x"), store("a", 1, "release")),
        (until("a", "acquire"), store("b", 1, "release")),
        (until("b", "acquire"), load("x", 1)),
    ]
    assert explore(programs).ok


def test_who_waits_for_what_nobody_says_is_found_with_the_way_there() -> None:
    found = explore([(store("x", 1, "release"), until("y")), (until("x"),)])
    assert found.kind == "deadlock" and found.trace[0] == "rank 0: x = 1 (release)"


def test_a_search_that_is_cut_off_does_not_say_ok() -> None:
    writers = [tuple(store(f"x{rank}{i}") for i in range(4)) for rank in range(3)]
    assert explore(writers, most_states=100).kind == "too many states"
    assert explore(writers).ok and explore(writers).num_states == 2**12
