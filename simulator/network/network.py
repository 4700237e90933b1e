"""Communication seconds: where a group really lies, and what the library does there.

Which links a group uses follows from its global ranks, hence from the layout's rank order. On devices the collectives
are NCCL's (`nccl`: ring, tree, NVLink SHARP, network SHARP, all-to-all, by size and protocol); on a CPU host they go
through shared memory, or are gloo's: one ring or one exchange with hops and bytes. All groups like this one are at work
at once, so members share their node's network evenly; `topology` has the routes and links of single messages, on which
the engine lets transfers contend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...core.machine.cluster import ClusterSpec
from ...core.program import Collective
from .measured import Measured, measured_line
from .nccl import BASE_S, LAUNCH_S, Line, message_rate, nccl_lines, network_message_rate
from .topology import Spread, degraded, leaf_of, link_bytes_per_s, network_share_bytes_per_s


@dataclass(frozen=True)
class Choice:
    """The algorithm and protocol taken for one collective, and what the others would have taken."""

    algorithm: str
    protocol: str
    seconds: float
    bus_bytes_per_s: float
    others: tuple[tuple[str, str, float], ...]

    def __str__(self) -> str:
        others = ", ".join(
            f"{algorithm}/{protocol} {seconds * 1e6:.1f} us" for algorithm, protocol, seconds in self.others
        )
        text = (
            f"{self.algorithm}/{self.protocol} {self.seconds * 1e6:.1f} us, {self.bus_bytes_per_s / 1e9:.1f} GB/s "
            "on the bus"
        )
        return f"{text} ({others})" if others else text


def collective_s(cluster: ClusterSpec, spread: Spread, operation: Collective) -> float:
    """Seconds of one collective whose members all take part at once.

    `sent_bytes` is what a flat algorithm sends from one rank, n-1 of n parts of the payload (twice for an all-reduce).
    """
    if spread.num_nodes * spread.per_node == 1:
        return 0.0
    payload_per_sent, lines = _lines(cluster, spread, operation)
    payload = operation.sent_bytes * payload_per_sent
    return min([line.seconds(payload) for line in lines])


def best_algorithm(cluster: ClusterSpec, spread: Spread, operation: Collective) -> Choice:
    """What `collective_s` takes, with its reasons. Raises `ValueError` for a group of one, which sends nothing."""
    if spread.size == 1:
        raise ValueError(
            "a group of one rank has no collective to choose an algorithm for. Give a group of two ranks or more."
        )
    payload_per_sent, lines = _lines(cluster, spread, operation)
    found = sorted(
        (line.seconds(operation.sent_bytes * payload_per_sent), line.algorithm, line.protocol) for line in lines
    )
    seconds, algorithm, protocol = found[0]
    bus = operation.sent_bytes / seconds if seconds else math.inf
    return Choice(
        algorithm,
        protocol,
        seconds,
        bus,
        tuple((algorithm, protocol, seconds) for seconds, algorithm, protocol in found[1:]),
    )


def message_s(
    cluster: ClusterSpec, source_rank: int, destination_rank: int, num_bytes: int, *, ranks: int = 8
) -> float:
    """Seconds of one point-to-point message between two global ranks, all devices of a node sending at once.

    `ranks` are the members of the communicator: the fewer, the more channels NCCL gives a message inside a node.
    """
    source, destination = source_rank // cluster.devices_per_node, destination_rank // cluster.devices_per_node
    launch_s = cluster.collective_launch_s * BASE_S["Simple"] / LAUNCH_S
    if source == destination:
        if cluster.collective_curve and (measured := _measured_message(cluster)):
            return measured.seconds(num_bytes)
        return launch_s + cluster.node_link_latency_s + num_bytes / message_rate(cluster, num_bytes, ranks)
    rate, latency_s = network_message_rate(cluster), cluster.network_latency_s
    if leaf_of(cluster, source) != leaf_of(cluster, destination):
        uplink = network_share_bytes_per_s(cluster) / cluster.oversubscription
        rate, latency_s = min(rate, uplink), latency_s + cluster.leaf_latency_s
    return launch_s + latency_s + num_bytes / rate


def message_work_s(cluster: ClusterSpec, num_bytes: int) -> float:
    """Seconds that one end of a message costs the work of a host's rank, whose core has nothing else to run on; 0
    where it is not known."""
    measured = _measured_message(cluster, "message_work") if cluster.collective_curve else None
    return measured.seconds(num_bytes) / 2 if measured else 0.0  # measured of a send and a receive


def _measured_message(cluster: ClusterSpec, name: str = "message") -> Measured | None:
    if name not in cluster.memo:
        cluster.memo[name] = measured_line(cluster, name, 2)
    found: Measured | None = cluster.memo[name]
    return found


def _lines(cluster: ClusterSpec, spread: Spread, operation: Collective) -> tuple[float, tuple[Line | Measured, ...]]:
    """Payload bytes per sent byte, and the lines of the library; worked out once for each
    operation and kind of group."""
    key = (operation.op, operation.group_size, spread)
    found: tuple[float, tuple[Line | Measured, ...]] | None = cluster.memo.get(key)
    if found is None:
        op, size, whole = operation.op, max(2, operation.group_size), cluster
        cluster = degraded(whole, spread.shares)
        measured = measured_line(cluster, op, size) if spread.num_nodes == 1 else None
        library = _LIBRARIES[cluster.collective_library]
        lines = (measured,) if measured else tuple(library(cluster, spread, op, size))
        found = whole.memo[key] = (size / (size - 1) / (2 if op == "all_reduce" else 1), lines)
    return found


def _gloo_lines(cluster: ClusterSpec, spread: Spread, op: str, size: int) -> Iterator[Line]:
    """One ring, or one exchange, of host processes: a hop per step (for an all-reduce the better of ring
    and tree), then the bytes.

    With k members on each of N nodes and n = N*k, the share (N-1)/(n-1) of a gather or a reduction crosses the
    network and the rest the links; of an all-to-all (n-k)/(n-1). The same thread copies both, so they add up
    (alpha-beta model, Hockney 1994).
    """
    nodes, per_node = spread.num_nodes, spread.per_node
    crossing = (size - size / nodes if op == "all_to_all" else nodes - 1) / (size - 1)
    per_sent = (1 - crossing) / link_bytes_per_s(cluster) + crossing / network_share_bytes_per_s(cluster)
    sent_per_payload = (size - 1) / size * (2 if op == "all_reduce" else 1)
    latency_s = _hops(op, per_node) * cluster.node_link_latency_s + _hops(op, nodes) * cluster.network_latency_s
    launch_s = cluster.collective_launch_s
    yield Line("exchange" if op == "all_to_all" else "ring", "host", launch_s + latency_s, per_sent * sent_per_payload)


def _shared_memory_lines(cluster: ClusterSpec, spread: Spread, op: str, size: int) -> Iterator[Line]:
    """One exchange through memory that all members map, or two: a sum over more than two members is made in parts, and
    the parts are gathered. A member reads what others have for it at the rate of a message. Ranks of several hosts use
    gloo."""
    if spread.num_nodes > 1:
        yield from _gloo_lines(cluster, spread, op, size)
        return
    exchanges = 2 if op == "all_reduce" and size > 2 else 1
    read_per_payload = (size - 1) / size * (2 if op == "all_reduce" else 1)
    latency_s = cluster.collective_launch_s + exchanges * cluster.node_link_latency_s
    yield Line("exchange", "host", latency_s, read_per_payload / link_bytes_per_s(cluster))


def _hops(op: str, size: int) -> int:
    if op == "all_reduce":
        return min(2 * (size - 1), 2 * math.ceil(math.log2(size)))
    return 1 if op == "all_to_all" and size > 1 else size - 1


_LIBRARIES = {"nccl": nccl_lines, "gloo": _gloo_lines, "shm": _shared_memory_lines}
