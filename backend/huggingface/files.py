"""Safetensors files that many ranks write: their layout is known beforehand, so each rank puts its
own slices in their places.

The format is eight bytes of header length, a JSON header, and the tensors one after another
(github.com/huggingface/safetensors, README, "Format"). As the package's own writer does it, tensors are in the order of
their element size, largest first, then of their names, and the header is filled up with spaces to whole eight bytes, so
that files here and there are the same to the byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, eq=False)
class FileLayout:
    """One file: `header` is what stands before the data, `places` the first byte and the shape of every tensor."""

    name: str
    header: bytes
    places: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]
    num_bytes: int

    def create(self, path: Path) -> None:
        """Writes the header and makes the file as long as it will be, all of it on the disk: who writes to a mapped
        file for which there is no room is killed. Raises `OSError` where there is none."""
        with path.open("wb") as file:
            file.write(self.header)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, self.num_bytes)

    def open(self, path: Path) -> OpenFile:
        """The file, which was created there, for writing into."""
        return OpenFile(self, np.memmap(path, dtype=np.uint8, mode="r+"))


class OpenFile:
    """A file that was created, its tensors open for writing."""

    def __init__(self, layout: FileLayout, memory: np.memmap):
        self._layout = layout
        self._memory = memory
        self._bytes = torch.from_numpy(memory)

    def tensor(self, name: str) -> Tensor:
        """The tensor in the file: what is copied into it is written."""
        first, shape, dtype = self._layout.places[name]
        size = math.prod(shape) * dtype.itemsize
        return self._bytes[first : first + size].view(dtype).view(shape)

    def close(self) -> None:
        """What was written is on its way to the disk when this returns."""
        self._memory.flush()


def file_layouts(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], max_bytes: int
) -> tuple[FileLayout, ...]:
    """Files of at most `max_bytes` of tensors each (one tensor at least), filled in the order of `shapes`."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtypes[name].itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    return tuple(
        _file_layout(file, {name: (shapes[name], dtypes[name]) for name in group})
        for file, group in zip(names, groups, strict=True)
    )


def _file_layout(file: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> FileLayout:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    firsts, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
        shape, dtype = tensors[name]
        firsts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": FORMATS[dtype], "shape": list(shape), "data_offsets": [firsts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {name: (start + first, *tensors[name]) for name, first in firsts.items()}
    return FileLayout(file, len(text).to_bytes(8, "little") + text, places, start + end)


def index_of(layouts: tuple[FileLayout, ...]) -> str:
    """The content of `model.safetensors.index.json`."""
    places = {name: (layout.name, place) for layout in layouts for name, place in layout.places.items()}
    total = sum(math.prod(shape) * dtype.itemsize for _, (_, shape, dtype) in places.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: places[name][0] for name in sorted(places)}}
    return json.dumps(index, indent=2) + "\n"
