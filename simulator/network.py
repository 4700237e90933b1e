"""Communication seconds: latency plus bytes over bandwidth, where a group really lies.

Two tiers: links inside a node, and the node's network injection, shared by the node's devices. Which tier a group uses follows from
its global ranks, hence from the layout's rank order. Model: alpha-beta (Hockney 1994) with hierarchical collectives (Thakur,
Rabenseifner & Gropp 2005 for the volumes). Not modelled: congestion between nodes, topology above the node, in-network reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.cluster import ClusterSpec
from ..core.program import Collective


@dataclass(frozen=True)
class Spread:
    """How a group of ranks lies over nodes: on `num_nodes` nodes with at most `per_node` members on one of them."""

    num_nodes: int
    per_node: int

    @property
    def size(self) -> int:
        """Members when all nodes hold equally many."""
        return self.num_nodes * self.per_node


def spread_of(cluster: ClusterSpec, ranks: Sequence[int]) -> Spread:
    """The spread of a group given its global ranks; node n holds ranks [n*d, (n+1)*d) for d devices per node."""
    members: dict[int, int] = {}
    for rank in ranks:
        node = rank // cluster.devices_per_node
        members[node] = members.get(node, 0) + 1
    return Spread(len(members), max(members.values()))


def collective_s(cluster: ClusterSpec, spread: Spread, operation: Collective) -> float:
    """Seconds of one collective whose members all take part at once.

    `sent_bytes` is what a flat algorithm sends from one rank. Hierarchically, with k members on each of N nodes and n = N*k, the
    share (N-1)/(n-1) of a gather or a reduction crosses the network and (n-N)/(n-1) the links; of an all-to-all the shares are
    (n-k)/(n-1) and (k-1)/(n-1). Latency: one hop per ring step, for an all-reduce the better of ring and tree.
    """
    nodes, per_node, size = spread.num_nodes, spread.per_node, spread.size
    if size == 1:
        return 0.0
    crossing = (size - per_node if operation.op == "all_to_all" else nodes - 1) / (size - 1)
    wire = operation.sent_bytes * ((1 - crossing) / link_bytes_per_s(cluster) + crossing / network_share_bytes_per_s(cluster))
    return wire + _hops(operation.op, per_node) * cluster.node_link_latency_s + _hops(operation.op, nodes) * cluster.network_latency_s


def message_s(cluster: ClusterSpec, source_rank: int, destination_rank: int, num_bytes: int) -> float:
    """Seconds of one point-to-point message between two global ranks, all devices of a node sending at once."""
    if source_rank // cluster.devices_per_node == destination_rank // cluster.devices_per_node:
        return cluster.node_link_latency_s + num_bytes / link_bytes_per_s(cluster)
    return cluster.network_latency_s + num_bytes / network_share_bytes_per_s(cluster)


def link_bytes_per_s(cluster: ClusterSpec) -> float:
    """What one device reaches towards its own node, one direction."""
    return cluster.node_link_bytes_per_s * cluster.link_efficiency


def network_share_bytes_per_s(cluster: ClusterSpec) -> float:
    """What one device reaches towards other nodes, one direction, while all devices of its node send."""
    return cluster.node_network_bytes_per_s * cluster.link_efficiency / min(cluster.devices_per_node, cluster.num_devices)


def _hops(op: str, size: int) -> int:
    if op == "all_reduce":
        return min(2 * (size - 1), 2 * math.ceil(math.log2(size)))
    return 1 if op == "all_to_all" and size > 1 else size - 1
