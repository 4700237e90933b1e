"""`Graph`: what each action of a lowered schedule waits for, under the execution rule that simulator and backend share.

Each rank has one compute lane, one lane per peer, direction and sense for messages, and one lane for data parallelism;
a lane runs its actions in list order. A send starts when its payload exists. A receive is posted once the compute lane
has reached the place in the list of the receive `recv_buffers` before it on the same lane. A compute action starts when
its inputs have arrived. REDUCE_GRAD follows the last backward of its stage on every replica, F and B follow UNSHARD,
STEP follows every reduction of its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ...core.base.errors import ScheduleError
from ...core.schedule.action import COMPUTE, RECEIVES, SENDS, Kind
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import COMPUTE_LANE, message_lane
from . import kernel

Sends = Literal["buffered", "rendezvous", "blocking"]
"""What ends a send: its duration, or its receive too. `blocking` is a rendezvous during which the sender computes
nothing: a send starts when its rank reaches it, and F, B, I, W and STEP start when the last SEND_F and the last SEND_B
listed before them have ended (an overlapped pair is made to overlap with messages and does not wait for them)."""

DP_LANE = "dp"
NUM_WAITS = 4
"""At most four actions have to end before another starts: its lane's previous one and three inputs."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A lowered schedule with its waits resolved; all arrays are indexed by action, in the order of `schedule.actions`.

    `waits[j, i]` is an action that must end before action i starts, -1 for none; waits on a receive are written
    as waits on its send, and receives themselves have none: they end with their send (or, buffered, when they
    are posted, if that is later). `partner` pairs sends with receives. `posted_after` is the compute action
    after which a receive is posted.
    """

    schedule: Schedule
    sends: Sends
    rank: np.ndarray
    waits: np.ndarray
    partner: np.ndarray
    posted_after: np.ndarray

    @cached_property
    def _lanes(self) -> tuple[np.ndarray, tuple[str, ...]]:
        return _assign_lanes(self.schedule, self.rank, self.partner)

    @property
    def lane(self) -> np.ndarray:
        """The lane of every action, as a place in `lanes`."""
        return self._lanes[0]

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes' names: compute, dp, then messages by kind and peer."""
        return self._lanes[1]

    @cached_property
    def lane_order(self) -> np.ndarray:
        """The actions by (rank, lane, place in the list)."""
        return _stable_order(self.rank.astype(np.int64) * len(self.lanes) + self.lane)

    @cached_property
    def is_receive(self) -> np.ndarray:
        """Mask of receives."""
        return _among(self.schedule.actions.kind, RECEIVES)

    @cached_property
    def is_compute(self) -> np.ndarray:
        """Mask of what occupies the compute lane."""
        return _among(self.schedule.actions.kind, COMPUTE | {Kind.STEP})

    @cached_property
    def can_lead(self) -> np.ndarray:
        """Mask of the actions that may start before what feeds them has ended, see `engine.execute`."""
        return _among(self.schedule.actions.kind, {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.STEP})

    @cached_property
    def evaluated(self) -> np.ndarray:
        """Indices of the actions whose time has to be worked out: all but the receives."""
        return np.flatnonzero(~self.is_receive)

    @cached_property
    def row_bounds(self) -> list[int]:
        """Bounds of each rank's interval of `evaluated`."""
        return np.searchsorted(self.evaluated, self.schedule.offsets).tolist()

    @cached_property
    def evaluated_waits(self) -> list[list[int]]:
        """`waits` of the evaluated actions as places in `evaluated`; -1 for none. Lists, because the engine
        walks them one by one."""
        place = np.full(len(self.rank) + 1, -1, dtype=np.int64)
        place[self.evaluated] = np.arange(len(self.evaluated))
        return place[self.waits[:, self.evaluated]].tolist()


def build_graph(schedule: Schedule, *, sends: Sends = "buffered", recv_buffers: int = 2) -> Graph:
    """The waits of a lowered schedule. Raises `ScheduleError` for an input or a message that nobody provides."""
    resolved = kernel.resolve(
        schedule, rendezvous=sends != "buffered", blocking=sends == "blocking", recv_buffers=recv_buffers
    )
    return (
        Graph(schedule, sends, *resolved) if resolved else plain_graph(schedule, sends=sends, recv_buffers=recv_buffers)
    )


def plain_graph(schedule: Schedule, *, sends: Sends = "buffered", recv_buffers: int = 2) -> Graph:
    """`build_graph` without compiled loops: their oracle, and the words for what is wrong with a schedule."""
    return _Builder(schedule, sends, recv_buffers).build()


class _Builder:
    """The columns of a schedule and the lookups shared by the steps of `build_graph`."""

    def __init__(self, schedule: Schedule, sends: Sends, recv_buffers: int):
        actions = schedule.actions
        self.schedule, self.sends, self.recv_buffers = schedule, sends, recv_buffers
        self.kind, self.stage, self.microbatch = (
            actions.kind,
            actions.stage.astype(np.int64),
            actions.microbatch.astype(np.int64),
        )
        self.pair_stage, self.pair_microbatch = (
            actions.pair_stage.astype(np.int64),
            actions.pair_microbatch.astype(np.int64),
        )
        self.size = len(actions)
        self.rank = np.repeat(np.arange(schedule.num_ranks), np.diff(schedule.offsets))
        self.is_compute = _among(self.kind, COMPUTE | {Kind.STEP})
        self.overlap = self.kind == Kind.OVERLAP_F_B
        self.forward = (self.kind == Kind.F) | self.overlap
        self.backward = (self.kind == Kind.B) | (self.kind == Kind.I) | self.overlap
        self.backward_stage = np.where(self.overlap, self.pair_stage, self.stage)
        self.backward_microbatch = np.where(self.overlap, self.pair_microbatch, self.microbatch)
        self.forward_at = self.table(self.forward, self.stage, self.microbatch)
        self.backward_at = self.table(self.backward, self.backward_stage, self.backward_microbatch)

    def build(self) -> Graph:
        partner = self.partners()
        lane, lanes = _assign_lanes(self.schedule, self.rank, partner)
        lane_key = self.rank * len(lanes) + lane
        lane_order = _stable_order(lane_key)
        before_in_lane = self.before_in_lane(lane_key, lane_order)
        compute_before = self.latest_in_row(self.is_compute)
        posted_after = self.posting(lane_key, lane_order, compute_before)
        waits = np.full((NUM_WAITS, self.size), -1, dtype=np.int64)
        waits[0] = before_in_lane
        self.compute_waits(waits, partner)
        self.data_parallel_waits(waits, compute_before)
        self.send_waits(waits, partner, before_in_lane, posted_after)
        if self.sends == "blocking":
            self.blocking_waits(waits, compute_before)
        return Graph(self.schedule, self.sends, self.rank, waits, partner, posted_after)

    def table(self, mask: np.ndarray, stage: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
        """[stages, microbatches] -> the masked action there, -1 for none."""
        found = np.full((self.schedule.num_stages, self.schedule.num_microbatches), -1, dtype=np.int64)
        index = np.flatnonzero(mask)
        found[stage[index], microbatch[index]] = index
        return found

    def before_in_lane(self, lane_key: np.ndarray, lane_order: np.ndarray) -> np.ndarray:
        """The action before each on its lane, -1 for none."""
        before = np.full(self.size, -1, dtype=np.int64)
        same_lane = lane_key[lane_order[1:]] == lane_key[lane_order[:-1]]
        before[lane_order[1:][same_lane]] = lane_order[:-1][same_lane]
        return before

    def latest_in_row(self, is_source: np.ndarray) -> np.ndarray:
        """For each action the last source listed before it on its rank, -1 for none."""
        latest = np.full(self.size, -1, dtype=np.int64)
        latest[1:] = np.maximum.accumulate(np.where(is_source, np.arange(self.size), -1))[:-1]
        latest[latest < np.repeat(self.schedule.offsets[:-1], np.diff(self.schedule.offsets))] = -1
        return latest

    def latest_of_stage(self, source: np.ndarray, query: np.ndarray) -> np.ndarray:
        """For each action of `query` the last one of `source` listed before it on its rank that has a
        stage in common, -1 for none.

        Both are on in-order lanes, so of two stages of a pair the later action is enough to wait for.
        """

        def keys(index: np.ndarray, stage: np.ndarray) -> np.ndarray:
            return (self.rank[index] * self.schedule.num_stages + stage[index]) * self.size + index

        found = np.full(len(query), -1, dtype=np.int64)
        stages = (self.stage, self.backward_stage) if self.overlap.any() else (self.stage,)
        sources = np.sort(np.concatenate([keys(source, stage) for stage in stages]))
        for stage in stages:
            asked = keys(query, stage)
            latest = np.append(sources, -1)[np.searchsorted(sources, asked) - 1]
            same = latest // self.size == asked // self.size
            found = np.maximum(found, np.where(same, latest % self.size, -1))
        return found

    def partners(self) -> np.ndarray:
        """Each send's receive and each receive's send, matched by (kind, stage, microbatch)."""
        partner = np.full(self.size, -1, dtype=np.int64)
        for send_kind, receive_kind, step in ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1)):
            send, receive = np.flatnonzero(self.kind == send_kind), np.flatnonzero(self.kind == receive_kind)
            receive_at = self.table(self.kind == receive_kind, self.stage, self.microbatch)
            target = self.stage[send] + step
            inside = (target >= 0) & (target < self.schedule.num_stages)
            partner[send] = np.where(
                inside, receive_at[np.clip(target, 0, self.schedule.num_stages - 1), self.microbatch[send]], -1
            )
            matched = send[partner[send] >= 0]
            partner[partner[matched]] = matched
            self.complain(send[partner[send] < 0], "has no receive on any rank")
            self.complain(receive[partner[receive] < 0], "has no send on any rank")
        return partner

    def posting(self, lane_key: np.ndarray, lane_order: np.ndarray, compute_before: np.ndarray) -> np.ndarray:
        """For receives, the compute action after which they are posted: the one listed before the receive
        `recv_buffers` earlier."""
        posted_after = np.full(self.size, -1, dtype=np.int64)
        earlier = np.full(self.size, -1, dtype=np.int64)
        ahead = self.recv_buffers
        same_lane = lane_key[lane_order[ahead:]] == lane_key[lane_order[: self.size - ahead]]
        earlier[lane_order[ahead:]] = np.where(same_lane, lane_order[: self.size - ahead], -1)
        receives = np.flatnonzero(_among(self.kind, RECEIVES) & (earlier >= 0))
        posted_after[receives] = compute_before[earlier[receives]]
        return posted_after

    def compute_waits(self, waits: np.ndarray, partner: np.ndarray) -> None:
        """Inputs of forwards and backwards; a backward also follows its own forward, a W its I,
        STEP the last reduction."""
        forward = np.flatnonzero(self.forward & (self.stage > 0))
        waits[1, forward] = self.sources(
            forward, self.stage[forward], self.microbatch[forward], Kind.RECV_F, self.forward_at, partner
        )
        stage, microbatch = self.backward_stage, self.backward_microbatch
        backward = np.flatnonzero(self.backward & (stage < self.schedule.num_stages - 1))
        waits[2, backward] = self.sources(
            backward, stage[backward], microbatch[backward], Kind.RECV_B, self.backward_at, partner
        )
        alone = np.flatnonzero(self.backward & ~self.overlap)
        waits[1, alone] = self.forward_at[stage[alone], microbatch[alone]]
        self.complain(alone[waits[1, alone] < 0], "has no forward")
        weight = np.flatnonzero(self.kind == Kind.W)
        waits[1, weight] = self.backward_at[stage[weight], microbatch[weight]]
        step = np.flatnonzero(self.kind == Kind.STEP)
        if len(step):
            waits[1, step] = self.latest_in_row(_among(self.kind, {Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD}))[step]

    def sources(
        self,
        index: np.ndarray,
        stage: np.ndarray,
        microbatch: np.ndarray,
        receive: Kind,
        producer_at: np.ndarray,
        partner: np.ndarray,
    ) -> np.ndarray:
        """What each action of `index` gets its input from: the send of its message, or its rank's
        own neighbouring stage."""
        received = self.table(self.kind == receive, self.stage, self.microbatch)[stage, microbatch]
        source = np.where(received >= 0, partner[received], -1)
        local = np.flatnonzero(received < 0)
        neighbour = stage[local] + (-1 if receive is Kind.RECV_F else 1)
        producer = producer_at[neighbour, microbatch[local]]
        on_this_rank = (producer >= 0) & (self.rank[producer] == self.rank[index[local]])
        source[local] = np.where(on_this_rank, producer, -1)
        self.complain(index[local[~on_this_rank]], f"needs its {receive.name}, which its rank does not have")
        return source

    def data_parallel_waits(self, waits: np.ndarray, compute_before: np.ndarray) -> None:
        """REDUCE_GRAD and RESHARD follow their stage's last compute, UNSHARD the compute listed before it, and
        F and B their UNSHARD."""
        reduce = np.flatnonzero(_among(self.kind, {Kind.REDUCE_GRAD, Kind.RESHARD}))
        if len(reduce):
            waits[1, reduce] = self.latest_of_stage(np.flatnonzero(self.is_compute), reduce)
        self.replica_waits(waits)
        unshard = self.kind == Kind.UNSHARD
        if unshard.any():
            waits[1, unshard] = compute_before[unshard]
            needing = np.flatnonzero(self.is_compute & (self.kind != Kind.STEP))
            waits[3, needing] = self.latest_of_stage(np.flatnonzero(unshard), needing)

    def replica_waits(self, waits: np.ndarray) -> None:
        """The reductions of a stage's two replicas are one collective: each also follows what the other follows."""
        owners = self.schedule.placement.ranks
        pair = np.array([ranks if len(ranks) == 2 else (-1, -1) for ranks in owners])
        if (pair < 0).all():
            return
        reduce = np.flatnonzero((self.kind == Kind.REDUCE_GRAD) & (pair[self.stage, 0] >= 0))
        at = np.full((self.schedule.num_ranks, self.schedule.num_stages), -1, dtype=np.int64)
        at[self.rank[reduce], self.stage[reduce]] = reduce
        first, second = pair[self.stage[reduce]].T
        counterpart = at[np.where(self.rank[reduce] == first, second, first), self.stage[reduce]]
        self.complain(reduce[counterpart < 0], "has no REDUCE_GRAD of its stage on the other replica's rank")
        waits[2, reduce], waits[3, reduce] = waits[0, counterpart], waits[1, counterpart]

    def send_waits(
        self, waits: np.ndarray, partner: np.ndarray, before_in_lane: np.ndarray, posted_after: np.ndarray
    ) -> None:
        """A send follows its payload; under rendezvous also its receive: the receive lane's previous
        message, and the posting."""
        for kind, producer_at in ((Kind.SEND_F, self.forward_at), (Kind.SEND_B, self.backward_at)):
            send = np.flatnonzero(self.kind == kind)
            waits[1, send] = producer_at[self.stage[send], self.microbatch[send]]
            self.complain(send[waits[1, send] < 0], "has no action that makes its payload")
        send = np.flatnonzero(_among(self.kind, SENDS))
        if self.sends != "buffered":
            previous = before_in_lane[partner[send]]
            waits[2, send] = np.where(previous >= 0, partner[previous], -1)
            waits[3, send] = posted_after[partner[send]]

    def blocking_waits(self, waits: np.ndarray, compute_before: np.ndarray) -> None:
        """A send follows the compute listed before it, and compute the sends listed since. Their waits take the places
        of those that they imply: of the compute before, of the payload, and of a backward's own forward."""
        send = np.flatnonzero(_among(self.kind, SENDS))
        self.complain(send[waits[1, send] > compute_before[send]], "comes before what makes its payload")
        waits[1, send] = compute_before[send]
        standing = self.is_compute & ~self.overlap
        for kind, place in ((Kind.SEND_F, 0), (Kind.SEND_B, 2)):
            latest = self.latest_in_row(self.kind == kind)
            index = np.flatnonzero(standing & (latest > compute_before))
            places = np.where((kind == Kind.SEND_B) & self.backward[index], 1, place)
            replaced = index[places == 1]
            self.complain(replaced[waits[1, replaced] > compute_before[replaced]], "comes before its forward")
            waits[places, index] = latest[index]

    def complain(self, index: np.ndarray, what: str) -> None:
        if len(index):
            first = int(index[0])
            more = f" (and {len(index) - 1} more such actions)" if len(index) > 1 else ""
            raise ScheduleError(
                f"schedule {self.schedule.name!r} cannot run: {self.schedule.actions[first]} on pipeline rank "
                f"{int(self.rank[first])} "
                f"{what}{more}. `shardproof verify` lists every such place."
            )


_MESSAGES: tuple[tuple[Kind, Literal["F", "B"], bool], ...] = (
    (Kind.SEND_F, "F", True),
    (Kind.RECV_F, "F", False),
    (Kind.SEND_B, "B", True),
    (Kind.RECV_B, "B", False),
)


def _assign_lanes(schedule: Schedule, rank: np.ndarray, partner: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """The lane of every action and the lanes' names: compute, dp, then messages by kind and peer."""
    num_ranks, kind = schedule.num_ranks, schedule.actions.kind
    lane = np.where(_among(kind, COMPUTE | {Kind.STEP}), 0, 1)
    names = {0: COMPUTE_LANE, 1: DP_LANE}
    for number, (message, direction, sending) in enumerate(_MESSAGES):
        mask = kind == message
        lane[mask] = 2 + number * num_ranks + rank[partner[mask]]
        for peer in np.flatnonzero(np.bincount(rank[partner[mask]])).tolist():
            names[2 + number * num_ranks + peer] = message_lane(direction, sending, peer)
    used = np.flatnonzero(np.bincount(lane))
    number_of = np.zeros(2 + len(_MESSAGES) * num_ranks, dtype=np.int64)
    number_of[used] = np.arange(len(used))
    return number_of[lane], tuple(names[code] for code in used.tolist())


def _among(kind: np.ndarray, kinds: frozenset[Kind] | set[Kind]) -> np.ndarray:
    member = np.zeros(len(Kind), dtype=bool)
    member[list(kinds)] = True
    return member[kind]


def _stable_order(key: np.ndarray) -> np.ndarray:
    """Indices by key, equal keys in list order. numpy sorts 16-bit integers by radix, several times
    faster than wider ones."""
    if (key[1:] >= key[:-1]).all():
        return np.arange(len(key))
    return np.argsort(key.astype(np.uint16) if key.max() < 2**16 else key, kind="stable")
