"""Where ranks lie on the machine: nodes, leaf switches, links, and the rate at which a group's
traffic can leave a node.

Node n holds ranks [n*d, (n+1)*d) for d devices per node: placement follows the rank order. Inside a node every device
has one link into a switch (NVSwitch; on a CPU host its memory). A node has network cards that its devices share; cards
lead to leaf switches, leaf switches to a core. With `rails`, card i of every node of a group of nodes leads to that
group's leaf switch i (NVIDIA DGX SuperPOD reference architecture: a rail-optimised fabric), and traffic between unlike
devices crosses to the right card inside its node (NCCL's PXN). `oversubscription` is what enters a leaf switch from
below over what leaves it above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ...core.machine.cluster import ClusterSpec

if TYPE_CHECKING:
    import networkx


class Shares(NamedTuple):
    """What is left of the rates of the slowest device link, network card and leaf switch that a group uses;
    all of them by default."""

    link: float = 1.0
    network: float = 1.0
    leaf: float = 1.0


WHOLE = Shares()
"""Every link as good as new."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a group of ranks lies: on `num_nodes` nodes with at most `per_node` members on one of them, under
    `num_leaves` leaf switches.

    `shares` are those of its slowest links.
    """

    num_nodes: int
    per_node: int
    num_leaves: int = 1
    shares: Shares = WHOLE

    @property
    def size(self) -> int:
        """Members when all nodes hold equally many."""
        return self.num_nodes * self.per_node


Link = tuple[str, int, int]
"""One direction of one link: its kind, and whose it is. `device-up` and `device-down` (node, device of the
node), `card-out` and `card-in` (node, card of the node), `leaf-up` and `leaf-down` (group of nodes, rail; rail
0 where there are no rails)."""


def spread_of(cluster: ClusterSpec, ranks: Sequence[int]) -> Spread:
    """The spread of a group given its global ranks."""
    members: dict[int, int] = {}
    for rank in ranks:
        node = rank // cluster.devices_per_node
        members[node] = members.get(node, 0) + 1
    leaves = {leaf_of(cluster, node) for node in members} if cluster.nodes_per_leaf else (0,)
    return Spread(len(members), max(members.values()), len(leaves))


def degraded(cluster: ClusterSpec, shares: Shares) -> ClusterSpec:
    """The cluster as a group finds it whose slowest links have only shares of their rates left.

    Parts of a transfer are equal and go on together, so all links are taken to be as slow as the slowest (NCCL cuts a
    transfer evenly over its channels, and each channel belongs to one card).
    """
    if shares == WHOLE:
        return cluster
    if shares not in cluster.memo:
        cluster.memo[shares] = replace(
            cluster,
            node_link_bytes_per_s=cluster.node_link_bytes_per_s * shares.link,
            node_network_bytes_per_s=cluster.node_network_bytes_per_s * shares.network,
            oversubscription=max(1.0, cluster.oversubscription * shares.network / shares.leaf),
            # measured over links that were whole
            collective_curve=cluster.collective_curve if shares.link == 1 else {},
        )
    found: ClusterSpec = cluster.memo[shares]
    return found


def leaf_of(cluster: ClusterSpec, node: int) -> int:
    """The group of nodes behind the same leaf switches; all nodes are one group where the cluster does not say."""
    return node // cluster.nodes_per_leaf if cluster.nodes_per_leaf else 0


def devices_in_node(cluster: ClusterSpec) -> int:
    """Devices of a full node."""
    return min(cluster.devices_per_node, cluster.num_devices)


def cards_in_node(cluster: ClusterSpec) -> int:
    """Network cards of a node: as many as devices, where the cluster does not say."""
    return cluster.nics_per_node or devices_in_node(cluster)


def link_bytes_per_s(cluster: ClusterSpec) -> float:
    """What one device reaches towards its own node, one direction."""
    return cluster.node_link_bytes_per_s * cluster.link_efficiency


def card_bytes_per_s(cluster: ClusterSpec) -> float:
    """What one network card reaches, one direction."""
    return cluster.node_network_bytes_per_s * cluster.network_efficiency / cards_in_node(cluster)


def network_share_bytes_per_s(cluster: ClusterSpec) -> float:
    """What one device reaches towards other nodes, one direction, while all devices of its node send."""
    return cluster.node_network_bytes_per_s * cluster.network_efficiency / devices_in_node(cluster)


def neighbour_bytes_per_s(cluster: ClusterSpec, spread: Spread) -> float:
    """What one member reaches across nodes when members pass data from node to node, all groups like this one at once.

    Of a group's m nodes behind one leaf switch only one passes data on to the next leaf switch, so the uplinks carry
    1/m of what the nodes send, and limit it where they are oversubscribed more than m times.
    """
    share = network_share_bytes_per_s(cluster)
    if spread.num_leaves == 1:
        return share
    return share * min(1.0, spread.num_nodes / spread.num_leaves / cluster.oversubscription)


def route(cluster: ClusterSpec, source_rank: int, destination_rank: int) -> tuple[Link, ...]:
    """The directed links that a message between two global ranks occupies, in order; () to oneself."""
    source, first = divmod(source_rank, cluster.devices_per_node)
    destination, last = divmod(destination_rank, cluster.devices_per_node)
    if source_rank == destination_rank:
        return ()
    if source == destination:
        return (("device-up", source, first), ("device-down", source, last))
    card = card_of(cluster, last if cluster.rails else first)
    inside: tuple[Link, ...] = ()
    if cluster.rails and card_of(cluster, first) != card:
        inside = (("device-up", source, first), ("device-down", source, last))
    out, into = leaf_of(cluster, source), leaf_of(cluster, destination)
    rail = card if cluster.rails else 0
    above: tuple[Link, ...] = (("leaf-up", out, rail), ("leaf-down", into, rail)) if out != into else ()
    return (*inside, ("card-out", source, card), *above, ("card-in", destination, card_of(cluster, last)))


def collective_loads(cluster: ClusterSpec, ranks: Sequence[int], op: str) -> dict[Link, float]:
    """Bytes on every link for each byte that a member of a collective sends.

    An all-to-all sends each other member its part. All else passes data from neighbour to neighbour: between nodes a
    group's traffic is that of one ring, spread over the cards of its members, and so it is between leaf switches.
    """
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // cluster.devices_per_node, []).append(rank)
    loads: dict[Link, float] = {}
    if op == "all_to_all":
        for source in ranks:
            for destination in ranks:
                _add(loads, route(cluster, source, destination), 1 / (len(ranks) - 1))
        return loads
    order = list(nodes)
    for place, node in enumerate(order):
        members, following = nodes[node], order[(place + 1) % len(order)]
        for i, rank in enumerate(members):
            if len(members) > 1:
                device = rank % cluster.devices_per_node
                _add(loads, (("device-up", node, device), ("device-down", node, device)), 1.0)
            if following != node:
                peer = nodes[following][i * len(nodes[following]) // len(members)]
                between = tuple(link for link in route(cluster, rank, peer) if not link[0].startswith("device"))
                _add(loads, between, 1 / len(members))
    return loads


def _add(loads: dict[Link, float], links: Sequence[Link], share: float) -> None:
    for link in links:
        loads[link] = loads.get(link, 0.0) + share


def capacity_bytes_per_s(cluster: ClusterSpec, link: Link) -> float:
    """What a link carries in its direction when it is kept busy."""
    match link[0].partition("-")[0]:
        case "device":
            return link_bytes_per_s(cluster)
        case "card":
            return card_bytes_per_s(cluster)
        case _:
            leaves = cards_in_node(cluster) if cluster.rails else 1
            below = cluster.nodes_per_leaf * cluster.node_network_bytes_per_s * cluster.network_efficiency
            return below / leaves / cluster.oversubscription


def topology(cluster: ClusterSpec) -> networkx.DiGraph:
    """The machine as a graph: `("device", node, i)`, `("switch", node)`, `("card", node, i)`, `("leaf",
    group, rail)` and `("core",)`.

    Every directed edge knows `link` (None where nothing limits it), `bytes_per_s` and `latency_s`; devices
    know their global `rank`.
    """
    import networkx

    graph: networkx.DiGraph = networkx.DiGraph(name=cluster.name)
    for rank in range(cluster.num_devices):
        node, device = divmod(rank, cluster.devices_per_node)
        graph.add_node(("device", node, device), rank=rank)
    for tail, head, link, latency_s in _edges(cluster):
        rate = capacity_bytes_per_s(cluster, link) if link else float("inf")
        graph.add_edge(tail, head, link=link, bytes_per_s=rate, latency_s=latency_s)
    return graph


def _edges(cluster: ClusterSpec) -> Iterator[tuple[tuple[object, ...], tuple[object, ...], Link | None, float]]:
    for rank in range(cluster.num_devices):
        node, device = divmod(rank, cluster.devices_per_node)
        yield ("device", node, device), ("switch", node), ("device-up", node, device), cluster.node_link_latency_s / 2
        yield ("switch", node), ("device", node, device), ("device-down", node, device), cluster.node_link_latency_s / 2
        if cluster.num_nodes > 1:
            card = ("card", node, card_of(cluster, device))
            yield ("device", node, device), card, None, 0.0
            yield card, ("device", node, device), None, 0.0
    if cluster.num_nodes == 1:
        return
    rails = cards_in_node(cluster) if cluster.rails else 1
    for node in range(cluster.num_nodes):
        for card_of_node in range(cards_in_node(cluster)):
            leaf = ("leaf", leaf_of(cluster, node), card_of_node % rails)
            yield ("card", node, card_of_node), leaf, ("card-out", node, card_of_node), cluster.network_latency_s / 2
            yield leaf, ("card", node, card_of_node), ("card-in", node, card_of_node), cluster.network_latency_s / 2
    if cluster.nodes_per_leaf:
        for group in range(leaf_of(cluster, cluster.num_nodes - 1) + 1):
            for rail in range(rails):
                yield ("leaf", group, rail), ("core",), ("leaf-up", group, rail), cluster.leaf_latency_s / 2
                yield ("core",), ("leaf", group, rail), ("leaf-down", group, rail), cluster.leaf_latency_s / 2


def card_of(cluster: ClusterSpec, device: int) -> int:
    """The network card that a device of a node uses; where there are fewer cards than devices, neighbours share one."""
    return device * cards_in_node(cluster) // devices_in_node(cluster)
