"""Clusters by name. Every number has its source next to it; what is only an estimate says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, partial

from ..base.errors import UnknownNameError
from .cluster import ClusterSpec
from .devices import A100_40G, A100_80G, B200, B300, GB200, GB300, GH200, H100, H200, H800, V100_32G, Facts
from .fabrics import (
    ALPS,
    DGX_2,
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
from .host import host_facts

DEVICE_FIELDS = tuple(field.name for field in fields(ClusterSpec) if field.name in H100)
"""Fields of a cluster that belong to its devices, not to what joins them."""


def cluster_preset(name: str, num_devices: int) -> ClusterSpec:
    """The cluster called `name` with `num_devices` devices. Raises `UnknownNameError` with the closest known name."""
    if name not in CLUSTER_PRESETS:
        raise UnknownNameError("cluster", name, CLUSTER_PRESETS)
    return CLUSTER_PRESETS[name](num_devices)


@lru_cache(maxsize=16)
def as_device(cluster: ClusterSpec, preset: str) -> ClusterSpec:
    """The cluster with the devices of a preset in the place of its own."""
    other = cluster_preset(preset, cluster.num_devices)
    return replace(cluster, **{name: getattr(other, name) for name in DEVICE_FIELDS})


def _cluster(name: str, device: Facts, fabric: Facts, num_devices: int) -> ClusterSpec:
    facts = {**device, **fabric, "headroom": ("0", "left to the user")}
    values = {field: value for field, (value, _) in facts.items()}
    sources = {field: source for field, (_, source) in facts.items()}
    return ClusterSpec(name=name, num_devices=num_devices, **values, sources=sources)


RACK_DEVICES = 72
"""Devices of one NVLink domain of an NVL72 rack."""


def _rack(name: str, device: Facts, card_bytes_per_s: float, num_devices: int) -> ClusterSpec:
    """Whole racks where the devices fill them, else the largest equal part of each rack: 128 devices
    are 64 of each of two."""
    used = RACK_DEVICES
    if num_devices > RACK_DEVICES:
        used = max(part for part in range(1, RACK_DEVICES + 1) if num_devices % part == 0)
    return _cluster(name, device, nvl72(used, card_bytes_per_s=card_bytes_per_s), num_devices)


def _this_host(num_devices: int) -> ClusterSpec:
    return _cluster("this-host", host_facts(num_devices), {}, num_devices)


CLUSTER_PRESETS: dict[str, Callable[[int], ClusterSpec]] = {
    "dgx-2": partial(_cluster, "dgx-2", V100_32G, DGX_2),
    "dgx-a100-40g": partial(_cluster, "dgx-a100-40g", A100_40G, DGX_A100),
    "dgx-a100-80g": partial(_cluster, "dgx-a100-80g", A100_80G, DGX_A100),
    "dgx-h100": partial(_cluster, "dgx-h100", H100, DGX_H100),
    "dgx-h200": partial(_cluster, "dgx-h200", H200, DGX_H200),
    "dgx-b200": partial(_cluster, "dgx-b200", B200, DGX_B200),
    "dgx-b300": partial(_cluster, "dgx-b300", B300, DGX_B300),
    "gb200-nvl72": partial(_rack, "gb200-nvl72", GB200, NVL72_CARD_BYTES_PER_S),
    "gb300-nvl72": partial(_rack, "gb300-nvl72", GB300, NVL72_ULTRA_CARD_BYTES_PER_S),
    "alps-gh200": partial(_cluster, "alps-gh200", GH200, ALPS),
    "h800-pod": partial(_cluster, "h800-pod", H800, H800_POD),
    "this-host": _this_host,
}
"""Name -> the cluster with a given number of devices."""
