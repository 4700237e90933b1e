"""What is known of the links inside and between nodes, number by number with its source. `core.machine.cluster_presets`
joins them to devices."""

from __future__ import annotations

from .devices import ESTIMATE, MODELLED, Facts

_TUNING = "NCCL's cost model (src/graph/tuning.cc, v2.30 at 5067397)"
_STEP = f"{MODELLED}one step of a ring with Simple in {_TUNING}"
_SIMUMAX = "SimuMax v1.2 (simu_tools/efficency_test/nccl_fit.py, configs/system/b200_bf16_ceperm.json)"
_LEAF = "measured: InfiniBand, 64 B, 3.7 us across leaf switches less 2.8 us within (DeepSeek-AI, ISCA 2025, table 5)"
_SUPERPOD = "NVIDIA DGX SuperPOD reference architecture: full fat tree, rail-optimised, {} nodes a scalable unit"
_DGX_A100, _DGX_H100, _DGX_H200 = "NVIDIA DGX A100 datasheet", "NVIDIA DGX H100 datasheet", "NVIDIA DGX H200 datasheet"
_DGX_B200 = "NVIDIA DGX B200 user guide, introduction"
_V3 = "DeepSeek-AI 2025, 'Insights into DeepSeek-V3' (ISCA), section 4.2 and 4.3"


def _unit(nodes: int) -> Facts:
    """The fabric above the nodes of a DGX SuperPOD: leaf switches of one rail each, nothing oversubscribed."""
    source = _SUPERPOD.format(nodes)
    return {
        "nodes_per_leaf": (nodes, source),
        "rails": (True, source),
        "oversubscription": (1.0, source),
        "leaf_latency_s": (0.9e-6, _LEAF),
    }


_DATA_CENTRE: Facts = {
    "devices_per_node": (8, _DGX_A100),
    "node_link_latency_s": (3.4e-6, _STEP),
    "network_latency_s": (14e-6, _STEP),
    "network_efficiency": (
        0.92,
        ("measured: 32 H200 in 4 nodes, ring all-reduce at 369 of 400 GB/s (stas00/ml-engineering, network)"),
    ),
    "collective_library": ("nccl", "what training stacks use on GPUs"),
    "collective_launch_s": (6.6e-6, f"{MODELLED}base latency of the LL protocol in {_TUNING}"),
    "collective_ramp_bytes": (15e6, "fitted: nodes of 8 A100, H100 and B200, tests/data/nccl_tests.json"),
    "ll128_ramp_share": (
        0.0,
        ("measured: 8 H100 (SimuMax) and 8 B200 (Vultr POC, dgxc nccl log): all-gathers with LL128 pay none of it"),
    ),
    "sharp": (False, "off unless NCCL is given the SHARP plugin"),
    "nics_per_node": (8, "one network card per device"),
    "collective_curve": ({}, "collectives follow their algorithms"),
}

_DGX_2 = "NVIDIA DGX-2 datasheet (2018)"
_ONE_TREE = f"{ESTIMATE}one network without bottleneck above the nodes"

DGX_2: Facts = {
    **_DATA_CENTRE,
    "devices_per_node": (16, _DGX_2),
    "node_link_bytes_per_s": (150e9, f"{_DGX_2}: NVLink 2 and NVSwitch, 300 GB/s both directions together"),
    "node_network_bytes_per_s": (100e9, f"{_DGX_2}: 8 x 100 Gb/s InfiniBand"),
    "link_efficiency": (0.78, f"{ESTIMATE}as of NVLink 3"),
    "nvls_efficiency": (0.0, "no sums in this generation's NVSwitch"),
    "ll128_ramp_share": (1.0, f"{ESTIMATE}as on an A100"),
    "channel_bytes_per_s": (13.9e9, f"{ESTIMATE}as on an A100"),
    "nodes_per_leaf": (0, _ONE_TREE),
    "rails": (True, _ONE_TREE),
    "oversubscription": (1.0, _ONE_TREE),
    "leaf_latency_s": (0.9e-6, _LEAF),
}

DGX_A100: Facts = {
    **_DATA_CENTRE,
    **_unit(20),
    "node_link_bytes_per_s": (
        300e9,
        ("NVIDIA A100 Tensor Core GPU datasheet (2021): NVLink 3, 600 GB/s both directions together"),
    ),
    "node_network_bytes_per_s": (200e9, f"{_DGX_A100}: 8 x 200 Gb/s InfiniBand per node"),
    "link_efficiency": (
        0.78,
        ("measured: 8 A100, ring all-reduce at 234.9 of 300 GB/s (stas00/ml-engineering, network)"),
    ),
    "nvls_efficiency": (0.0, "no sums in this generation's NVSwitch"),
    "ll128_ramp_share": (
        1.0,
        ("measured: all-reduces of 1 to 128 MB on 4 and on 8 A100 (NCCL 2.13 and 2.19, tests/data/nccl_tests.json)"),
    ),
    "channel_bytes_per_s": (
        13.9e9,
        "measured: 8 A100, sendrecv of 128 MB at 110.8 GB/s over 8 channels (li-plus/playground, cuda/nccl.md)",
    ),
}

_HOPPER: Facts = {
    **_DATA_CENTRE,
    "node_link_bytes_per_s": (
        450e9,
        ("NVIDIA H100 Tensor Core GPU datasheet (2023): NVLink 4, 900 GB/s both directions together"),
    ),
    "link_efficiency": (
        0.81,
        (f"measured: 8 H100 and H200, 361 to 367 of 450 GB/s (stas00/ml-engineering, network; {_SIMUMAX})"),
    ),
    "channel_bytes_per_s": (18.3e9, "measured: GH200, sendrecv between nodes over one channel (nccl issue 1272)"),
    "nvls_efficiency": (
        0.685,
        ("measured: 8 H100, all-reduce at 274 GB/s, S + S/8 bytes per device and direction (dgxc-benchmarking nccl)"),
    ),
}

DGX_H100: Facts = {
    **_HOPPER,
    **_unit(32),
    "devices_per_node": (8, _DGX_H100),
    "node_network_bytes_per_s": (400e9, f"{_DGX_H100}: 8 x 400 Gb/s InfiniBand per node"),
}

DGX_H200: Facts = {
    **DGX_H100,
    "devices_per_node": (8, _DGX_H200),
    "node_network_bytes_per_s": (400e9, f"{_DGX_H200}: 8 x 400 Gb/s InfiniBand per node"),
}

_ALPS = (
    "Fusco et al. 2024 (arXiv 2408.11556), section II: nodes of four GH200, six NVLinks between any two, a "
    "Slingshot card each"
)

ALPS: Facts = {
    **_HOPPER,
    "devices_per_node": (4, _ALPS),
    "nics_per_node": (4, _ALPS),
    "node_link_bytes_per_s": (450e9, f"{_ALPS}: three times 150 GB/s, one direction"),
    "node_network_bytes_per_s": (100e9, f"{_ALPS}: 4 x 200 Gb/s per node"),
    "nvls_efficiency": (0.0, f"{_ALPS}: no NVSwitch"),
    "nodes_per_leaf": (0, f"{ESTIMATE}a dragonfly without bottleneck"),
    "leaf_latency_s": (0.9e-6, f"{ESTIMATE}as between leaf switches of InfiniBand"),
    "rails": (False, f"{ESTIMATE}a dragonfly without bottleneck"),
    "oversubscription": (1.0, f"{ESTIMATE}a dragonfly without bottleneck"),
}

_PLANES = "DeepSeek-AI, ISCA 2025, section 5.1: eight planes, a fat tree each; the nodes under one leaf are not given"

H800_POD: Facts = {
    **_HOPPER,
    "devices_per_node": (8, _V3),
    "node_link_bytes_per_s": (200e9, f"{_V3}: NVLink of an H800, 400 GB/s both directions together"),
    "node_network_bytes_per_s": (400e9, f"{_V3}: 8 x 400 Gb/s InfiniBand per node"),
    "link_efficiency": (0.80, f"measured: {_V3}: about 160 of 200 GB/s"),
    "nvls_efficiency": (0.69, "measured: 8 H800, all-reduce at 215 GB/s on the bus (nccl issue 1374), S + S/8 bytes"),
    "nodes_per_leaf": (0, _PLANES),
    "rails": (True, _PLANES),
    "oversubscription": (1.0, _PLANES),
    "leaf_latency_s": (0.9e-6, _LEAF),
}

DGX_B200: Facts = {
    **_DATA_CENTRE,
    **_unit(32),
    "devices_per_node": (8, _DGX_B200),
    "node_link_bytes_per_s": (900e9, f"{_DGX_B200}: NVLink 5, 14.4 TB/s in 8, both directions together"),
    "node_network_bytes_per_s": (400e9, f"{_DGX_B200}: 8 x 400 Gb/s ConnectX-7 per node"),
    "link_efficiency": (0.723, f"measured: 8 B200, all-gather at 651 of 900 GB/s on the bus (fit of {_SIMUMAX})"),
    "channel_bytes_per_s": (
        20.7e9,
        ("measured: 8 B200, sendrecv at 663 GB/s over 32 channels, 84 over 4 (Vultr POC, dgxc nccl log)"),
    ),
    "nvls_efficiency": (
        0.512,
        (f"measured: 8 B200, all-reduce at 717 GB/s on the bus, S + S/8 bytes (fit of {_SIMUMAX})"),
    ),
}

_ABOVE_RACKS = f"{ESTIMATE}one network without bottleneck above the racks"
DGX_B300: Facts = {
    **DGX_B200,
    "devices_per_node": (8, "NVIDIA DGX B300 datasheet"),
    "node_network_bytes_per_s": (800e9, "NVIDIA DGX B300 datasheet: 8 x 800 Gb/s ConnectX-8 per node"),
}

_NVLINK_5 = "NVIDIA GB200 NVL72 datasheet: NVLink 5, 130 TB/s in 72, both directions together"

NVL72_CARD_BYTES_PER_S, NVL72_ULTRA_CARD_BYTES_PER_S = 50e9, 100e9
"""Network cards of the racks: one ConnectX-7 of 400 Gb/s per GB200, one ConnectX-8 of 800 Gb/s per GB300."""


def nvl72(devices_per_node: int, *, card_bytes_per_s: float) -> Facts:
    """Facts of a rack of which jobs use `devices_per_node` devices."""
    return {
        **DGX_B200,
        "devices_per_node": (
            devices_per_node,
            ("one NVLink domain holds 72 devices; jobs over several use an equal part of each"),
        ),
        "node_link_bytes_per_s": (900e9, _NVLINK_5),
        "node_network_bytes_per_s": (
            devices_per_node * card_bytes_per_s,
            f"NVIDIA GB200 and GB300 NVL72 datasheets: {card_bytes_per_s * 8e-9:.0f} Gb/s per device",
        ),
        "nics_per_node": (devices_per_node, "one network card per device"),
        "nodes_per_leaf": (0, _ABOVE_RACKS),
        "rails": (True, _ABOVE_RACKS),
        "oversubscription": (1.0, _ABOVE_RACKS),
    }
