"""NCCL's algorithms and protocols as `latency + bytes / rate`, of which NCCL takes the cheapest.

Latencies, protocol factors and limits are those of NCCL's own cost model (`src/graph/tuning.cc`, v2.30 at
5067397), scaled to the hops and rates of the cluster. Where that model only has to rank algorithms and misses
their time, the time is modelled here and says so: NVLink SHARP, the load of trees over few nodes, and the ramp
of long transfers. Not modelled: PAT (one device per node, NCCL 2.23 and later), registered buffers, and several
collectives of one communicator at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...core.machine.cluster import ClusterSpec
from .topology import (
    Spread,
    cards_in_node,
    devices_in_node,
    link_bytes_per_s,
    neighbour_bytes_per_s,
    network_share_bytes_per_s,
)

LINK_HOP_S, NETWORK_HOP_S, LAUNCH_S = 3.4e-6, 14.0e-6, 6.6e-6
"""The hops and the launch that the tables below are written for: one step of a ring with Simple, and the
base of LL (tuning.cc)."""

LINK_RING_S = {"LL": 0.6e-6, "LL128": 1.9e-6, "Simple": 3.4e-6}
LINK_TREE_S = {"LL": 0.6e-6, "LL128": 1.25e-6, "Simple": 4.0e-6}
NETWORK_RING_S = {"LL": 2.7e-6, "LL128": 4.0e-6, "Simple": 14.0e-6}
NETWORK_TREE_S = {"LL": 5.0e-6, "LL128": 8.5e-6, "Simple": 14.0e-6}
"""Protocol -> one step of a ring or a tree, over NVLink and over the network (tuning.cc, hwLatencies). A ring with one
device per node takes the tree's step: nothing hides it."""

BASE_S = {"LL": 6.6e-6, "LL128": 14.0e-6, "Simple": 8.4e-6}
"""Protocol -> launch and tail of the kernel (tuning.cc, baseLatencies of the ring; the tree's differ by 0.2 us)."""

POST_S = {"LL": 1e-6, "LL128": 1e-6, "Simple": 3e-6}
"""Protocol -> the least that one step of a ring across nodes takes: posting its network part
(tuning.cc, getNetOverhead)."""

NVLS_S, NVLS_TREE_STEP_S = 25e-6, 20.9e-6
"""A reduction in the NVSwitch, and one step of a tree of them over the network (tuning.cc)."""

SHARP_BASE_S, SHARP_LINK_S, SHARP_ARITY_S, SHARP_NETWORK_S = 8.0e-6, 3.7e-6, 0.4e-6, 31e-6
"""Reduction in the network's switches: base, link, every further device of the node, network
(tuning.cc, CollNetDirect)."""

LL_LINK_SHARE = 0.30
"""LL's limit as a share of the link's nominal rate: 87.7 of 300, 141 of 450 and 282 of 900 GB/s
(tuning.cc, llMaxBws, one node)."""

LL_NETWORK_BYTES_PER_S = (22.5e9, 19.0e9)
"""LL's limit across two nodes, and across more (tuning.cc, llMaxBws, hosts by AMD)."""

LL128_SHARE, TREE_SHARE, TREE_LL_DIVISOR = 0.92, 0.92, 3.8
"""On one node LL128 as a share of the ring's Simple, and the tree's Simple likewise; what divides the tree's Simple to
give its LL (tuning.cc)."""

TREE_LL128_LINK_SHARE = 7 / 9
"""LL128 as a share of the tree's Simple on one node (tuning.cc)."""

RING_LL128_NETWORK_SHARE = 0.80
"""LL128 as a share of the ring's Simple across nodes: 36.7 of 48 GB/s a channel on Hopper, 20 of 24 on Ampere
(tuning.cc, search.cc)."""

TREE_NETWORK_SHARE = {"LL": (0.92, 0.75), "LL128": (0.80, 0.60), "Simple": (0.92, 0.75)}
"""Protocol -> what a tree reaches of the network across two nodes, and across more. Simple: 41.4 of 48 GB/s a channel
on Hopper and 23.6 of 24 on Ampere, then 36 and 17.8; LL128: 36.7 and 20, then 29 on Hopper (tuning.cc, perChMaxTreeBws,
perChMaxTreeLL128Bws)."""

NVLS_TREE_SHARE = 0.92
"""A tree of NVSwitch reductions as a share of its slower part. Measured: 250 of 274 GB/s on two nodes of eight H100,
167 of 184 GB/s on four (nccl-tests issue 309, 128 and 256 MB there less the latency)."""

ALL_TO_ALL_LINK_SHARE = 0.94
"""What an all-to-all reaches of the links as a share of what a ring does: 346 of 363 GB/s on eight H100 and 577 of 651
GB/s on eight B200 (SimuMax v1.2, tables and fits of its nccl_fit.py and b200_bf16_ceperm.json); between them."""

ALL_TO_ALL_NETWORK_SHARE = 0.87
"""What an all-to-all reaches of the network as a share of what its cards do: 37.0 of 42.5 GB/s on two nodes of B200
(Vultr POC, dgxc nccl log, alltoall_v2 next to ib_write_bw)."""

MESSAGE_CHANNELS, MESSAGE_CHANNEL_BYTES, NETWORK_MESSAGE_CHANNELS = 32, 2**24, 2
"""Most channels of a message inside a node, and the bytes beyond which it takes twice as many (NCCL 2.13 to 2.30,
src/enqueue.cc, addP2pToPlan and scheduleP2pTasksToPlan: 32 steps of 512 KB); channels of a message over the network
(src/graph/paths.cc)."""

TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1, 1),
    "LL128": (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
        1,
        1,
    ),
    "Simple": (
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.8,
        0.7,
        0.6,
        0.6,
        0.5,
        0.5,
        0.5,
        0.5,
        0.6,
        0.7,
        0.8,
        0.7,
        0.7,
        0.8,
        0.9,
        0.9,
        0.9,
        1,
    ),
}
"""Share of its rate that a tree reaches at 64 B, 128 B, ... 512 MB, and all of it from 1 GB (tuning.cc,
treeCorrectionFactor); interpolated between, so that more bytes never take less time."""


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm and protocol for one operation and group: seconds as a function of the payload."""

    algorithm: str
    protocol: str
    latency_s: float
    seconds_per_byte: float
    ramp_s: float = 0.0
    ramp_bytes: float = 1.0

    def seconds(self, payload: float) -> float:
        """Seconds of one collective. The payload is the whole tensor: what an all-reduce adds up,
        or an all-gather ends with.

        The ramp is what a long transfer takes longer than its latency and rate say, until its pipeline of
        chunks is full: the same bytes for every pass over the data, whichever the operation. A payload of as
        many bytes has paid half of it.
        """
        wire = payload * self.seconds_per_byte
        if self.algorithm == "tree":
            wire /= tree_correction(self.protocol, payload)
        return self.latency_s + wire + self.ramp_s * payload / (payload + self.ramp_bytes)


def tree_correction(protocol: str, payload: float) -> float:
    """Share of its rate that a tree reaches at a payload."""
    table = TREE_CORRECTION[protocol]
    place = math.log2(payload / 64) if payload > 64 else 0.0
    if place >= len(table) - 1:
        return table[-1]
    step = int(place)
    return table[step] + (place - step) * (table[step + 1] - table[step])


def nccl_lines(cluster: ClusterSpec, spread: Spread, op: str, size: int) -> Iterator[Line]:
    """Every algorithm and protocol that NCCL has for an operation over `size` ranks that lie as `spread` says."""
    group = _Group(cluster, spread, size)
    if op == "all_to_all":
        yield group.all_to_all()
        return
    yield from (group.ring(protocol, 2 if op == "all_reduce" else 1) for protocol in BASE_S)
    if op != "all_reduce":
        return
    yield from (group.tree(protocol) for protocol in BASE_S)
    if cluster.nvls_efficiency:
        yield group.nvls()
    if cluster.sharp and spread.num_nodes > 1:
        yield group.sharp()


def message_rate(cluster: ClusterSpec, num_bytes: int, ranks: int) -> float:
    """What a message inside a node reaches: the link, or as many channels as NCCL gives it in a
    communicator of `ranks`."""
    link = link_bytes_per_s(cluster)
    if not cluster.channel_bytes_per_s:
        return link
    channels = MESSAGE_CHANNELS
    while channels > 1 and channels * ranks > MESSAGE_CHANNELS:
        channels //= 2
    while channels <= MESSAGE_CHANNELS // 2 and num_bytes > channels * MESSAGE_CHANNEL_BYTES:
        channels *= 2
    return min(link, channels * cluster.channel_bytes_per_s)


def network_message_rate(cluster: ClusterSpec) -> float:
    """What a message to another node reaches: the device's share of the network, or two channels."""
    share = network_share_bytes_per_s(cluster)
    return min(share, NETWORK_MESSAGE_CHANNELS * cluster.channel_bytes_per_s) if cluster.channel_bytes_per_s else share


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of ranks, the rates it reaches, and the lines of its algorithms."""

    cluster: ClusterSpec
    spread: Spread
    size: int

    @property
    def nodes(self) -> int:
        return self.spread.num_nodes

    @property
    def local(self) -> float:
        """Members on a node, on average."""
        return self.size / self.nodes

    @property
    def boundary(self) -> float:
        """Bytes per second and direction of all members of a node towards the next one."""
        return self.local * neighbour_bytes_per_s(self.cluster, self.spread)

    @property
    def ring_rate(self) -> float:
        """Bus bandwidth of a ring with Simple: as many rings run side by side as its slowest step carries."""
        link = link_bytes_per_s(self.cluster)
        return link if self.nodes == 1 else self.boundary if self.local <= 1 else min(link, self.boundary)

    @property
    def tree_load(self) -> int:
        """Times the payload that the busiest node sends in a double tree: two nodes are each other's only neighbours,
        of more nodes one has two below it."""
        return 1 if self.nodes == 2 else 2

    def ramp(self, passes: int, share: float = 1.0) -> tuple[float, float]:
        """Ramp of some passes over the data, and the payload that pays half of it."""
        under_way = self.cluster.collective_ramp_bytes
        return passes * share * under_way / link_bytes_per_s(self.cluster), max(1.0, under_way)

    def links(self, seconds: float) -> float:
        """Latency over links, scaled to the cluster's."""
        return seconds * self.cluster.node_link_latency_s / LINK_HOP_S

    def network(self, seconds: float) -> float:
        """Latency over the network, scaled to the cluster's."""
        return seconds * self.cluster.network_latency_s / NETWORK_HOP_S

    def base(self, seconds: float) -> float:
        """Launch and tail of a kernel, scaled to the cluster's."""
        return seconds * self.cluster.collective_launch_s / LAUNCH_S

    def ring(self, protocol: str, passes: int) -> Line:
        """Each pass moves (n-1)/n of the payload past every rank in n-1 steps (Thakur, Rabenseifner & Gropp 2005)."""
        rate = self.ring_rate
        match protocol:
            case "LL" if self.nodes == 1:
                rate = min(rate / 2, LL_LINK_SHARE * self.cluster.node_link_bytes_per_s)
            case "LL":
                rate = min(rate / 2, LL_NETWORK_BYTES_PER_S[self.nodes > 2])
            case "LL128":
                rate *= LL128_SHARE if self.nodes == 1 else RING_LL128_NETWORK_SHARE
        steps, crossings = self.size - 1, self.nodes - 1 if self.nodes > 1 else 0
        step_s = self.links(LINK_RING_S[protocol])
        cross_s = self.network((NETWORK_TREE_S if self.local <= 1 else NETWORK_RING_S)[protocol])
        if crossings:
            step_s = max(step_s, self.network(POST_S[protocol]))
        latency_s = (steps - crossings) * step_s + crossings * cross_s + self._leaf_s
        seconds_per_byte = passes * (self.size - 1) / self.size / rate
        ramp_s, ramp_bytes = self.ramp(
            passes, {"LL": 0.0, "LL128": self.cluster.ll128_ramp_share, "Simple": 1.0}[protocol]
        )
        return Line(
            "ring", protocol, self.base(BASE_S[protocol]) + passes * latency_s, seconds_per_byte, ramp_s, ramp_bytes
        )

    def tree(self, protocol: str) -> Line:
        """Up and down a chain inside each node and a double binary tree of nodes (Sanders, Speck & Traeff 2009)."""
        rate = link_bytes_per_s(self.cluster) * TREE_SHARE / 2 if self.local > 1 else math.inf
        if self.nodes > 1:
            inside = rate * self.local / max(1.0, self.local - 1)
            network = self.boundary * TREE_NETWORK_SHARE[protocol][self.nodes > 2]
            shares_cards = cards_in_node(self.cluster) < devices_in_node(self.cluster)
            # NCCL counts a tree's payload twice on two nodes as well (tuning.cc, ratio *= .5), so where devices share
            # cards it takes the ring there: vTrain's 16-way tensor parallelism over two nodes of eight devices on four
            # cards takes a ring's time.
            rate = min(inside, network / (2 if shares_cards or protocol == "LL128" or self.nodes > 2 else 1))
        elif protocol == "LL128":
            rate *= TREE_LL128_LINK_SHARE
        if protocol == "LL":
            cap = (
                LL_LINK_SHARE * self.cluster.node_link_bytes_per_s
                if self.nodes == 1
                else LL_NETWORK_BYTES_PER_S[self.nodes > 2]
            )
            rate = min(rate / TREE_LL_DIVISOR, cap / 2)
        ramp_share = self.cluster.ll128_ramp_share if protocol == "LL128" and self.local > 1 else 0.0
        depth = int(math.log2(self.nodes))
        chain_s = (self.local - 1) * self.links(LINK_TREE_S[protocol])
        latency_s = 2 * (chain_s + depth * self.network(NETWORK_TREE_S[protocol]) + self._leaf_s)
        return Line("tree", protocol, self.base(BASE_S[protocol]) + latency_s, 1 / rate, *self.ramp(2, ramp_share))

    def nvls(self) -> Line:
        """Sums formed in the NVSwitch: a device sends its payload once and the share that it broadcasts, S
        + S/k in each direction.

        Held to nccl issue 1455, eight H100: 258, 265, 270, 273 GB/s for k = 5 to 8; this gives 257, 264, 270, 274.
        """
        inside = self.cluster.node_link_bytes_per_s * self.cluster.nvls_efficiency / (1 + 1 / self.local)
        if self.nodes == 1:
            return Line("nvls", "Simple", self.links(NVLS_S), 1 / inside, *self.ramp(2))
        rate = NVLS_TREE_SHARE * min(inside, self.boundary / self.tree_load)
        depth = int(math.log2(self.nodes))
        latency_s = self.links(NVLS_S) + 2 * (depth * self.network(NVLS_TREE_STEP_S) + self._leaf_s)
        return Line("nvls-tree", "Simple", latency_s, 1 / rate, *self.ramp(2))

    def sharp(self) -> Line:
        """Sums formed in the network's switches: each node sends its own sum once, and the links
        carry it there and back."""
        inside = link_bytes_per_s(self.cluster) * self.local / (2 * (self.local - 1)) if self.local > 1 else math.inf
        latency_s = self.links(2 * (SHARP_LINK_S * (self.local > 1) + (self.local - 1) * SHARP_ARITY_S)) + self.network(
            SHARP_NETWORK_S
        )
        rate = min(inside, self.boundary)
        return Line("sharp", "Simple", self.base(SHARP_BASE_S) + latency_s + self._leaf_s, 1 / rate, *self.ramp(2))

    def all_to_all(self) -> Line:
        """Sends to every other member at once: what stays in the node, what leaves it and what leaves the leaf
        switch flow together."""
        cluster, per_leaf = self.cluster, self.size / self.spread.num_leaves
        link, share = (
            link_bytes_per_s(cluster) * ALL_TO_ALL_LINK_SHARE,
            network_share_bytes_per_s(cluster) * ALL_TO_ALL_NETWORK_SHARE,
        )
        times = (
            (self.local - 1) / link,
            (self.size - self.local) / share,
            (self.size - per_leaf) * cluster.oversubscription / share,
        )
        latency_s = self.base(BASE_S["Simple"]) + (self.links(LINK_RING_S["Simple"]) if self.local > 1 else 0.0)
        if self.nodes > 1:
            latency_s += self.network(NETWORK_RING_S["Simple"] + (self.size - self.local) * POST_S["LL"]) + self._leaf_s
        return Line("all-to-all", "Simple", latency_s, max(times) / self.size, *self.ramp(1))

    @property
    def _leaf_s(self) -> float:
        """Added latency of one pass over the group for the leaf switches that it crosses."""
        return (self.spread.num_leaves - 1) * self.cluster.leaf_latency_s
