"""Why ranks halted: what each of them waits for, matched against the others and against the schedule,
and who holds up the rest.

Reads a `watch.Board`, and what the ranks that still answer say about their threads. Nothing here
needs torch or a live rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.schedule.timeline import COMPUTE_LANE
from .rank_messages import Call, ThreadAt, Whereabouts
from .watch import BACKWARD_LANE, Board, LaneAt

VALIDATION = "validation"
"""The phase whose walk is over the forwards of the row and their messages."""

Found = Mapping[int, Whereabouts | None]
"""What ranks answered about themselves; None for one that did not answer."""


@dataclass(frozen=True)
class RankAt:
    """Where one rank is. `words` goes on from `rank 3 `; `waits_for` are the ranks that it cannot go on without, empty
    for one that waits for nobody; `lanes` is its part of the board."""

    global_rank: int
    words: str
    waits_for: tuple[int, ...]
    lanes: tuple[LaneAt, ...]


@dataclass(frozen=True)
class Halt:
    """All ranks, and those that hold up the others: who waits for nobody, or a circle of ranks
    that wait for each other."""

    ranks: tuple[RankAt, ...]
    holders: tuple[int, ...]
    is_circle: bool

    @property
    def lines(self) -> list[str]:
        """One sentence per rank."""
        return [f"rank {rank.global_rank} {rank.words}" for rank in self.ranks]

    def report(self, summary: str) -> dict[str, Any]:
        """The JSON form: `summary`, `holders`, `circle`, and `ranks` with `global_rank`, `words`,
        `waits_for` and `lanes`."""
        ranks = [{**asdict(rank), "lanes": [lane._asdict() for lane in rank.lanes]} for rank in self.ranks]
        return {"summary": summary, "holders": list(self.holders), "circle": self.is_circle, "ranks": ranks}


def explain(found: Found, board: Board | None = None) -> Halt:
    """Where the ranks of `found` are, and who holds them up."""
    ranks = tuple(_rank_at(rank, found, board) for rank in sorted(found))
    idle = tuple(rank.global_rank for rank in ranks if not rank.waits_for)
    circle = () if idle else _circle({rank.global_rank: rank.waits_for for rank in ranks})
    return Halt(ranks, idle or circle, bool(circle))


def last_words(board: Board, ended: Sequence[int]) -> Halt:
    """Where all ranks of a board were when some of them had ended."""
    ranks = []
    for rank in range(board.world_size):
        lanes = board.lanes(rank)
        if (compute := _compute(lanes)) is None:
            continue
        words = _past(_lane_words(rank, compute, board))
        others = [
            f"lane {lane.lane} at {lane.action}" for lane in lanes if lane.lane != COMPUTE_LANE and lane.state == "runs"
        ]
        words = "; ".join([f"{words}{_peer_words(compute, board, 'was at')}", *(others if rank in ended else [])])
        waits_for = (compute.peer,) if compute.state == "waits" and compute.peer not in (-1, rank) else ()
        ranks.append(RankAt(rank, f"{words}.", waits_for, lanes))
    return Halt(tuple(ranks), tuple(ended), False)


def _rank_at(rank: int, found: Found, board: Board | None) -> RankAt:
    lanes = board.lanes(rank) if board is not None else ()
    compute, where = _compute(lanes), found[rank]
    if where is None:
        seen = (
            f"; it was last seen where it {_lane_words(rank, compute, board)}"
            if compute is not None and board is not None
            else ""
        )
        return RankAt(rank, f"does not answer{seen}.", (), lanes)
    own = next((thread for thread in where.threads if thread.lane == COMPUTE_LANE), None)
    if compute is None or board is None:  # no schedule runs (yet): what the threads say is all there is
        waits_for = _missing(own.call, found) if own is not None and own.call is not None else ()
        words = f"waits in {', '.join(where.waits)}." if where.waits else f"is in {where.at}."
        return RankAt(rank, words, waits_for, lanes)
    words = _lane_words(rank, compute, board)
    if own is None:
        return RankAt(rank, f"{words}.", (), lanes)
    backward = next((thread for thread in where.threads if thread.lane == BACKWARD_LANE), None)
    if backward is not None and any(lane.lane == BACKWARD_LANE and lane.state != "done" for lane in lanes):
        return _pair_at(rank, words, list(zip(_parts(compute.action), (own, backward), strict=True)), found, lanes)
    if own.call is not None:
        return RankAt(rank, f"{words}, {_call_words(own.call, found)}.", _missing(own.call, found), lanes)
    if not own.in_mail:
        return RankAt(rank, f"{words}, in {own.at}.", (), lanes)
    if compute.peer not in (-1, rank):
        return RankAt(rank, f"{words}{_peer_words(compute, board)}.", (compute.peer,), lanes)
    lane = next((thread for thread in where.threads if compute.needs == f"lane {thread.lane}"), None)
    if lane is None:
        return RankAt(rank, f"{words}.", (), lanes)
    at = next((each.action for each in lanes if each.lane == lane.lane), "")
    doing = _call_words(lane.call, found) if lane.call is not None else f"in {lane.at}"
    return RankAt(rank, f"{words}, which is at {at}, {doing}.", _missing(lane.call, found) if lane.call else (), lanes)


def _pair_at(
    rank: int, words: str, parts: Sequence[tuple[str, ThreadAt]], found: Found, lanes: tuple[LaneAt, ...]
) -> RankAt:
    """A rank at a pair whose parts run in turns, `parts` with their threads. It waits for nobody while
    one of them computes."""
    doing: list[str] = []
    waits_for: dict[int, None] = {}
    computes = False
    for token, thread in parts:
        if thread.call is not None:
            doing.append(f"{token} {_call_words(thread.call, found)}")
            waits_for |= dict.fromkeys(_missing(thread.call, found))
        elif not thread.in_mail:
            doing.append(f"{token} in {thread.at}")
            computes = True
    return RankAt(rank, f"{words}: {'; '.join(doing)}.", () if computes else tuple(waits_for), lanes)


def _lane_words(rank: int, lane: LaneAt, board: Board | None) -> str:
    """`is at 4B2 (step 3, action 12 of 40)`, or `waits for 4F7 from rank 2 to run 5F7 (...)`."""
    if lane.state == "done":
        return f"has done its row ({lane.phase})"
    where = (
        f"({lane.phase}, action {lane.number} of {lane.total})"
        if lane.phase
        else (f"(action {lane.number} of {lane.total})")
    )
    if lane.state == "runs":
        return f"is at {lane.action} {where}"
    if lane.peer in (-1, rank):
        return f"waits for its {lane.needs} before {lane.action} {where}"
    needs = lane.needs if board is None else _as_written(lane.needs, _row(board, lane.peer, lane.phase))
    return f"waits for {needs} from rank {lane.peer} to run {lane.action} {where}"


def _past(words: str) -> str:
    verb, rest = words.split(" ", 1)
    was = {"is": "was", "waits": "waited", "has": "had"}[verb]
    return f"{was} {rest}"


def _peer_words(lane: LaneAt, board: Board, is_at: str = "is at") -> str:
    """`; rank 2 is at 4B2, 3 actions before it`: where the peer is that a lane waits for, on the
    way to what is needed."""
    if lane.state != "waits" or lane.peer < 0 or (peer := _compute(board.lanes(lane.peer))) is None:
        return ""
    at = f"; rank {lane.peer} {is_at} {peer.action}" if peer.action else f"; rank {lane.peer} has done its row"
    if peer.phase != lane.phase:
        return f"{at} of {peer.phase}"
    row = _row(board, lane.peer, lane.phase)
    numbers = [number for number, token in enumerate(row, 1) if _as_written(lane.needs, (token,)) in _parts(token)]
    if not numbers:
        return f"{at}, and its row has no {lane.needs}" if row else at
    ahead = numbers[0] - (peer.number if peer.state != "done" else len(row) + 1)
    if ahead == 0:
        return at
    return f"{at}, {_count(ahead, 'action')} before it" if ahead > 0 else f"{at}, {_count(-ahead, 'action')} after it"


def _call_words(call: Call, found: Found) -> str:
    """`in all_reduce, call 17 of group 'tp/0' over ranks 0, 1: rank 1 has not come`."""
    if call.number is None:
        other = next((rank for rank in call.ranks if rank not in call.own), call.ranks[0])
        return f"in {call.op} of channel {call.name!r}, whose other end is rank {other}"
    others = {
        rank: each
        for rank in call.ranks
        if rank not in call.own
        for each in _calls(rank, found)
        if each.name == call.name
    }
    same = {rank: each for rank, each in others.items() if each.number == call.number}
    words = f"in {call.op}, call {call.number} of group {call.name!r} over ranks {_listed(call.ranks)}"
    unlike = [f"rank {rank} came with {each.op}" for rank, each in same.items() if each.op != call.op]
    missing = [f"rank {rank} has not come" for rank in _missing(call, found)]
    return f"{words}: {', '.join([*unlike, *missing]) or 'all have come'}"


def _missing(call: Call | None, found: Found) -> tuple[int, ...]:
    """The ranks that a call waits for: the other end of a channel, the members of a group that are
    not in the same call."""
    if call is None:
        return ()
    others = [rank for rank in call.ranks if rank not in call.own]
    if call.number is None:
        return tuple(others)
    return tuple(
        rank
        for rank in others
        if not any(each.name == call.name and each.number == call.number for each in _calls(rank, found))
    )


def _calls(rank: int, found: Found) -> list[Call]:
    where = found.get(rank)
    return [] if where is None else [thread.call for thread in where.threads if thread.call is not None]


def _compute(lanes: Sequence[LaneAt]) -> LaneAt | None:
    return next((lane for lane in lanes if lane.lane == COMPUTE_LANE), None)


def _row(board: Board, rank: int, phase: str) -> tuple[str, ...]:
    row = board.row(rank)
    if phase != VALIDATION:
        return row
    return tuple(part for token in row for part in _parts(token) if re.fullmatch(r"\d+(F|SEND_F|RECV_F)\d+", part))


def _parts(token: str) -> list[str]:
    """The actions of a cell: one, or the two of an overlapped pair."""
    return [part for part in re.split(r"[();]", token) if part and part != "OVERLAP_F_B"]


def _as_written(needs: str, row: Sequence[str]) -> str:
    """A backward as a row has it, which may split it: `4B2`, or `4I2`."""
    split = re.sub(r"^(\d+)B(\d+)$", r"\1I\2", needs)
    return split if any(split in _parts(token) for token in row) else needs


def _circle(waits_for: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Ranks that wait for each other, in order; every rank waits for one at least."""
    path = [next(iter(waits_for))]
    while (following := next((rank for rank in waits_for.get(path[-1], ()) if rank in waits_for), None)) is not None:
        if following in path:
            return tuple(path[path.index(following) :])
        path.append(following)
    return ()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:4]))}, ... {ranks[-1]}"
