"""Clusters by name. Every number has its source beside it; what is only an estimate says so."""

from __future__ import annotations

import os
from collections.abc import Callable

from .cluster import ClusterSpec
from .errors import UnknownNameError

_MAMF = "measured: stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS, bf16"
_ESTIMATE = "estimate, not measured: "
_NCCL = "modelled: one step of a ring with the Simple protocol in NCCL's cost model (src/graph/tuning.cc at 01afd20, hwLat)"


def cluster_preset(name: str, num_devices: int) -> ClusterSpec:
    """The cluster called `name` with `num_devices` devices. Raises `UnknownNameError` with the closest known name."""
    if name not in CLUSTER_PRESETS:
        raise UnknownNameError("cluster", name, CLUSTER_PRESETS)
    return CLUSTER_PRESETS[name](num_devices)


def _dgx_a100(name: str, num_devices: int, *, memory_bytes: float, memory_bytes_per_s: float) -> ClusterSpec:
    datasheet = "NVIDIA A100 Tensor Core GPU datasheet (2021), SXM4, dense"
    dgx = "NVIDIA DGX A100 datasheet"
    return ClusterSpec(
        name=name,
        num_devices=num_devices,
        devices_per_node=8,
        device_memory_bytes=memory_bytes,
        device_memory_bytes_per_s=memory_bytes_per_s,
        peak_flops_per_s={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
        matmul_efficiency=0.87,
        memory_efficiency=0.85,
        kernel_launch_s=4e-6,
        node_link_bytes_per_s=300e9,
        node_link_latency_s=3.4e-6,
        node_network_bytes_per_s=200e9,
        network_latency_s=9.6e-6,
        link_efficiency=0.78,
        sources={
            "devices_per_node": dgx,
            "device_memory_bytes": datasheet,
            "device_memory_bytes_per_s": datasheet,
            "peak_flops_per_s": datasheet,
            "matmul_efficiency": f"{_MAMF}: 271.2 of 312 TFLOP/s",
            "memory_efficiency": f"{_ESTIMATE}large streaming kernels",
            "kernel_launch_s": f"{_ESTIMATE}CUDA launch and tail of a small kernel",
            "node_link_bytes_per_s": f"{datasheet}: NVLink 3, 600 GB/s both directions together",
            "node_link_latency_s": _NCCL,
            "node_network_bytes_per_s": f"{dgx}: 8 x 200 Gb/s InfiniBand per node",
            "network_latency_s": _NCCL,
            "link_efficiency": "modelled: NCCL caps its A100 ring at 235 of 300 GB/s (src/graph/tuning.cc at 01afd20, compCap80)",
        },
    )


def _dgx_a100_40g(num_devices: int) -> ClusterSpec:
    return _dgx_a100("dgx-a100-40g", num_devices, memory_bytes=40e9, memory_bytes_per_s=1.555e12)


def _dgx_a100_80g(num_devices: int) -> ClusterSpec:
    return _dgx_a100("dgx-a100-80g", num_devices, memory_bytes=80e9, memory_bytes_per_s=2.039e12)


def _dgx_h100(num_devices: int) -> ClusterSpec:
    datasheet = "NVIDIA H100 Tensor Core GPU datasheet (2023), SXM5, dense"
    dgx = "NVIDIA DGX H100 datasheet"
    return ClusterSpec(
        name="dgx-h100",
        num_devices=num_devices,
        devices_per_node=8,
        device_memory_bytes=80e9,
        device_memory_bytes_per_s=3.35e12,
        peak_flops_per_s={"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
        matmul_efficiency=0.80,
        memory_efficiency=0.85,
        kernel_launch_s=4e-6,
        node_link_bytes_per_s=450e9,
        node_link_latency_s=3.4e-6,
        node_network_bytes_per_s=400e9,
        network_latency_s=9.6e-6,
        link_efficiency=0.78,
        sources={
            "devices_per_node": dgx,
            "device_memory_bytes": datasheet,
            "device_memory_bytes_per_s": datasheet,
            "peak_flops_per_s": datasheet,
            "matmul_efficiency": f"{_MAMF}: 794.5 of 989 TFLOP/s",
            "memory_efficiency": f"{_ESTIMATE}large streaming kernels",
            "kernel_launch_s": f"{_ESTIMATE}CUDA launch and tail of a small kernel",
            "node_link_bytes_per_s": f"{datasheet}: NVLink 4, 900 GB/s both directions together",
            "node_link_latency_s": _NCCL,
            "node_network_bytes_per_s": f"{dgx}: 8 x 400 Gb/s InfiniBand per node",
            "network_latency_s": _NCCL,
            "link_efficiency": f"{_ESTIMATE}taken from A100",
        },
    )


CORE_FLOPS_PER_S = 96e9
"""Nominal fp32 peak of one CPU core: 3 GHz and two 256-bit fused multiply-adds per cycle."""

CORE_MEMORY_BYTES_PER_S = 10e9
"""Nominal memory bandwidth of one busy CPU core."""


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
            "link_efficiency": "the link rate is a measured one",
        },
    )


CLUSTER_PRESETS: dict[str, Callable[[int], ClusterSpec]] = {
    "dgx-a100-40g": _dgx_a100_40g,
    "dgx-a100-80g": _dgx_a100_80g,
    "dgx-h100": _dgx_h100,
    "this-host": _this_host,
}
"""Name -> the cluster with a given number of devices."""
