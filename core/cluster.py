"""`ClusterSpec`: devices, nodes and links as numbers with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClusterSpec:
    """`num_devices` devices in nodes of `devices_per_node`. Rates are per second and one direction, sizes in bytes.

    `peak_flops_per_s` maps dtype (`fp32 tf32 bf16 fp16 fp8`) to the dense peak. Efficiencies are shares of a peak that large kernels
    or transfers reach. `sources` maps a field name to where its number comes from.
    """

    name: str
    num_devices: int
    devices_per_node: int
    device_memory_bytes: float
    device_memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    matmul_efficiency: float
    memory_efficiency: float
    kernel_launch_s: float
    node_link_bytes_per_s: float
    node_link_latency_s: float
    node_network_bytes_per_s: float
    network_latency_s: float
    link_efficiency: float
    sources: Mapping[str, str] = field(default_factory=dict)
