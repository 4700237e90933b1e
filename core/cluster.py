"""`ClusterSpec`: devices, nodes and links as numbers with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import ClusterError

if TYPE_CHECKING:
    import networkx

_POSITIVE = (
    "device_memory_bytes",
    "device_memory_bytes_per_s",
    "node_link_bytes_per_s",
    "node_network_bytes_per_s",
)
_SHARES = ("matmul_efficiency", "memory_efficiency", "link_efficiency")
_DELAYS = ("kernel_launch_s", "node_link_latency_s", "network_latency_s")
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class ClusterSpec:
    """`num_devices` devices in nodes of `devices_per_node`. Rates are per second and one direction, sizes in bytes.

    `peak_flops_per_s` maps dtype (`fp32 tf32 bf16 fp16 fp8`) to the dense peak. Efficiencies are shares of a peak that large kernels
    or transfers reach. `sources` maps a field name to where its number comes from. Raises `ClusterError` with every rule that is broken.
    """

    name: str
    num_devices: int
    devices_per_node: int
    device_memory_bytes: float
    device_memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    memory_efficiency: float
    kernel_launch_s: float
    node_link_bytes_per_s: float
    node_link_latency_s: float
    node_network_bytes_per_s: float
    network_latency_s: float
    link_efficiency: float
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        counts = ("num_devices", "devices_per_node")
        problems = [f"{name}={value} must be at least 1." for name in counts if (value := getattr(self, name)) < 1]
        problems += [f"{name}={value} must be above 0." for name in _POSITIVE if not (value := getattr(self, name)) > 0]
        problems += [f"{name}={value} is a share: above 0, at most 1." for name in _SHARES if not 0 < (value := getattr(self, name)) <= 1]
        problems += [f"{name}={value} must not be negative." for name in _DELAYS if (value := getattr(self, name)) < 0]
        for dtype, rate in self.peak_flops_per_s.items():
            if dtype not in DTYPES or not rate > 0:
                problems.append(f"peak_flops_per_s={{{dtype} = {rate}}}: rates are above 0, for {', '.join(DTYPES)}.")
        if problems:
            raise ClusterError(problems)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be part-filled when there is only one."""
        return -(-self.num_devices // self.devices_per_node)

    def graph(self) -> networkx.DiGraph:
        """The hierarchy as a graph of levels, `cluster -> node -> device`, not of single devices.

        A level knows `count`, how many of it the level above holds; an edge knows `bytes_per_s` and `latency_s` of the link that one
        lower-level member has into the level above, in one direction.
        """
        import networkx

        graph: networkx.DiGraph = networkx.DiGraph(name=self.name)
        graph.add_node("cluster", count=1)
        graph.add_node("node", count=self.num_nodes)
        graph.add_node("device", count=min(self.devices_per_node, self.num_devices), memory_bytes=self.device_memory_bytes)
        graph.add_edge("cluster", "node", bytes_per_s=self.node_network_bytes_per_s, latency_s=self.network_latency_s)
        graph.add_edge("node", "device", bytes_per_s=self.node_link_bytes_per_s, latency_s=self.node_link_latency_s)
        return graph
