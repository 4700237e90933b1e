"""`Machine`: what is here, as data, so that checks can be chosen for machines that are not."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "torch", "triton", "safetensors")
ASK_S = 20.0
"""How long nvidia-smi may take to answer."""

PRETENDED_PATIENCE = 5
"""Kernels are carried out instruction by instruction."""

_LINK = re.compile(r"NV\d+")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Machine:
    """What checks depend on. `gpus` are names, in order; `links` the pairs of them that NVLink joins; `multicast` says
    that every GPU can write to all by one store. `num_hosts` is that of torchrun. `why_no_gpu` is empty with GPUs.
    `is_small` asks for sizes that are soon done, whatever the figures. GPUs that are pretended (docs/pretended_cuda.md)
    run a kernel while it is launched."""

    processor: str = ""
    num_cores: int = 1
    memory_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    multicast: bool = False
    num_hosts: int = 1
    why_no_gpu: str = ""
    is_small: bool = False
    pretended: bool = False

    @property
    def patience(self) -> int:
        """How much longer checks may take than on a machine with GPUs."""
        return PRETENDED_PATIENCE if self.pretended else 1

    @property
    def all_linked(self) -> bool:
        """Whether NVLink joins every pair of several GPUs."""
        count = len(self.gpus)
        return count > 1 and len(self.links) == count * (count - 1) // 2

    def __str__(self) -> str:
        names = [f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)]
        wires = ["multicast"] if self.multicast else ["NVLink"] if self.all_linked else []
        hosts = [f"{self.num_hosts} hosts"] if self.num_hosts > 1 else []
        return ", ".join([*hosts, *(names or ["CPU only"]), *wires, f"{self.processor}, {self.num_cores} cores"])


def linked(topology: str) -> tuple[tuple[int, int], ...]:
    """The pairs of GPUs that NVLink joins, from what `nvidia-smi topo -m` prints."""
    lines = [_COLORS.sub("", line).split() for line in topology.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    count = sum(1 for word in header if re.fullmatch(r"GPU\d+", word))
    rows = {words[0]: words[1 : 1 + count] for words in lines if words and len(words) > count and words != header}
    return tuple(
        (one, other)
        for one in range(count)
        for other in range(one + 1, count)
        if _LINK.fullmatch(rows.get(f"GPU{one}", [""] * count)[other])
    )


def this_machine() -> Machine:
    """What is here. Asks torch for GPUs, and nvidia-smi where there are some; starts no CUDA context."""
    gpus, multicast, why, found = _gpus()
    topology = _asked("nvidia-smi", "topo", "-m") if len(gpus) > 1 else ""
    return Machine(
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        versions={**_versions(), **found},
        gpus=gpus,
        links=linked(topology),
        multicast=multicast,
        num_hosts=_num_hosts(),
        why_no_gpu=why,
        pretended="SHARDPROOF_PRETENDED_CUDA" in os.environ,
    )


def _num_hosts() -> int:
    """Those of torchrun, 1 without."""
    world, local = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(world) // int(local) if world.isdecimal() and local.isdecimal() and int(local) else 1


def _gpus() -> tuple[tuple[str, ...], bool, str, dict[str, str]]:
    """Names, whether all have multicast, why there are none, and versions of what drives them."""
    if importlib.util.find_spec("torch") is None:
        return (), False, "torch is not installed", {}
    import torch

    if torch.version.cuda is None:
        return (), False, f"torch {torch.__version__} is built without CUDA", {}
    found = {"cuda": torch.version.cuda}
    driver = _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip()
    if driver:
        found["driver"] = driver
    count = torch.cuda.device_count()
    if not count:
        why = "no NVIDIA driver answers" if not driver else f"driver {driver} shows no GPU to this process"
        return (), False, why, found
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    names = tuple(torch.cuda.get_device_properties(number).name for number in range(count))
    return names, count > 1 and all(map(_has_multicast, range(count))), "", found


def _has_multicast(device: int) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device))


def _versions() -> dict[str, str]:
    from ... import __version__

    found = {"shardproof": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _asked(*command: str) -> str:
    """What a program prints; nothing where it is missing, fails, or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
