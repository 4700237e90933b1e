"""`Communicators`: how NCCL's communicators are opened, by what they join."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.bounds import Bound
from ..base.option import Bounded, noun, option

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
"""What communicators join: the axes of a layout, `pp` being messages between stages, and those of experts."""

REGISTERED = ("dp", "edp")
"""Axes whose collectives of a step have buffers that they use again: gradient buckets and weights that are gathered.
What tensor and context parallelism gather is an activation, whose life is autograd's, so none of it is kept."""

MOST_CTAS = 64
"""NCCL has no more channels than this (`MAXCHANNELS`), and a thread block for each."""
MOST_CLUSTER = 8
"""Thread blocks of a portable cluster (CUDA programming guide, "Thread block clusters"), and of NCCL's."""

_CTAS = Bound(MOST_CTAS, "NCCL has at most so many channels, and a thread block for each", least=1.0)


@noun()
class Communicators(Bounded, section="communicators"):
    """How NCCL opens the communicators of each axis. What is not given is as NCCL likes; other transports have
    none of it."""

    min_ctas: Mapping[str, float] = option(
        "with NCCL: thread blocks of a call at least, by axis",
        default_factory=dict,
        hash=False,
        bound=_CTAS,
        more="Axes are tp, cp, dp, pp (messages), ep, etp and edp. Each thread block takes a multiprocessor. "
        "Not modelled.",
        read_by="backend.transport.nccl_options",
    )
    max_ctas: Mapping[str, float] = option(
        "with NCCL: thread blocks of a call at most, by axis",
        default_factory=dict,
        hash=False,
        bound=_CTAS,
        more="Calls of several communicators that run at the same time have to fit on the device together. "
        "Not modelled.",
        read_by="backend.transport.nccl_options",
    )
    cga_cluster_size: Mapping[str, float] = option(
        "with NCCL: thread blocks of a call that a cluster has, by axis",
        default_factory=dict,
        hash=False,
        bound=Bound(MOST_CLUSTER, "portable clusters have at most so many thread blocks", least=1.0),
        more="Not modelled.",
        read_by="backend.transport.nccl_options",
    )
    high_priority: tuple[str, ...] = option(
        "with NCCL: axes whose calls go before kernels that wait for the device",
        default=(),
        choices=AXES,
        more="Megatron-LM's `--high-priority-stream-groups`. Not modelled.",
        read_by="backend.transport.nccl_options",
    )
    network: str | None = option(
        "with NCCL: the name of its network module",
        default=None,
        default_note="the best there is",
        more="As `IB`, `Socket` or that of a plug-in (`netName`). Not modelled: `simulate` takes the cluster's links.",
        read_by="backend.transport.nccl_options",
    )
    registered: tuple[str, ...] = option(
        "with NCCL: axes whose buffers lie in memory that communicators know beforehand",
        default=(),
        choices=REGISTERED,
        more="Gradient buckets in fast numerics, and weights that ZeRO gathers, go through one pool of NCCL's "
        "allocator (Megatron-LM's `--use-nccl-ub`), where torch and all GPUs of a group can; `train` says where not. "
        "A communicator takes up to twice its largest bucket, which no other tensor uses. Neither that memory nor the "
        "time saved is modelled.",
        read_by="backend.transport.process_group",
    )
    symmetric: bool = option(
        "with NCCL: registered buffers are windows, which all ranks of a communicator register together",
        default=False,
        more="NCCL 2.27 has kernels for them. All rooms of a rank are of the sizes of its peers', or nothing is "
        "registered. Not modelled.",
        read_by="backend.transport.process_group",
    )
    split: bool = option(
        "with NCCL: communicators of an axis are split from one of all ranks",
        default=False,
        more="It is `ncclCommSplit` in place of a new bootstrap for each. Messages, tied tables, replicas of stages "
        "and the communicators of several modules are opened anew. Not modelled.",
        read_by="backend.transport.process_group",
    )
