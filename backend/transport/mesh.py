"""`Mesh`: the groups and channels of one rank, from a layout and a lowered schedule.

Everything is opened when the mesh is made, by all ranks in one order over the whole world: tensor groups (twice), data
groups, replica groups, model groups, embedding groups, those of experts, then channels. Each rank opens its own share
of that order, so no two ranks can wait for each other in a circle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from ...core.layout.layout import Layout
from ...core.schedule.action import SENDS, Kind
from ...core.schedule.placement import Placement
from ...core.schedule.schedule import Schedule
from .base import Channel, Group, Transport
from .baton import Baton, PairedGroup

Direction = Literal["F", "B"]
Link = tuple[Direction, int, int]
"""A direction of messages and the pipeline ranks it goes from and to: `("F", 0, 1)`."""

_MESSAGES: tuple[tuple[Kind, Direction, int], ...] = (
    (Kind.SEND_F, "F", 1),
    (Kind.SEND_B, "B", -1),
    (Kind.RECV_F, "F", -1),
    (Kind.RECV_B, "B", 1),
)
"""Kinds of messages with their direction, and how far the peer's stage is."""


class Mesh:
    """What one rank communicates through.

    `coordinates` are the rank's (`tp`, `cp`, `dp`, `pp`). `tp` cuts tensors; `tp_gradients` joins the same ranks for
    gradients of their own tokens or heads, which are reduced outside the compute lane (None in a group of one), and
    `tp_cp_gradients` those of all parts of a sequence; `cp` cuts sequences, of which `cp_inner` joins neighbours that
    exchange heads and `cp_outer` those that exchange keys and values (`cp` itself without neighbours); `dp` cuts the
    batch and, as its fastest axis, sequences; `copies(stage)` joins all copies of a stage; `model` spans tensor and
    pipeline parallelism (one copy of the model, or two where stages have replicas); `embedding` joins the ranks that
    hold the first and the last stage of the same slice (first stage first), and is None where that is one rank, or on
    ranks between; with ZeRO it joins the ranks that hold different replicas of both (`Placement.crossed_ends_of`). With
    `experts`, `etp` and `ep` cut and spread them, and `expert_copies(stage)` joins their copies. Channels come from
    `channel`. Raises `ValueError` when layout, schedule and transport disagree about the number of ranks.
    """

    tp: Group
    cp: Group
    cp_inner: Group | None
    cp_outer: Group | None
    tp_gradients: Group | None
    tp_cp_gradients: Group | None
    dp: Group
    model: Group
    embedding: Group | None
    etp: Group
    ep: Group

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        schedule: Schedule,
        *,
        experts: bool = False,
        baton: Baton | None = None,
    ):
        """With a `baton` forwards and backwards have `tp`, `cp`, `etp` and `ep` of their own, and lend it
        while they wait there."""
        if layout.world_size != transport.world_size:
            raise ValueError(f"the layout has {layout.world_size} ranks, but {transport.world_size} were started.")
        if layout.pp != schedule.num_ranks:
            raise ValueError(
                f"the layout has pp={layout.pp}, but schedule {schedule.name!r} is for "
                f"{schedule.num_ranks} pipeline ranks."
            )
        here = transport.global_rank
        self.coordinates = layout.coordinates(here)
        self.tp = _paired(transport, "tp", layout.group_of(here, "tp"), baton)
        self.cp = _paired(transport, "cp", layout.group_of(here, "cp"), baton)
        self.cp_inner = self.cp_outer = None
        if layout.cp_inner > 1:
            inner, outer = layout.context_groups_of(here)
            self.cp_inner = _paired(transport, "cp_inner", inner, baton)
            self.cp_outer = _paired(transport, "cp_outer", outer, baton)
        self.tp_gradients = self.tp_cp_gradients = None
        if layout.tp > 1:
            members = layout.group_of(here, "tp")
            self.tp_gradients = self.tp_cp_gradients = transport.group(
                f"tp-gradients/{members[0]}", "tp", members, by_all=True
            )
        if layout.tp > 1 and layout.cp > 1:
            members = _ranks(layout, self.coordinates, cp=range(layout.cp), tp=range(layout.tp))
            self.tp_cp_gradients = transport.group(f"tp_cp-gradients/{members[0]}", "tp_cp", members, by_all=True)
        self.dp = _open(transport, "dp", _ranks(layout, self.coordinates, dp=range(layout.dp), cp=range(layout.cp)))
        # By stage the copies of one with replicas on two pipeline ranks; those of other stages are `dp`.
        self._replicas = {
            stage: transport.group(f"replica{stage}/{ranks[0]}", "replica", ranks)
            for stage, ranks in _replica_ranks(layout, schedule.placement, self.coordinates).items()
        }
        self.model = _open(transport, "model", layout.group_of(here, "tp-pp"))
        placement, here_pp = schedule.placement, self.coordinates["pp"]
        pair = placement.ends_of(here_pp) or (placement.crossed_ends_of(here_pp) if layout.zero else ())
        ends = [layout.global_rank(**{**self.coordinates, "pp": end}) for end in pair]
        self.embedding = _open(transport, "embedding", ends, by_all=False) if ends else None
        # The same for experts, of which the copies elsewhere are `_edp`.
        self._expert_replicas: dict[int, Group] = {}
        self._edp: Group | None = None
        if experts:
            self.etp, self.ep = (
                _paired(transport, axis, layout.expert_group_of(here, grid), baton)
                for axis, grid in (("etp", "tp"), ("ep", "ep"))
            )
            self._edp = _open(transport, "edp", layout.expert_group_of(here, "dp"))
            self._expert_replicas = {
                stage: transport.group(f"expert_replica{stage}/{ranks[0]}", "expert_replica", ranks)
                for stage, ranks in _expert_replica_ranks(layout, schedule.placement, here).items()
            }
        links = links_of(schedule, self.coordinates["pp"])
        # By (direction, peer, sending).
        self._channels = {link: _open_channel(transport, layout, self.coordinates, link) for link in links}

    @property
    def cp_levels(self) -> tuple[Group, Group] | None:
        """Neighbours that exchange heads and those that exchange keys and values, where there are both levels."""
        return None if self.cp_inner is None or self.cp_outer is None else (self.cp_inner, self.cp_outer)

    def copies(self, stage: int) -> Group:
        """The ranks that add up the gradients of one of this rank's stages, in the order of the samples they see: `dp`,
        or where the stage has replicas those of every data-parallel rank (`Plan.copy_of`)."""
        return self._replicas.get(stage, self.dp)

    def expert_copies(self, stage: int) -> Group:
        """The ranks that add up the gradients of this rank's experts of one of its stages: `edp`, or those of all
        replicas of the stage."""
        assert self._edp is not None, "the mesh was made without experts"
        return self._expert_replicas.get(stage, self._edp)

    def channel(self, direction: Direction, source_pp: int, destination_pp: int) -> Channel:
        """The channel for forward (`F`) or backward (`B`) messages between two pipeline ranks,
        one of which is this one.

        Raises `ValueError` for a link that the schedule does not use on this rank.
        """
        link = (direction, source_pp, destination_pp)
        if link not in self._channels:
            known = ", ".join(f"{d} {s}->{t}" for d, s, t in self._channels) or "none"
            raise ValueError(
                f"pipeline rank {self.coordinates['pp']} has no channel {direction} {source_pp}->{destination_pp}: "
                f"the schedule sends nothing there. Its channels: {known}."
            )
        return self._channels[link]

    @property
    def links(self) -> tuple[Link, ...]:
        """The links this rank is an end of, in the order they were opened."""
        return tuple(self._channels)


def links_of(schedule: Schedule, pp_rank: int | None = None) -> tuple[Link, ...]:
    """Every link that a lowered schedule sends over, sorted; with `pp_rank` only those that begin or end there.

    >>> from shardproof.core.schedule import build, lower
    >>> links_of(lower(build("1F1B", pp=3, num_microbatches=2)), 0)
    (('B', 1, 0), ('F', 0, 1))
    """
    here = range(schedule.num_ranks) if pp_rank is None else (pp_rank,)
    return tuple(sorted({link for rank in here for link in _links_at(schedule, rank)}))


def _links_at(schedule: Schedule, pp_rank: int) -> Iterator[Link]:
    """The links that the messages of one row go over: as many as there are peers and directions,
    however long the row is."""
    row = schedule.row(pp_rank)
    for kind, direction, step in _MESSAGES:
        chosen = row.kind == kind
        cells = np.unique(np.stack([row.stage[chosen] + step, row.microbatch[chosen]]), axis=1)
        for peer in {schedule.placement.rank_of(stage, microbatch) for stage, microbatch in cells.T.tolist()}:
            yield (direction, pp_rank, peer) if kind in SENDS else (direction, peer, pp_rank)


def _replica_ranks(layout: Layout, placement: Placement, coordinates: dict[str, int]) -> dict[int, list[int]]:
    """Global ranks of all copies of each of this rank's stages that have replicas."""
    return {
        stage: _ranks(layout, coordinates, dp=range(layout.dp), pp=owners, cp=range(layout.cp))
        for stage, owners in enumerate(placement.ranks)
        if len(owners) > 1 and coordinates["pp"] in owners
    }


def _expert_replica_ranks(layout: Layout, placement: Placement, global_rank: int) -> dict[int, list[int]]:
    """Global ranks of all copies of this rank's experts in each of its stages that have replicas."""
    here = layout.coordinates(global_rank)["pp"]
    by_pp: dict[int, list[int]] = {}
    for rank in layout.expert_group_of(global_rank, "dp-pp"):
        by_pp.setdefault(layout.coordinates(rank)["pp"], []).append(rank)
    return {
        stage: [rank for copy in zip(*(by_pp[owner] for owner in owners), strict=True) for rank in copy]
        for stage, owners in enumerate(placement.ranks)
        if len(owners) > 1 and here in owners
    }


def _ranks(layout: Layout, coordinates: dict[str, int], **axes: Sequence[int]) -> list[int]:
    """The global ranks at all combinations of some coordinates, the last axis varying fastest; the
    others are this rank's."""
    combinations = itertools.product(*axes.values())
    return [layout.global_rank(**{**coordinates, **dict(zip(axes, each, strict=True))}) for each in combinations]


def _open(transport: Transport, axis: str, ranks: Sequence[int], *, by_all: bool = True) -> Group:
    # the groups of an axis share no rank, so the first member distinguishes them
    return transport.group(f"{axis}/{ranks[0]}", axis, ranks, by_all=by_all)


def _paired(transport: Transport, axis: str, ranks: Sequence[int], baton: Baton | None) -> Group:
    group = _open(transport, axis, ranks)
    if baton is None or group.size == 1:
        return group
    return PairedGroup(group, transport.group(f"{axis}-backward/{ranks[0]}", axis, ranks, by_all=True), baton)


def _open_channel(transport: Transport, layout: Layout, coordinates: dict[str, int], link: Link) -> Channel:
    direction, *ends = link
    source, destination = (layout.global_rank(**{**coordinates, "pp": pp_rank}) for pp_rank in ends)
    return transport.channel(f"{direction}/{source}-{destination}", source, destination)
