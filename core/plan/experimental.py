"""`Experimental`: what a run may use that is not yet proved in use."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.option import Bounded, noun, option

FEATURES: Mapping[str, str] = {
    "fp16": "training in fp16, whose losses are scaled",
    "nccl": "ranks on GPUs that talk over NCCL",
    "kernels": "our kernels as transport on GPUs",
    "cuda_graphs": "captured steps and layers on GPUs",
    "compile": "compiled kernels on GPUs",
    "registered": "registered buffers of NCCL",
    "energy": "energy of GPUs by NVML",
}
"""What has not yet been proved on a device, or in long runs, by the name that allows it. What is older than this
section only says so; what is newer may have to be allowed (`backend.monitoring.experimental`)."""


@noun()
class Experimental(Bounded, section="experimental"):
    """What of the new a run may use, knowing that it is new."""

    allow: tuple[str, ...] = option(
        "what a run may use that is not yet proved in use",
        default=(),
        choices=tuple(FEATURES),
        more="A run names everything of it that it uses, and warns of what is not allowed here.",
        read_by="backend.monitoring.experimental",
    )
