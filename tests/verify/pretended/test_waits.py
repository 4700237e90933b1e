"""Waits of the host in logs written by hand."""

from __future__ import annotations

from shardproof.verify.pretended.log import Entry
from shardproof.verify.pretended.waits import ALLOWED, MOST_WAITS, too_many, waits


def step(number: str) -> Entry:
    return Entry("step", 1, 0, number)


def wait(place: str, label: str = "") -> Entry:
    return Entry("host waits for stream", 1, 0, "a number for the host", label=label, place=place)


ELSEWHERE = wait("backend/model/router.py:forward", "0F1 layers.0.mlp.router")
LISTED = wait(next(each.place for each in ALLOWED if each.counts))
FREE = wait(next(each.place for each in ALLOWED if not each.counts))


def test_waits_of_the_first_step_and_between_steps_do_not_count() -> None:
    found = waits([ELSEWHERE, step("0"), ELSEWHERE, step("1"), LISTED, step("2"), LISTED, step(""), ELSEWHERE])
    assert [(each.place, each.per_step) for each in found] == [(LISTED.place, 1.0)]


def test_a_place_that_is_not_listed_is_named_with_what_was_worked_on() -> None:
    (wrong,) = too_many(waits([step("0"), step("1"), ELSEWHERE, ELSEWHERE, step("")]))
    assert "backend/model/router.py:forward in 0F1 layers.0.mlp.router: a number for the host, 2 times" in wrong


def test_listed_waits_are_counted_but_those_that_the_data_needs() -> None:
    def wrong(number: int) -> list[str]:
        return too_many(waits([step("0"), step("1"), *[LISTED] * number, *[FREE] * 9, step("")]))

    assert wrong(MOST_WAITS) == []
    assert len(wrong(MOST_WAITS + 1)) == 1


def test_places_that_are_listed_are_there() -> None:
    import ast
    from pathlib import Path

    import shardproof

    for each in ALLOWED:
        path, name = each.place.split(":")
        tree = ast.parse((Path(shardproof.__file__).parent / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, each
