"""A tp2 training step against one device, and a file written and read back where one is."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from ...backend.watch.rank_messages import TransportName
from ...core.base.digest import digest_bytes
from ...core.plan.plan import Plan
from ..dynamic.proof import prove
from .checks import Result
from .machine import Machine

PLAN = """
[model]
preset = "tiny-gpt"
[cluster]
preset = "this-host"
num_devices = 2
[layout]
tp = 2
[batch]
global = 2
sequence = 32
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
[train]
steps = 1
"""
FILE_BYTES = 1 << 26


def step(machine: Machine) -> Result:
    """All tensors of a step of two tensor-parallel ranks over shared memory, bit for bit."""
    return _proved("shm")


def step_on_gpus(machine: Machine) -> Result:
    """The same on two GPUs over NCCL."""
    return _proved("nccl")


def _proved(transport: TransportName) -> Result:
    proof = prove(Plan.from_toml(PLAN), transport=transport, steps=1)
    report = proof.report
    if not proof.ok:
        return Result("failed", "; ".join(map(str, proof.findings))[:400], report.get("bits_different"), "bits")
    return Result("ok", f"{report['tensors_compared']} tensors, fingerprint {report['fingerprint']}", 0, "bits")


def files(machine: Machine) -> Result:
    """Bytes written to the current folder come back as they were; the figure is the rate of writing, until they are on
    the device."""
    content = np.random.default_rng(3).bytes(FILE_BYTES)
    try:
        file = tempfile.TemporaryFile(dir=Path.cwd())  # noqa: SIM115 (closed below)
    except OSError as error:
        return Result("skipped", f"the current folder takes no files: {error.strerror}")
    with file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        took = time.perf_counter() - start
        file.seek(0)
        if digest_bytes(file.read()) != digest_bytes(content):
            return Result("failed", "what was read is not what was written")
    return Result("ok", value=round(FILE_BYTES / took / 1e9, 3), unit="GB/s")
