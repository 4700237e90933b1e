"""Compute seconds by the roofline (Williams, Waterman & Patterson 2009): a kernel takes the longer of its arithmetic and its memory
traffic, each at the share of the peak that large kernels reach, and one launch. Modelled, not measured: shapes do not change the
efficiency in this version."""

from __future__ import annotations

from ..core.cluster import ClusterSpec
from ..core.program import Product

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of one activation element. With fp8 only the inputs of products are cast; activations travel and rest in 16 bits
(Micikevicius et al. 2022, section 4)."""

SUSTAINED_SHARE = 0.86
"""Share of a device's best product rate that products reach inside a training step, over the shapes of a layer and under sustained
load. Modelled, from one observation: with a flat 0.75 of the A100's peak, where the best products reach 0.87, the eight steps of
Korthikanti et al. 2022, table 5, are predicted within 4.6% on average."""


def product_s(cluster: ClusterSpec, dtype: str, product: Product) -> float:
    """Seconds of `product.count` matrix products run as one batched kernel: reads both operands, writes the result once."""
    elements = product.count * (product.m * product.k + product.k * product.n + product.m * product.n)
    arithmetic = product.flops / (cluster.peak_flops_per_s[dtype] * cluster.matmul_efficiency * SUSTAINED_SHARE)
    return max(arithmetic, traffic_s(cluster, elements * ELEMENT_BYTES[dtype])) + cluster.kernel_launch_s


def elementwise_s(cluster: ClusterSpec, num_bytes: float, num_kernels: int) -> float:
    """Seconds of memory-bound kernels that move `num_bytes` together."""
    return traffic_s(cluster, num_bytes) + num_kernels * cluster.kernel_launch_s


def traffic_s(cluster: ClusterSpec, num_bytes: float) -> float:
    """Seconds to move bytes between the device and its memory."""
    return num_bytes / (cluster.device_memory_bytes_per_s * cluster.memory_efficiency)
