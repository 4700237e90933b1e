"""The actions of traces that name none: what each rank computed, piece by piece, held against the row of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..base.errors import TimelineError
from ..schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from ..schedule.timeline import Span
from .events import Event, RankTrace
from .pieces import MESSAGE, Direction, Piece, messages, optimizer_steps, pieces_of

RowOf = Callable[[int], Sequence[Action]]
"""A rank -> the actions of a lowered schedule that it runs. Raises `LayoutError` for a rank that the plan has not."""

_PLAN = "Give --compare PLAN, the plan of this run: its schedule says which stage and microbatch each piece is."
_SHOWN = 24
"""Pieces of a rank in an error."""


class _Place(NamedTuple):
    """The step in a rank's pieces, and when the step before it ended."""

    pieces: list[Piece]
    actions: list[Action]
    after_s: float


def recognised(traces: Mapping[int, RankTrace], row_of: RowOf | None) -> dict[int, list[Span]]:
    """By rank the actions of the last whole step, without lanes. Without a schedule only runs that send nothing are
    recognised: one stage, whose forwards and backwards are microbatches in the order in which they came.

    Raises `TimelineError` where a trace has no forward with its backward, where messages need a schedule, and where
    the pieces are not those of the schedule's row.
    """
    rows, places = {}, {}
    for rank, trace in traces.items():
        pieces = pieces_of(trace)
        if not any(piece.direction == "B" and piece.partners for piece in pieces):
            raise TimelineError(
                f"{trace.name}: no event names an action, such as PP:2F3 or 2F3, and no backward has its forward in "
                "this trace. Record whole training steps with torch.profiler (ProfilerActivity.CPU among its "
                'activities), or write torch.profiler.record_function("2F3") around your own calls.'
            )
        if row_of is None and messages(trace, on_host=True):
            raise TimelineError(f"{trace.name}: no event names an action, and ranks send messages. {_PLAN}")
        row = rows[rank] = list(row_of(rank)) if row_of else _row_of_one_stage(trace, pieces)
        places[rank] = _matches(pieces, row, [each.asked_s for each in optimizer_steps(trace)])
        if not places[rank]:
            raise TimelineError(_unlike(trace.name, rank, pieces, row, given=row_of is not None))
    same = _one_step(places, {rank: trace.base_ns for rank, trace in traces.items()})
    return {rank: _spans(trace, rank, same[rank], rows[rank]) for rank, trace in traces.items()}


def _row_of_one_stage(trace: RankTrace, pieces: Sequence[Piece]) -> list[Action]:
    """The forwards and backwards of one stage up to the last optimizer step, after the one before it; all of them where
    none is annotated."""
    asked_s = [each.asked_s for each in optimizer_steps(trace)] or [float("inf")]
    steps = [
        [each for each in pieces if low <= each.asked_s < high] for low, high in pairwise([float("-inf"), *asked_s])
    ]
    whole = [step for step in steps if {"F", "B"} == {piece.direction for piece in step}]
    most = max(map(len, whole), default=0)
    step = next((step for step in reversed(whole) if len(step) == most), [])
    numbers: dict[Direction, int] = {"F": 0, "B": 0}
    row = []
    for piece in step:
        row.append(Action(0, Kind.F if piece.direction == "F" else Kind.B, numbers[piece.direction]))
        numbers[piece.direction] += 1
    return [*row, Action(0, Kind.STEP)]


def _matches(pieces: Sequence[Piece], row: Sequence[Action], stepped_s: Sequence[float]) -> list[_Place]:
    """Where pieces are the actions of a row which compute, the last first: in their directions, each backward with its
    own forward, and no optimizer step among them."""
    actions = [action for action in row if action.kind in COMPUTE]
    wanted = [_direction(action) for action in actions]
    if None in wanted or not actions:
        return []
    found = []
    for first in range(len(pieces) - len(actions), -1, -1):
        own = list(pieces[first : first + len(actions)])
        if any(own[0].asked_s < each < own[-1].asked_s for each in stepped_s):
            continue
        if [piece.direction for piece in own] == wanted and _paired(first, own, actions):
            found.append(_Place(own, actions, pieces[first - 1].end_s if first else float("-inf")))
    return found


def _one_step(places: Mapping[int, Sequence[_Place]], base_ns: Mapping[int, int]) -> dict[int, _Place]:
    """Of each rank's places that of one step, the last: forwards begin stage by stage, backwards in the other
    direction. A rank whose actions alternate fits in many places, so those with few come first."""
    chosen: dict[int, _Place] = {}
    began_s: dict[tuple[Direction | None, int, int | None], float] = {}
    first_ns = min(base_ns.values())
    for rank in sorted(places, key=lambda each: len(places[each])):
        later_s = (base_ns[rank] - first_ns) * 1e-9

        def misplaced(place: _Place, later_s: float = later_s) -> int:
            count = 0
            for action, piece in zip(place.actions, place.pieces, strict=True):
                way, at_s = _direction(action), piece.asked_s + later_s
                before, after = (-1, 1) if way == "F" else (1, -1)
                count += began_s.get((way, action.stage + before, action.microbatch), at_s) > at_s
                count += began_s.get((way, action.stage + after, action.microbatch), at_s) < at_s
            return count

        chosen[rank] = min(places[rank], key=misplaced)
        for action, piece in zip(chosen[rank].actions, chosen[rank].pieces, strict=True):
            began_s.setdefault((_direction(action), action.stage, action.microbatch), piece.asked_s + later_s)
    return chosen


def _direction(action: Action) -> Direction | None:
    """Which direction an action is of; none for a pair, whose halves run at the same time."""
    return None if action.kind is Kind.OVERLAP_F_B else "F" if action.kind is Kind.F else "B"


def _paired(first: int, pieces: Sequence[Piece], actions: Sequence[Action]) -> bool:
    """Whether every forward's numbers return in the backwards of its stage and microbatch, and in no others."""
    for piece, action in zip(pieces, actions, strict=True):
        partners = [at - first for at in piece.partners if 0 <= at - first < len(actions)]
        if any((actions[at].stage, actions[at].microbatch) != (action.stage, action.microbatch) for at in partners):
            return False
    return True


def _spans(trace: RankTrace, rank: int, place: _Place, row: Sequence[Action]) -> list[Span]:
    """The actions of a rank that compute, its messages where there are as many as the row has, and its step."""
    spans = [
        Span(rank, "", action, piece.start_s, piece.end_s)
        for action, piece in zip(place.actions, place.pieces, strict=True)
    ]
    step = next((action for action in row if action.kind is Kind.STEP), None)
    stepped = [each for each in optimizer_steps(trace) if each.asked_s >= place.pieces[-1].asked_s]
    if step and stepped:
        spans.append(Span(rank, "", step, stepped[0].start_s, stepped[0].end_s))
    return spans + _messages(messages(trace, on_host=False), rank, place, row)


def _messages(recorded: Sequence[Event], rank: int, place: _Place, row: Sequence[Action]) -> list[Span]:
    """The messages of a step where there is no doubt which they are: as many as the row has, and in the row in the
    order in which actions make or need them. A trace without peers does not say whether a receive is of a stage's
    input or of its output's gradient, and programs ask for them in different orders."""
    found: list[Span] = []
    for kinds, word in ((SENDS, "send"), (RECEIVES, "recv")):
        wanted = [action for action in row if action.kind in kinds]
        own = [each for each in recorded if (named := MESSAGE.match(each.name)) and named[1] == word]
        begin_s = place.pieces[0].start_s if word == "send" else place.after_s
        own = [each for each in own if each.start_s >= begin_s][: len(wanted)]
        if wanted and len(own) == len(wanted) and wanted == _in_order(wanted, place.actions):
            found += [
                Span(rank, "", action, each.start_s, each.end_s) for action, each in zip(wanted, own, strict=True)
            ]
    return found


def _in_order(wanted: Sequence[Action], actions: Sequence[Action]) -> list[Action]:
    """Messages in the order of the actions that make or need them."""
    forward = {(action.stage, action.microbatch): at for at, action in enumerate(actions) if action.kind is Kind.F}
    backward = {(a.stage, a.microbatch): at for at, a in reversed([*enumerate(actions)]) if a.kind in (Kind.B, Kind.I)}
    of = {Kind.SEND_F: forward, Kind.RECV_F: forward, Kind.SEND_B: backward, Kind.RECV_B: backward}
    return sorted(wanted, key=lambda each: of[each.kind].get((each.stage, each.microbatch), len(actions)))


def _unlike(name: str, rank: int, pieces: Sequence[Piece], row: Sequence[Action], *, given: bool) -> str:
    """Why a rank's pieces are not those of a row."""
    wanted = [action for action in row if action.kind in COMPUTE]
    seen = "".join(piece.direction for piece in pieces)
    if any(action.kind is Kind.OVERLAP_F_B for action in wanted):
        return (
            f"{name}: the schedule runs forwards and backwards at the same time, which cannot be distinguished by "
            'their kernels. Write torch.profiler.record_function("2F3") around each.'
        )
    said = seen if len(seen) <= _SHOWN else f"... {seen[-_SHOWN:]}"
    asked = "".join(str(_direction(action)) for action in wanted[:_SHOWN]) + ("..." if len(wanted) > _SHOWN else "")
    what = "the plan's schedule" if given else "one stage"
    return (
        f"{name}: rank {rank} computed {len(pieces)} forwards and backwards, {said}, of which no {len(wanted)} in a "
        f"row are those of {what}, {asked}. Give the plan of this run with --compare (schedule, pp, vpp, "
        "microbatches), and a trace of at least one whole step."
    )
