"""The machine one is on, as one node: what is known of it without measuring. `shardproof
calibrate` measures the rest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from .cluster import ClusterSpec
from .devices import Facts

CORE_FLOPS_PER_S = 96e9
"""Nominal fp32 peak of one CPU core: 3 GHz and two 256-bit fused multiply-adds per cycle."""

CORE_MEMORY_BYTES_PER_S = 10e9
"""Nominal memory bandwidth of one busy CPU core."""

EXCHANGED_BYTES = 2**20
"""Payloads up to which sums over CPUs are exchanged and made by the members, in member order. gloo's own all-reduce
takes 5 to 8 ms over 4 ranks whatever the payload, its reduce-scatter 6 to 7 ms, an all-to-all 0.7 ms for 4 KiB and 2.8
ms for 1 MiB; over 2 ranks a reduce-scatter 0.6 and 3.2 ms, an all-to-all 0.3 and 0.9 ms (torch 2.13, 2 cores). Of 4 MiB
and more gloo's rings are faster."""

NOMINAL = "nominal, not measured: "

SHARED_MEMORY = (
    "measured on a 2-core EPYC machine, 2026-11-23: messages through shared memory between two processes, 45-50 us at "
    "4 KB, 3.4-4.1 GB/s at 16 MB"
)

_ABSENT = ("nvls_efficiency", "sharp", "nics_per_node", "nodes_per_leaf", "rails", "oversubscription", "leaf_latency_s")
"""Fields of a fabric that one machine has not: they keep their defaults."""

_DEFAULTS = {field.name: field.default for field in fields(ClusterSpec)}

_CORE: Facts = {
    "matmul_efficiency": (0.7, f"{NOMINAL}single-threaded products"),
    "memory_efficiency": (0.8, f"{NOMINAL}large streaming loops"),
    "kernel_launch_s": (5e-6, f"{NOMINAL}dispatch of one torch operation on a CPU"),
    "node_link_bytes_per_s": (3.8e9, SHARED_MEMORY),
    "node_link_latency_s": (45e-6, SHARED_MEMORY),
    "node_network_bytes_per_s": (3.8e9, "as inside the node: there is only one"),
    "network_latency_s": (45e-6, "as inside the node: there is only one"),
    "link_efficiency": (1.0, "the link rate is a measured one"),
    "num_compute_units": (1, "one thread computes"),
    "sustained_share": (1.0, "in the efficiency"),
    "matmul_efficiency_by_dtype": ({}, f"{NOMINAL}half formats are no better"),
    "sustained_share_by_dtype": ({}, f"{NOMINAL}half formats are no better"),
    "product_curve": ({}, f"{NOMINAL}none measured"),
    "memory_curve": ({}, f"{NOMINAL}none measured"),
    "kernel_curve": ({}, f"{NOMINAL}none measured"),
    "num_cores": (0, "in the rates, which are those of a rank's share of the cores"),
    "busy_core_share": (1.0, f"{NOMINAL}cores do not disturb each other"),
    "rank_skew_root_s": (0.0, f"{NOMINAL}ranks are equally fast"),
    "step_over_kernels": (1.0, "in the efficiencies"),
    "attention_half_head_dim": (0.0, f"{NOMINAL}width does not matter to a scalar core"),
    "network_efficiency": (1.0, "the link rate is a measured one"),
    "collective_library": ("shm", "the backend's transport between processes of one machine"),
    "collective_launch_s": (0.0, "in the link latency"),
    "collective_ramp_bytes": (0.0, "in the link rate"),
    "ll128_ramp_share": (0.0, "no such protocol between host processes"),
    "channel_bytes_per_s": (0.0, "in the link rate"),
    "collective_curve": ({}, f"{NOMINAL}none measured"),
    "grouped_matmul_efficiency": (1.0, f"{NOMINAL}single-threaded kernels"),
    "attention_forward_efficiency": (0.5, f"{NOMINAL}single-threaded kernels"),
    "attention_backward_efficiency": (0.5, f"{NOMINAL}single-threaded kernels"),
    "kernel_floor_s": (0.0, f"{NOMINAL}single-threaded kernels"),
    "host_dispatch_s": (5e-6, f"{NOMINAL}single-threaded kernels"),
    "overlap_compute_share": (1.0, f"{NOMINAL}single-threaded kernels"),
    "flash_attention_2_share": (1.0, "there is one kernel"),
    **{name: (_DEFAULTS[name], "there is only one node") for name in _ABSENT},
}
"""What does not depend on how many ranks there are."""


def host_facts(num_devices: int) -> Facts:
    """This machine for so many ranks: a device is one rank process with one thread, and ranks
    share the cores there are."""
    cores = os.cpu_count() or 1
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    share = min(1.0, cores / num_devices)
    rate = CORE_FLOPS_PER_S * share
    counted = f"counted by the operating system: {cores} cores, {memory_bytes:.0f} bytes, shared by {num_devices} ranks"
    return {
        **_CORE,
        "devices_per_node": (num_devices, "all ranks run on this one machine"),
        "device_memory_bytes": (memory_bytes / num_devices, counted),
        "device_memory_bytes_per_s": (
            CORE_MEMORY_BYTES_PER_S * share,
            (f"{NOMINAL}10 GB/s per core, cores shared by the ranks"),
        ),
        "host_link_bytes_per_s": (
            CORE_MEMORY_BYTES_PER_S * share * _CORE["memory_efficiency"][0] / 2,
            f"{NOMINAL}a copy reads and writes the same memory",
        ),
        "peak_flops_per_s": (
            {"fp32": rate, "bf16": rate, "fp16": rate},
            f"{NOMINAL}3 GHz x 32 FLOPs per cycle and core; half formats are no faster",
        ),
    }


def available_memory_bytes() -> float | None:
    """What new processes can take of this machine's memory and swap, within the limits of this process' control groups
    (v1 and v2); None where the system does not say."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = sum(1024.0 * int(rows[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError):
        return None
    return min([free, *_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _group_limits(membership: Path, root: Path) -> Iterator[float]:
    """What is left of each limit above this process (docs.kernel.org, "Control Group v2", memory.max; "Memory
    Resource Controller")."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / name.lstrip("/")
        for each in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit, and the root of v2 has no such file
                yield float(int((each / limit).read_text()) - int((each / used).read_text()))
            if each == top:
                break
