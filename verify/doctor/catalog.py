"""`CHECKS`: all checks in the order in which they run, and why a machine may lack what one looks at."""

from __future__ import annotations

import importlib.util

from .checks import Check
from .machine import Machine

OVERLAP = ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
"""Lets several ranks share memory on one GPU; torch reads it when it starts."""


def torch(machine: Machine) -> str:
    """What ranks need."""
    if "torch" not in machine.versions:
        return "torch is not installed: pip install 'shardproof[train]'"
    return ""


def shared_memory(machine: Machine) -> str:
    """What ranks that share memory need."""
    if importlib.util.find_spec("shardproof.backend.transport.symmetric._shared_memory") is None:
        return "the compiled half is not built: no C compiler was found when shardproof was installed"
    return torch(machine)


def several_hosts(machine: Machine) -> str:
    """What ranks of several hosts need."""
    if machine.num_hosts < 2:
        return "one host: start it on each with torchrun --nnodes (docs/doctor.md)"
    return shared_memory(machine)


def triton(machine: Machine) -> str:
    """What kernels need: Triton, and ranks that share memory."""
    if "triton" not in machine.versions:
        return "Triton is not installed: pip install 'shardproof[gpu]'"
    return shared_memory(machine)


def a_gpu(machine: Machine) -> str:
    """A GPU that torch can use."""
    if not machine.gpus:
        return f"no CUDA device: {machine.why_no_gpu}"
    return ""


def meeting_gpus(machine: Machine) -> str:
    """What our kernels need: Triton, and memory that ranks on GPUs share: one GPU, or several that NVLink joins."""
    if why := a_gpu(machine) or triton(machine):
        return why
    if len(machine.gpus) > 1 and not machine.all_linked:
        return "NVLink does not join all GPUs of this host"
    return ""


def a_gpu_and_triton(machine: Machine) -> str:
    """What kernels need that meet nobody."""
    return a_gpu(machine) or triton(machine)


def two_gpus(machine: Machine) -> str:
    """What two ranks over NCCL need."""
    return a_gpu(machine) or ("" if len(machine.gpus) > 1 else "NCCL needs a GPU for each rank, and one is here")


CHECKS = (
    Check("hosts", "ranks of all hosts bring the same bytes and sums", "hosts:hosts", 120, several_hosts),
    Check("event-engine", "compiled event engine: a step's length is the closed form's", "compiled:event_engine"),
    Check("digests", "compiled digests: those of numpy", "compiled:digest"),
    Check("exact-sums", "compiled exact sums: those of fractions", "compiled:exact_sum", needs=torch),
    Check("bits", "all transports bring the same bytes and sums", "transports:bits", needs=shared_memory),
    Check("speed", "all-gathers of processes, the smallest", "transports:speed", 120, shared_memory),
    Check("barriers", "rounds of a barrier in shared memory", "transports:barriers", needs=shared_memory),
    Check("lost-rank", "a killed rank is named within a second", "transports:lost_rank", needs=shared_memory),
    Check("step", "a tp2 step is that of one device", "training:step", needs=shared_memory),
    Check("files", "a file in this folder comes back", "training:files"),
    Check("triton", "Triton loads", "kernels:triton"),
    Check("kernels", "kernels on the floors that are here", "kernels:floors", 600, triton),
    Check("gpu-products", "products by cuBLAS repeat their bits", "gpus:products", 120, a_gpu, on_gpu=True),
    Check(
        "gpu-exact-products", "our exact products", "gpu_products:exact_products", 120, a_gpu_and_triton, on_gpu=True
    ),
    Check("gpu-product-choice", "who makes products of exact training", "gpu_choices:choices", 120, a_gpu, on_gpu=True),
    Check("gpu-kernels", "our kernels' cases on GPUs", "gpu_kernels:cases", 120, meeting_gpus, (OVERLAP,), True),
    Check("gpu-barriers", "rounds of our barrier", "gpu_kernels:barriers", 120, meeting_gpus, (OVERLAP,), True),
    Check("gpu-capture", "capture and replay with peers", "gpu_kernels:capture", 120, meeting_gpus, (OVERLAP,), True),
    Check(
        "gpu-all-reduce", "all-reduces: NCCL's, torch's, ours", "gpus:all_reduces", 120, meeting_gpus, (OVERLAP,), True
    ),
    Check("gpu-graphs", "steps captured as a graph are those without", "gpu_graphs:graphs", 120, a_gpu, on_gpu=True),
    Check("gpu-step", "a tp2 step over NCCL is one device's", "training:step_on_gpus", 120, two_gpus, on_gpu=True),
)
