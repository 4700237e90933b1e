"""Device memory that a process holds besides its tensors: the context of CUDA and its libraries, and the
buffers of communicators.

Messages of PyTorch that ran out of memory say it: what the process holds, less what the allocator does.
"""

from __future__ import annotations

from ...core.plan.plan import Plan
from ..network.spreads import strides

MIB = 2**20

CONTEXT_BYTES, RINGS_WITHIN = 1_500_000_000, 3
"""CUDA context, kernels, handles and the rings of a run cut along tp, pp and dp, which nvidia-smi shows and the
allocator does not: measured, README of the published runs. The context alone is 0.51 GiB on an A100
(Lightning-AI/litgpt, tutorials/oom.md), 0.74 on a GH200 (the same, issue 1892) and 0.70 on a B200
(stas00/ml-engineering, debug/pytorch.md). Fewer rings count as three. cuBLAS's workspaces are tensors of the allocator
and counted there (`simulator.stack`)."""

RECEIVER_BYTES, SENDER_BYTES = 10 * MIB, 2 * MIB
"""What one connection of one channel takes at either end. Measured: sizes in NCCL's log of allocations on eight H100
(NVIDIA/nccl, issue 1685); a receiver has 4 MiB for Simple, 4.7 for LL128 and 0.5 for LL."""

RING_CHANNELS = 24
"""Channels of a ring over NVLink: four A100 (NVIDIA/nccl, issue 1785). A communicator so takes 288 MiB; of an FSDP run
on 80 A100, which has one, 0.76 GiB were not PyTorch's (huggingface/accelerate, issue 1864), 0.25 more than the context
of an A100. Trees, NVLink SHARP and the few channels of messages between stages are not modelled."""

EXCHANGE_CHANNELS, MOST_PEERS = 32, 7
"""Channels to every peer of the node in an all-to-all (NVIDIA/nccl, issue 1685: eight H100, where the first one took
3.3 GB; these make 2.8). Of larger nodes no measurement is known, so they count as eight devices do. Libraries other
than NCCL are not modelled."""

HOST_PROCESS_BYTES = 150_000_000
"""Interpreter, torch and communicators of a rank on a CPU. Measured: private memory of a process with a group and one
product (torch 2.13, Linux, /proc/self/smaps_rollup), 2026-11-23: 147 MB."""


def reserved_bytes(plan: Plan) -> int:
    """Bytes of a device that a rank of the plan takes besides its tensors. Modelled: a context with three rings, a ring
    for every further axis that is cut, and what ranks that exchange tokens of experts hold for each other."""
    if plan.cluster.collective_library != "nccl":
        return HOST_PROCESS_BYTES
    per_connection = RECEIVER_BYTES + SENDER_BYTES
    rings = RING_CHANNELS * max(0, num_communicators(plan) - RINGS_WITHIN)
    return CONTEXT_BYTES + per_connection * (rings + EXCHANGE_CHANNELS * _peers(plan))


def num_communicators(plan: Plan) -> int:
    """Groups of more than one rank that a rank belongs to: an axis each, gradients over cp and dp together, those
    of experts their own."""
    layout = plan.layout
    cut = [layout.cp_inner > 1, 1 < layout.cp_inner < layout.cp]
    cut += [layout.tp > 1, layout.cp > 1, layout.cp * layout.dp > 1, layout.pp > 1]
    if plan.model.is_moe:
        cut += [layout.ep > 1, layout.expert_tp > 1 and layout.expert_tp != layout.tp]
        cut += [layout.expert_dp > 1 and layout.expert_dp != layout.cp * layout.dp]
    return sum(cut)


def _peers(plan: Plan) -> int:
    """Other ranks of an expert-parallel group on the same node."""
    layout, per_node = plan.layout, plan.cluster.devices_per_node
    stride = strides(layout, layout.expert_sizes)["ep"]
    return min(layout.ep - 1, -(-per_node // stride) - 1, MOST_PEERS) if plan.model.is_moe else 0
