"""What the examples next to this file share: the borders of a tensor-parallel region (Shoeybi et al. 2019,
section 3), and how to start.

The faults are those of an audit of Megatron Core, NVIDIA/Megatron-LM#7452 (2026-09-17), each written anew in plain
torch from its description. One rank is one device, on which no fault shows: that run is the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from shardproof.verify.foreign import Slice


class Enter(Function):
    """A tensor that all ranks have goes into the region: its gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same tensor."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The sum."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Leave(Function):
    """Terms of a sum leave the region: every rank gets the sum, and the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same tensor."""
        return gradient


class Gather(Function):
    """Parts of the last dimension become the whole on every rank; backward, each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The whole."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """This rank's part."""
        return gradient.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


def own_part(size: int) -> slice:
    """This rank's part of `size` columns, heads or words."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def cut(dim: int, size: int) -> list[Slice]:
    """The same for the recorder: this rank holds its part of dimension `dim`."""
    return [Slice(dim, own_part(size).start, size)]


def run(main: Callable[[str, bool], None]) -> None:
    """Runs an example under torchrun: a folder for the ledger, and `--fixed`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--fixed", action="store_true", help="without the fault")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(given.folder, given.fixed)
    dist.destroy_process_group()
