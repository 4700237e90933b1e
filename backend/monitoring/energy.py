"""`Energy`: joules of a run's processors and GPUs, each counted once however many ranks it has.

Processors count in RAPL (`/sys/class/powercap`, packages; often root alone may read them), GPUs in NVML since
their driver was loaded. Where neither can be read there is no energy in the metrics, and the header says why.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..transport.base import Transport
from ..transport.gather_values import gather_values

POWERCAP = Path("/sys/class/powercap")

Reader = Callable[[], float]
"""Joules so far, from any origin."""


class Energy:
    """What the ranks of a run read; all make one, and ask for `spent` together. `reason` says why nothing is measured,
    empty where something is."""

    def __init__(self, transport: Transport, powercap: Path = POWERCAP):
        self._world, self._device = transport.everyone, transport.device
        host = socket.gethostname()
        processors, why_no_processors = processor_readers(powercap)
        gpu, why_no_gpu = gpu_reader(transport.device)
        found = {f"{host} {name}": reader for name, reader in {**processors, **gpu}.items()}
        claims = gather_values(self._world, [*found], self._device)
        # of several ranks that read the same the first does
        taken = {name for rank in claims[: self._world.rank] for name in rank}
        self._readers = {name: reader for name, reader in found.items() if name not in taken}
        self._before = {name: reader() for name, reader in self._readers.items()}
        self.reason = "" if any(claims) else f"{why_no_processors}; {why_no_gpu}"

    def spent(self) -> float | None:
        """Joules of all ranks since the last time; None where nothing is measured."""
        if self.reason:
            return None
        now = {name: reader() for name, reader in self._readers.items()}
        own, self._before = sum(now[name] - self._before[name] for name in now), now
        return sum(gather_values(self._world, own, self._device))


def processor_readers(powercap: Path = POWERCAP) -> tuple[Mapping[str, Reader], str]:
    """The counters of this host's processor packages by name; or none, and why."""
    if not powercap.is_dir():
        return {}, f"{powercap} is not there"
    packages = sorted(path for path in powercap.iterdir() if re.fullmatch(r"[a-z-]*rapl:\d+", path.name))
    found: dict[str, Reader] = {}
    for package in packages:
        try:
            found[package.name] = _Counter(package).joules
        except (OSError, ValueError) as error:
            return {}, f"{package / 'energy_uj'} cannot be read ({getattr(error, 'strerror', None) or error})"
    return found, "" if found else f"{powercap} has no counter of a processor"


class _Counter:
    """A RAPL counter of microjoules, which begins again at 0 after `max_energy_range_uj`."""

    def __init__(self, folder: Path):
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._total = 0

    def joules(self) -> float:
        """Since it was made, as long as this is asked before it has gone round twice: minutes at least."""
        now = int(self._file.read_text())
        self._total += now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return self._total / 1e6


def gpu_reader(device: torch.device) -> tuple[Mapping[str, Reader], str]:
    """The counter of a rank's GPU, by its UUID; or none, and why."""
    if device.type != "cuda":
        return {}, "ranks have no GPU"
    try:
        import pynvml
    except ModuleNotFoundError:
        return {}, "nvidia-ml-py is not installed (pip install 'shardproof[energy]')"
    try:
        pynvml.nvmlInit()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return {}, f"NVML has no energy of this GPU ({error})"
    return {name: lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3}, ""
