"""What slow and failed links leave of the rates of every group of ranks, on every pipeline and data-parallel rank.

A link that is slow slows every group with a member that uses it, as far as the group uses links of that kind
(`topology.degraded`). Of a failed network card the devices move to the nearest card of their node that works
(NCCL chooses among the cards it finds); what a failed uplink of a rail carried goes evenly over the node
group's other rails. Modelled.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.layout.layout import Layout
from ...core.machine.cluster import ClusterSpec
from ...core.machine.variation import LinkName, Variation, link_named, names_in
from ...core.plan.plan import Plan
from ...core.program import tied_ends
from .spreads import CONTEXT_AXES, DENSE_AXES, EXPERT_AXES, Spreads, strides
from .topology import Shares, Spread, card_of, cards_in_node, degraded, devices_in_node, leaf_of

_GRIDS = {"dense": ("tp", "cp", "dp", "pp"), "expert": ("tp", "ep", "dp", "pp")}
"""Axes of the two grids of ranks, in the order of the arrays below."""


def rank_shares(variation: Variation, cluster: ClusterSpec) -> np.ndarray:
    """[3, ranks] what is left for each rank of its device link, its way into the network, and its
    leaf switch's uplinks."""
    shares = np.ones((3, cluster.num_devices))
    cards: dict[int, np.ndarray] = {}  # node -> share of each card, of nodes with a slow or failed one
    rails: dict[int, np.ndarray] = {}  # group of nodes -> share of each rail's uplinks
    slow = [(link_named(name, cluster), share) for name, share in variation.slow_links.items()]
    failed = [(link_named(name, cluster), 0.0) for name in names_in(variation.failed_links)]
    for link, share in [*slow, *failed]:
        if link.kind == "device":
            shares[0, link.index] *= share
        elif link.kind == "leaf":
            rails.setdefault(link.index, np.ones(cards_in_node(cluster) if cluster.rails else 1))[link.part] *= share
        else:
            _scale(cards.setdefault(link.index, np.ones(cards_in_node(cluster))), link, share)
    for node, left in cards.items():
        first = node * cluster.devices_per_node
        shares[1, first : first + devices_in_node(cluster)] = _device_shares(cluster, left)
    for group, left in rails.items():
        _apply_rails(cluster, group, left, shares[2])
    return shares


def _scale(cards: np.ndarray, link: LinkName, share: float) -> None:
    cards[slice(None) if link.kind == "node" else link.part] *= share


def _device_shares(cluster: ClusterSpec, cards: np.ndarray) -> np.ndarray:
    """[devices of a node] what each device has left of its share of a card, after devices of
    failed cards have moved."""
    working = np.flatnonzero(cards)
    own = np.array([card_of(cluster, device) for device in range(devices_in_node(cluster))])
    used = working[np.abs(own[:, None] - working).argmin(axis=1)]
    users = np.bincount(used, minlength=len(cards))
    before = np.maximum(1, np.bincount(own, minlength=len(cards)))  # a card that nobody used is a whole one
    return cards[used] * before[used] / users[used]


def _apply_rails(cluster: ClusterSpec, group: int, left: np.ndarray, leaf: np.ndarray) -> None:
    """Ranks of a group of nodes on their rails; what failed ones carried goes over the others."""
    free = np.count_nonzero(left) / len(left)
    for rank in range(cluster.num_devices):
        node, device = divmod(rank, cluster.devices_per_node)
        if leaf_of(cluster, node) == group:
            share = left[card_of(cluster, device) if cluster.rails else 0]
            leaf[rank] = (share or 1.0) * free


class LinkShares:
    """The shares of every group of a plan, by axis of a collective."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._layout = plan.layout
        self._ranks = rank_shares(plan.variation, plan.cluster)
        self._index = {name: rank_index(plan.layout, name) for name in _GRIDS}
        self._by_group: dict[str, np.ndarray] = {}

    def of_group(self, axis: str, stage: int, *, pp_rank: int, dp_rank: int) -> Shares:
        """The slowest links of any group over `axis` that has a member on a pipeline and a data-parallel rank."""
        # modelled: a part of a group is as slow as the group
        whole = "cp" if axis in CONTEXT_AXES else axis.removesuffix("_shard").removesuffix("_replicate")
        if whole in ("replica", "expert_replica"):
            copies, owners = "dp" if whole == "replica" else "edp", self._plan.placement.ranks[stage]
            cells = self._cells(copies)[:, dp_rank, list(owners)].min(axis=1)
        elif whole == "embedding":
            cells = self._cells("")[:, dp_rank, list(tied_ends(self._plan, pp_rank)) or [pp_rank]].min(axis=1)
        else:
            cells = self._cells(whole)[:, dp_rank, pp_rank]
        return Shares(*cells.tolist())

    def of_message(self, pp_rank: int, peer: int, *, dp_rank: int) -> Shares:
        """The slowest links of the messages between two pipeline ranks of one data-parallel rank."""
        return Shares(*self._cells("")[:, dp_rank, [pp_rank, peer]].min(axis=1).tolist())

    def signature(self, dp_rank: int) -> bytes:
        """Equal for data-parallel ranks on whose groups of every axis links are equally slow."""
        axes = ("", *DENSE_AXES, *EXPERT_AXES) if self._plan.model.is_moe else ("", *DENSE_AXES)
        return b"".join(np.ascontiguousarray(self._cells(axis)[:, dp_rank]).tobytes() for axis in axes)

    def _cells(self, axis: str) -> np.ndarray:
        """[3, dp, pp] the slowest of all groups over `axis` (of single ranks for "") with members on a
        cell's tp and cp ranks."""
        if axis not in self._by_group:
            per_rank = self._ranks if not axis else self._slowest(axis)
            self._by_group[axis] = per_rank[:, self._index["dense"]].min(axis=(1, 2))
        return self._by_group[axis]

    def _slowest(self, axis: str) -> np.ndarray:
        """[3, ranks] the slowest of each rank's group."""
        grid = "expert" if axis in EXPERT_AXES else "dense"
        members = ("tp", "pp") if axis == "model" else {**DENSE_AXES, **EXPERT_AXES}[axis]
        places, index = tuple(1 + _GRIDS[grid].index(name) for name in members), self._index[grid]
        found = np.empty_like(self._ranks)
        found[:, index] = np.broadcast_to(self._ranks[:, index].min(axis=places, keepdims=True), (3, *index.shape))
        return found


@lru_cache(maxsize=16)
def rank_index(layout: Layout, grid: str) -> np.ndarray:
    """The global rank at every place of a grid."""
    sizes = layout.sizes if grid == "dense" else layout.expert_sizes
    step = strides(layout, sizes)
    found = np.zeros((1,) * len(_GRIDS[grid]), dtype=np.int64)
    for along in np.ix_(*(np.arange(sizes[axis]) * step[axis] for axis in _GRIDS[grid])):
        found = found + along
    return found


class DegradedSpreads(Spreads):
    """The groups of one data-parallel rank as slow and failed links leave them."""

    def __init__(self, plan: Plan, shares: LinkShares, dp_rank: int):
        super().__init__(plan, dp_rank)
        self._shares = shares

    def spread(self, axis: str, stage: int, pp_rank: int) -> Spread:
        """As `Spreads.spread`, with what is left of the links."""
        found = super().spread(axis, stage, pp_rank)
        shares = self._shares.of_group(axis, stage, pp_rank=pp_rank, dp_rank=self._dp_rank)
        return Spread(found.num_nodes, found.per_node, found.num_leaves, shares)

    def shift(self, pp_rank: int) -> int:
        """No two pipeline ranks are placed in the same way."""
        return pp_rank

    def between(self, pp_rank: int, peer: int) -> ClusterSpec:
        """The cluster as messages between two pipeline ranks find it."""
        return degraded(self._plan.cluster, self._shares.of_message(pp_rank, peer, dp_rank=self._dp_rank))
