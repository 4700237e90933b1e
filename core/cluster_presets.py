"""Clusters by name. Every number has its source beside it; what is only an estimate says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from .cluster import ClusterSpec
from .devices import A100_40G, A100_80G, B200, B300, GB200, GB300, H100, H200, Facts
from .errors import UnknownNameError
from .fabrics import (
    DGX_A100,
    DGX_B200,
    DGX_B300,
    DGX_H100,
    DGX_H200,
    H800_POD,
    NVL72_CARD_BYTES_PER_S,
    NVL72_ULTRA_CARD_BYTES_PER_S,
    nvl72,
)


def cluster_preset(name: str, num_devices: int) -> ClusterSpec:
    """The cluster called `name` with `num_devices` devices. Raises `UnknownNameError` with the closest known name."""
    if name not in CLUSTER_PRESETS:
        raise UnknownNameError("cluster", name, CLUSTER_PRESETS)
    return CLUSTER_PRESETS[name](num_devices)


def _cluster(name: str, device: Facts, fabric: Facts, num_devices: int) -> ClusterSpec:
    facts = {**device, **fabric}
    values = {field: value for field, (value, _) in facts.items()}
    sources = {field: source for field, (_, source) in facts.items()}
    return ClusterSpec(name=name, num_devices=num_devices, **values, sources=sources)


RACK_DEVICES = 72
"""Devices of one NVLink domain of an NVL72 rack."""


def _rack(name: str, device: Facts, card_bytes_per_s: float, num_devices: int) -> ClusterSpec:
    """Whole racks where the devices fill them, else the largest equal part of each rack: 128 devices are 64 of each of two."""
    used = RACK_DEVICES
    if num_devices > RACK_DEVICES:
        used = max(part for part in range(1, RACK_DEVICES + 1) if num_devices % part == 0)
    return _cluster(name, device, nvl72(used, card_bytes_per_s=card_bytes_per_s), num_devices)


CORE_FLOPS_PER_S = 96e9
"""Nominal fp32 peak of one CPU core: 3 GHz and two 256-bit fused multiply-adds per cycle."""

CORE_MEMORY_BYTES_PER_S = 10e9
"""Nominal memory bandwidth of one busy CPU core."""


_ABSENT = ("nvls_efficiency", "sharp", "nics_per_node", "nodes_per_leaf", "rails", "oversubscription", "leaf_latency_s")
"""Fields of a fabric that one machine has not."""


def _this_host(num_devices: int) -> ClusterSpec:
    """The machine one is on as one node; a device is one rank process with one thread, and ranks share the cores there are."""
    cores = os.cpu_count() or 1
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    share = min(1.0, cores / num_devices)
    rate = CORE_FLOPS_PER_S * share
    counted = f"counted by the operating system: {cores} cores, {memory_bytes:.0f} bytes, shared by {num_devices} ranks"
    nominal = "nominal, not measured: "
    gloo = "measured on a 2-core EPYC machine: gloo point to point between two processes, 50-95 us at 4 KB, 2.0-2.9 GB/s at 64 MB"
    return ClusterSpec(
        name="this-host",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device_memory_bytes=memory_bytes / num_devices,
        device_memory_bytes_per_s=CORE_MEMORY_BYTES_PER_S * share,
        peak_flops_per_s={"fp32": rate, "bf16": rate, "fp16": rate},
        matmul_efficiency=0.7,
        memory_efficiency=0.8,
        kernel_launch_s=5e-6,
        node_link_bytes_per_s=2.3e9,
        node_link_latency_s=60e-6,
        node_network_bytes_per_s=2.3e9,
        network_latency_s=60e-6,
        link_efficiency=1.0,
        num_compute_units=1,
        sustained_share=1.0,
        matmul_efficiency_by_dtype={},
        sustained_share_by_dtype={},
        product_curve={},
        memory_curve={},
        kernel_curve={},
        num_cores=0,
        busy_core_share=1.0,
        attention_half_head_dim=0.0,
        network_efficiency=1.0,
        collective_library="gloo",
        collective_launch_s=0.0,
        collective_ramp_bytes=0.0,
        ll128_ramp_share=0.0,
        channel_bytes_per_s=0.0,
        collective_curve={},
        grouped_matmul_efficiency=1.0,
        attention_forward_efficiency=0.5,
        attention_backward_efficiency=0.5,
        kernel_floor_s=0.0,
        host_dispatch_s=5e-6,
        overlap_compute_share=1.0,
        flash_attention_2_share=1.0,
        sources={
            "devices_per_node": "all ranks run on this one machine",
            "device_memory_bytes": counted,
            "device_memory_bytes_per_s": f"{nominal}10 GB/s per core, cores shared by the ranks",
            "peak_flops_per_s": f"{nominal}3 GHz x 32 FLOPs per cycle and core; half formats are no faster",
            "matmul_efficiency": f"{nominal}single-threaded products",
            "memory_efficiency": f"{nominal}large streaming loops",
            "kernel_launch_s": f"{nominal}dispatch of one torch operation on a CPU",
            "node_link_bytes_per_s": gloo,
            "node_link_latency_s": gloo,
            "node_network_bytes_per_s": "as inside the node: there is only one",
            "network_latency_s": "as inside the node: there is only one",
            "num_compute_units": "one thread computes",
            "sustained_share": "in the efficiency",
            "matmul_efficiency_by_dtype": f"{nominal}half formats are no better",
            "sustained_share_by_dtype": f"{nominal}half formats are no better",
            "product_curve": f"{nominal}none measured",
            "memory_curve": f"{nominal}none measured",
            "kernel_curve": f"{nominal}none measured",
            "busy_core_share": f"{nominal}cores do not disturb each other",
            "num_cores": "in the rates, which are those of a rank's share of the cores",
            "attention_half_head_dim": f"{nominal}width does not matter to a scalar core",
            "network_efficiency": "the link rate is a measured one",
            "collective_library": "the backend's transport between processes of one machine",
            "collective_launch_s": "in the link latency",
            "collective_ramp_bytes": "in the link rate",
            "ll128_ramp_share": "no such protocol between host processes",
            "channel_bytes_per_s": "in the link rate",
            "collective_curve": f"{nominal}none measured",
            **dict.fromkeys(_ABSENT, "there is only one node"),
            "grouped_matmul_efficiency": f"{nominal}single-threaded kernels",
            "attention_forward_efficiency": f"{nominal}single-threaded kernels",
            "attention_backward_efficiency": f"{nominal}single-threaded kernels",
            "kernel_floor_s": f"{nominal}single-threaded kernels",
            "host_dispatch_s": f"{nominal}single-threaded kernels",
            "overlap_compute_share": f"{nominal}single-threaded kernels",
            "flash_attention_2_share": "there is one kernel",
            "link_efficiency": "the link rate is a measured one",
        },
    )


CLUSTER_PRESETS: dict[str, Callable[[int], ClusterSpec]] = {
    "dgx-a100-40g": partial(_cluster, "dgx-a100-40g", A100_40G, DGX_A100),
    "dgx-a100-80g": partial(_cluster, "dgx-a100-80g", A100_80G, DGX_A100),
    "dgx-h100": partial(_cluster, "dgx-h100", H100, DGX_H100),
    "dgx-h200": partial(_cluster, "dgx-h200", H200, DGX_H200),
    "dgx-b200": partial(_cluster, "dgx-b200", B200, DGX_B200),
    "dgx-b300": partial(_cluster, "dgx-b300", B300, DGX_B300),
    "gb200-nvl72": partial(_rack, "gb200-nvl72", GB200, NVL72_CARD_BYTES_PER_S),
    "gb300-nvl72": partial(_rack, "gb300-nvl72", GB300, NVL72_ULTRA_CARD_BYTES_PER_S),
    "h800-pod": partial(_cluster, "h800-pod", H100, H800_POD),
    "this-host": _this_host,
}
"""Name -> the cluster with a given number of devices."""
