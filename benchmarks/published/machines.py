"""Words of published tables, as tables: the machines they name, schedules and shards. Nothing here
depends on a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.machine.devices import GH200


@dataclass(frozen=True)
class Machine:
    """A cluster preset and the fields in which a published machine differs from it.

    `power_share`: its power limit as a share of the preset's device, which lowers the sustained
    shares (`POWER_EXPONENT`).
    """

    preset: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    power_share: float = 1.0


POWER_EXPONENT = 0.37
"""Sustained shares go with this power of a device's power limit: measured between the A100 at 300 W
(PCIe) and at 400 W (SXM)."""

MACHINES: tuple[tuple[str, Machine], ...] = (
    ("GB300", Machine("gb300-nvl72")),
    ("GB200", Machine("gb200-nvl72")),
    ("B300", Machine("dgx-b300")),
    ("B200", Machine("dgx-b200")),
    ("H200", Machine("dgx-h200")),
    ("GH-96", Machine("alps-gh200")),
    # torchtitan, docs/performance.md: H100 of Grand Teton servers, 96 GB of HBM2e at 2.4 TB/s, limited to 500 W. Its
    # total is not published: that of the GH200, which has 96 GB too.
    (
        "H100-96GB",
        Machine(
            "dgx-h100",
            {"device_memory_bytes": GH200["device_memory_bytes"][0], "device_memory_bytes_per_s": 2.4e12},
            power_share=500 / 700,
        ),
    ),
    ("H100", Machine("dgx-h100")),
    ("H800", Machine("h800-pod")),
    # A800: an A100 with NVLink limited to 400 GB/s both directions together.
    ("A800", Machine("dgx-a100-80g", {"node_link_bytes_per_s": 200e9})),
    ("V100-32GB", Machine("dgx-2")),
    ("A100-40", Machine("dgx-a100-40g")),
    ("A100", Machine("dgx-a100-80g")),
    ("Ampere", Machine("dgx-a100-80g")),
)
"""Words of a hardware description -> machine; the first match counts."""

NETWORKS: tuple[tuple[str, float], ...] = (
    ("4x100 Gb/s", 50e9),
    ("800 Gb/s in the vTrain config", 100e9),
    ("8x200 Gb/s", 200e9),
    ("1600 Gb/s", 200e9),
    ("8x400 Gb/s", 400e9),
    ("400 Gb/s RoCE per GPU", 400e9),
    ("800 Gb/s per node", 100e9),
    ("800 Gb/s RoCE per node", 100e9),
    ("400 Gb/s per node", 50e9),
)
"""Words of a network description -> injection bandwidth of a node, one direction; the first match counts."""

SCHEDULES: Mapping[str, str] = {
    "none": "1F1B",
    "1F1B": "1F1B",
    "1F1B (DeepSpeed)": "1F1B",
    "interleaved 1F1B": "Interleaved1F1B",
    "interleaved 1F1B variant (tunable N)": "Interleaved1F1B",
    "1F1B-I": "Interleaved1F1B",
    "ZB-1p": "ZBH1",
    "ZB-1P": "ZBH1",
    "ZB-2p": "ZBH2",
    "V-Half": "VHalf",
    "V-Min": "VMin",
    "V-ZB": "ZBVZeroBubble",
}
"""A source's name of a schedule, up to its first comma -> ours."""

POST_VALIDATED = ("ZB-1p", "ZB-2p")
"""Schedules whose optimizer step does not wait for a global norm (Qi et al. 2024, section 4); with a suffix they do."""

ZERO: tuple[tuple[str, int], ...] = (
    ("parameters not resharded", 2),
    ("ZeRO-3", 3),
    ("FSDP", 3),
    ("ZeRO-2", 2),
    ("SHARD_GRAD_OP", 2),
    ("ZeRO-1", 1),
    ("distributed optimizer", 1),
)
"""Words of a sharding description -> ZeRO stage; the first match counts."""
