"""`KernelGroup`: a group whose all-gathers and canonical sums are kernels that read the peers' memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..transport.base import Shape, num_elements
from ..transport.process_group import ProcessGroup, ProcessGroupTransport
from ..transport.symmetric.view import SymmetricMemory
from . import catalog
from .kernel import Launcher
from .variable import unit_of

VECTOR_BYTES = 16
NODE_ELEMENTS = 16
"""A node takes a multiple of them where its sum goes to all by multicast."""

UNIT_TYPES = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class KernelGroup(ProcessGroup):
    """A group over one torch process group, with memory that all members map.

    All-gathers of equal shapes and canonical sums in fp32 go through `memory`, in pieces where they are larger than it;
    a large sum goes to all by multicast where the memory has such an address.
    What no kernel does (all-to-alls, sums in an order that the library chooses) goes over the process group. `launch`
    runs a kernel on the current stream.
    """

    one_shot_bytes = 1 << 18
    """Up to so many bytes of a rank every rank adds up all of a sum, which saves a meeting."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        name: str,
        axis: str,
        ranks: Sequence[int],
        memory: SymmetricMemory,
        launch: Launcher,
    ):
        super().__init__(transport, name, axis, ranks)
        self._memory, self._launch = memory, launch
        self._room = memory.own.nbytes // VECTOR_BYTES * VECTOR_BYTES
        self._counts: dict[tuple[int, ...], Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]:
        if len(set(shapes)) > 1 or not tensor.numel():
            return super()._all_gather(tensor, shapes)
        own = tensor.contiguous().reshape(-1).view(torch.uint8)
        arrived = own.new_empty(self.size, own.numel())
        for lo in range(0, own.numel(), self._room):
            part = own[lo : lo + self._room]
            unit = UNIT_TYPES[unit_of(part.numel())]
            out = own.new_empty(self.size * part.numel())
            self._begin()
            self._memory.own[: part.numel()].copy_(part)
            n = part.numel() // unit.itemsize
            self._run("all_gather", n, unit.itemsize, {"out": out.view(unit), "n": n})
            arrived[:, lo : lo + part.numel()] = out.view(self.size, -1)
        return [row.view(tensor.dtype).reshape(tensor.shape) for row in arrived.unbind()]

    def _tree_all_reduce(self, values: Tensor, rows: list[int], merges: list[int], dtype: torch.dtype) -> Tensor:
        slabs = max(1, *rows) + bool(self._memory.multicast)
        width = self._room // (4 * slabs) // VECTOR_BYTES * VECTOR_BYTES
        if values.dtype != torch.float32 or not width or not values.shape[1]:
            return super()._tree_all_reduce(values, rows, merges, dtype)
        kernel = "exact_all_reduce_multicast" if self._memory.multicast else "all_reduce_two_shot"
        if 4 * max(rows) * values.shape[1] <= self.one_shot_bytes:
            kernel = "all_reduce_one_shot"
        total = values.new_empty(values.shape[1], dtype=dtype)
        for lo in range(0, values.shape[1], width):
            part = values[:, lo : lo + width]
            out = values.new_empty(part.shape[1], dtype=dtype)
            self._begin()
            slab = -(-len(out) // NODE_ELEMENTS) * NODE_ELEMENTS if kernel == "exact_all_reduce_multicast" else len(out)
            self._shared((len(part), slab))[:, : len(out)].copy_(part)
            self._run(kernel, len(out), 4, {"out": out, "n": len(out)}, rows, merges)
            total[lo : lo + width] = out
        return total

    def _tree_sum(self, parts: list[Tensor], rows: list[int], merges: list[int]) -> Tensor:
        shape = parts[self.rank].shape[1:]
        counts = [num_elements(tuple(part.shape[1:])) for part in parts]
        is_too_large = 4 * max(rows) * sum(counts) > self._room
        if parts[0].dtype != torch.float32 or is_too_large or not sum(counts):
            return super()._tree_sum(parts, rows, merges)
        out = parts[0].new_empty(counts[self.rank])
        self._begin()
        shared = self._shared((rows[self.rank], sum(counts)))
        for target, part in zip(shared.split(counts, 1), parts, strict=True):
            target.copy_(part.reshape(target.shape))
        if len(set(counts)) == 1:
            self._run("reduce_scatter", counts[0], 4, {"out": out, "n": counts[0]}, rows, merges)
        else:
            width = math.gcd(*counts)
            of_ranks = self._on_device(tuple(count // width for count in counts))
            arguments = {"out": out, "counts": of_ranks, "width": width}
            self._run("reduce_scatter_rows", max(counts), 4, arguments, rows, merges)
        return out.view(shape)

    def _shared(self, shape: Sequence[int]) -> Tensor:
        """The begin of this rank's memory, in fp32."""
        return self._memory.own[: 4 * math.prod(shape)].view(torch.float32).view(tuple(shape))

    def _on_device(self, counts: tuple[int, ...]) -> Tensor:
        """`counts` in device memory, where they stay: a group's shapes are few."""
        if counts not in self._counts:
            self._counts[counts] = torch.tensor(counts, dtype=torch.int32, device=self._memory.own.device)
        return self._counts[counts]

    def _begin(self) -> None:
        """Own memory is written again after the kernel before, also where that one is on another stream."""
        if self._memory.own.is_cuda:
            stream = torch.cuda.current_stream(self._memory.own.device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream

    def _run(
        self,
        kernel: str,
        elements: int,
        element_bytes: int,
        arguments: Mapping[str, Any],
        rows: Sequence[int] = (),
        merges: Sequence[int] = (),
    ) -> None:
        """Launches a kernel that has so many `elements` to make on a rank; with `rows` it is a sum."""
        run, memory = catalog.kernel(kernel), self._memory
        places = {"table": memory.table, "pads": memory.pads, "rank": self.rank, "multicast": memory.multicast}
        block = run.num_warps * 32 * VECTOR_BYTES // element_bytes
        sums = {"NODES": tuple(rows), "MERGES": tuple(merges), "LEAF": tl.float32} if rows else {}
        self._launch(
            run,
            min(-(-elements // block), memory.most_blocks()),
            {**{name: value for name, value in places.items() if name in run.function.arg_names}, **arguments},
            {"WORLD": self.size, "BLOCK": block, **sums},
        )
