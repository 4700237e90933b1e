"""What one stream of a GPU leaves to another: an event that the other one waits for. On a CPU, which does what it is
given at once, all of it is nothing.

A lane is a thread with a stream of its own, so whatever passes from one to another, a tensor, the permission to go on,
the news that weights are there, carries the moment from which on it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Moment = torch.cuda.Event | None
"""When the work that a stream was given so far is over; None on a CPU."""


class LaneStreams:
    """The streams of a rank's lanes, by name: each is made once, and is the lane's in every step.

    torch makes none: it hands out streams of a pool of 32 for each device and priority, one after the other and then
    the first again (`c10/cuda/CUDAStream.h`), to NCCL's process groups too. Two lanes that have one stream do their
    work in an order that nobody meant, and that NCCL cannot see.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._made: dict[str, torch.cuda.Stream] = {}

    def of(self, name: str) -> AbstractContextManager[object]:
        """Inside, the current stream is the one of this name; on a CPU nothing changes. One thread at a time asks for
        a name."""
        if self._device.type != "cuda":
            return nullcontext()
        if name not in self._made:
            self._made[name] = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._made[name])


def now(device: torch.device) -> Moment:
    """The moment at which the current stream has done what it was given."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(moment: Moment, device: torch.device) -> None:
    """What the current stream is given next comes after that moment."""
    if moment is not None:
        torch.cuda.current_stream(device).wait_event(moment)


def is_captured(device: torch.device) -> bool:
    """Whether the current stream is captured: what it is given is not done now, and the host can ask for nothing."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_of(device: torch.device) -> Moment:
    """For a stream that begins: what it has to wait for to be part of the capture that the current stream is part of.
    None outside of one."""
    return now(device) if is_captured(device) else None


def take_over(tensor: Tensor, moment: Moment) -> Tensor:
    """A tensor that another stream has made, for the current one: it is there, and its memory is not given to others
    before this stream has done what it does with it."""
    if moment is not None:
        wait_for(moment, tensor.device)
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device. The host does not wait: what it holds in pageable memory is copied on the way
    (CUDA, "API synchronization behavior")."""
    return tensor.to(device, non_blocking=True)


def used_here(tensors: Iterable[Tensor]) -> None:
    """The current stream uses tensors that others have made and that it already comes after: their memory is not given
    to others before it has."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
