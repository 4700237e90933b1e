"""What copies between a device and its host's memory cost where compute does not cover them (`core.plan` [offload]).

Modelled: each direction has the link to itself, and copies take nothing from the device's own memory or processors.
Not modelled: what both directions at once take from each other, devices that share a switch on the way to the host, and
the memory bandwidth of the host. A CPU has no engine for copies: there they are work like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.machine.cluster import ClusterSpec

Parts = Sequence[tuple[float, float]]
"""Of the parts of a stage in forward order: seconds of the pass, and seconds of a copy of what is in host memory."""


def copies_under_work(cluster: ClusterSpec) -> bool:
    """Whether copies go on while the device computes."""
    return cluster.collective_library == "nccl"


def forward_wait_s(parts: Parts) -> float:
    """Seconds that a forward waits for copies to the host (`backend.base.offload`).

    Tensors leave while their part runs. When the next part ends, and when the stage does, the device comes after the
    copies.
    """
    now_s = sent_s = 0.0
    for work_s, copy_s in parts:
        begin_s, before_s = now_s, sent_s
        now_s = max(begin_s + work_s, before_s)
        if copy_s:
            sent_s = max(begin_s + work_s, max(begin_s, before_s) + copy_s)
    return max(now_s, sent_s) - sum(work_s for work_s, _ in parts)


def backward_wait_s(parts: Parts) -> float:
    """Seconds that a backward waits for copies from the host: those of a part begin when the backward of the part
    behind it begins, and those of the last part with the whole."""
    now_s = here_s = 0.0
    if parts:
        here_s = parts[-1][1]
    for (work_s, _), (_, earlier_s) in zip(reversed(parts), [*reversed(parts[:-1]), (0.0, 0.0)], strict=True):
        now_s = max(now_s, here_s)
        here_s = now_s + earlier_s if earlier_s else 0.0
        now_s += work_s
    return now_s - sum(work_s for work_s, _ in parts)


def update_wait_s(cluster: ClusterSpec, num_bytes: float, update_s: float, piece_bytes: int) -> float:
    """Seconds that an update of `update_s` waits for `num_bytes` of moments and fp32 weights, which come and go in
    pieces of `piece_bytes`: all of them pass the link, and the last one leaves alone; or the update is slower, and the
    first comes alone too."""
    copy_s = num_bytes / cluster.host_link_bytes_per_s
    if not copies_under_work(cluster):
        return 2 * copy_s
    piece_s = min(num_bytes, piece_bytes) / cluster.host_link_bytes_per_s
    return max(copy_s + piece_s, update_s + 2 * piece_s) - update_s if num_bytes else 0.0
