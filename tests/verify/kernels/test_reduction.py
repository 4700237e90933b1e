"""The explorer leaves out states. A second one that leaves out none finds the same in small programs of every form."""

from __future__ import annotations

import random

import pytest

from shardproof.backend.transport.symmetric.barrier import COLLECTIVE
from shardproof.verify.kernels.barrier_mutants import relaxed
from shardproof.verify.kernels.memory_model import Op, Program, explore
from shardproof.verify.kernels.protocols import collective, pads_of

WRONG = None
"""In place of a state: what a rank reads is wrong, and nobody looks further."""


def plainly(programs: list[Program], reset: set[str] = frozenset()) -> set[str]:  # type: ignore[assignment]
    """All that is wrong in some run. A rank issues its operations in order; each has a step of its own, and what was
    issued and is not done may be done at any later point."""
    start = (tuple((0, (), (), ()) for _ in programs), ())
    seen, left, wrong = {start}, [start], set()
    while left:
        ranks, held = state = left.pop()
        after = [new for number in range(len(programs)) for new in moves(programs[number], number, state, wrong)]
        if not after and any(rank[0] < len(program) for rank, program in zip(ranks, programs, strict=True)):
            wrong.add("deadlock")
        elif not after and any(value for place, value in held if place in reset):
            wrong.add("pad not reset")
        left += [new for new in {*after} - {WRONG} if new not in seen]
        seen.update(after)
    return wrong


def moves(program: Program, number: int, state: tuple, wrong: set[str]) -> list[tuple]:  # type: ignore[type-arg]
    """After one step of a rank: (next, stores issued, loads issued, loads done before they were issued)."""
    ranks, held = state
    at, stores, loads, early = ranks[number]
    memory, found = dict(held), []

    def go(at: int, stores: tuple, loads: tuple, early: tuple, *written: tuple[str, int]) -> None:  # type: ignore[type-arg]
        new = tuple(sorted({**memory, **dict(written)}.items()))
        found.append(((*ranks[:number], (at, stores, loads, early), *ranks[number + 1 :]), new))

    def read(index: int) -> bool:
        right = memory.get(program[index].place, 0) == program[index].value
        if not right:
            wrong.add("wrong data")
            found.append(WRONG)
        return right

    for index, (place, value) in enumerate(stores):
        if place not in [other for other, _ in stores[:index]]:
            go(at, stores[:index] + stores[index + 1 :], loads, early, (place, value))
    for index in loads:
        if read(index):
            go(at, stores, tuple(other for other in loads if other != index), early)
    for index in range(at, len(program)):
        if program[index].order == "acquire":
            break
        if program[index].kind == "load" and index not in early and read(index):
            go(at, stores, loads, tuple(sorted((*early, index))))
    if at == len(program):
        return found
    op = program[at]
    got, pending = memory.get(op.place, 0), [place for place, _ in stores]
    is_held_up = op.order == "release" and (stores or loads)
    if op.kind == "load":
        if at in early:
            go(at + 1, stores, loads, tuple(other for other in early if other != at))
        else:
            go(at + 1, stores, (*loads, at), early)
    elif op.kind == "store" and op.order == "relaxed":
        go(at + 1, (*stores, (op.place, op.value)), loads, early)
    elif not is_held_up and op.place not in pending:
        if op.kind == "until" and got >= op.value:
            go(at + 1, stores, loads, early)
        elif op.kind == "store" or (op.kind == "swap" and got == op.expected):
            go(at + 1, stores, loads, early, (op.place, op.value))
    return found


def assert_equal_findings(programs: list[Program], reset: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    kind, wrong = explore(programs, reset=reset).kind, plainly(programs, reset)
    assert (kind == "ok") == (not wrong), (programs, kind, wrong)
    assert kind == "ok" or kind in wrong, (programs, kind, wrong)
    return kind


def some_programs(seed: int) -> list[Program]:
    """Two or three ranks that store, load, swap and wait at three places, in any order."""
    chosen = random.Random(seed)
    num_ranks = chosen.choice((2, 2, 3))

    def op() -> Op:
        kind, place = chosen.choice(("store", "load", "swap", "until", "load", "store")), chosen.choice("xyz")
        if kind == "load":
            return Op("load", place, chosen.choice((0, 1, 1)))
        orders = {"store": ("relaxed", "release"), "until": ("relaxed", "acquire")}.get(kind)
        order = chosen.choice(orders or ("relaxed", "acquire", "release"))
        return Op(kind, place, 1, 0, order)  # type: ignore[arg-type]

    return [tuple(op() for _ in range(chosen.randint(1, 6 - num_ranks))) for _ in range(num_ranks)]


def test_random_programs_have_the_same_findings() -> None:
    kinds = [assert_equal_findings(some_programs(seed), {"x"} if seed % 3 == 0 else set()) for seed in range(1500)]
    assert {"ok", "wrong data", "deadlock", "pad not reset"} <= set(kinds)


@pytest.mark.full
def test_many_random_programs_have_the_same_findings() -> None:
    for seed in range(1500, 30_000):
        assert_equal_findings(some_programs(seed), {"x", "y"})


WRITE, SIGNAL, WAIT, READ, LAST_SIGNAL, LAST_WAIT = COLLECTIVE


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        (COLLECTIVE, "ok"),
        ((WRITE, relaxed(SIGNAL), WAIT, READ, LAST_SIGNAL, LAST_WAIT), "wrong data"),
        ((WRITE, SIGNAL, relaxed(WAIT), READ, LAST_SIGNAL, LAST_WAIT), "wrong data"),
        ((WRITE, SIGNAL, WAIT, READ, relaxed(LAST_SIGNAL), LAST_WAIT), "wrong data"),
        (COLLECTIVE[:4], "wrong data"),
    ],
)
def test_the_protocol_of_pads_has_the_same_findings(steps: tuple, kind: str) -> None:  # type: ignore[type-arg]
    programs = collective(steps, 2, 2)
    assert assert_equal_findings(programs, pads_of(programs)) == kind
