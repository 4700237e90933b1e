"""The floor "PTX executed": a kernel compiled as a launch compiles it, its PTX carried out on this process's memory."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...backend.kernels.kernel import Kernel, Launcher
from .compiling import code_of_launch
from .processes import BUFFER_BYTES, MULTICAST, PAD_BYTES, Ground
from .ptx_block import LaunchContext
from .ptx_machine import executable
from .ptx_memory import Memory, Multicast, Region


def launcher(ground: Ground, architecture: int | None = None) -> Launcher:
    """Runs kernels as PTX for that architecture, or each for the one it names, one block after the other."""

    def launch(
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        code = code_of_launch(kernel, arguments, constants, architecture or kernel.executed_architecture)
        ready = executable(code.ptx)
        types = ready.program.parameters
        values = [bits_of(arguments[name], types[index]) for index, name in enumerate(code.parameters)]
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        others = {f"tensor {number} in memory": tensor for number, tensor in enumerate(reached)}
        ground.begin()  # a compilation before it takes none of its patience
        ready.run(
            LaunchContext(
                parameters=(*values, *[0] * (len(types) - len(values))),  # scratch memory: there is none
                num_blocks=num_blocks,
                num_threads=ready.program.num_threads,
                shared_bytes=code.shared_bytes,
                memory=Memory([*_regions(ground), *_of_tensors({**tensors, **others}, not kernel.meets)]),
                failed=ground.failed,
                multicast=Multicast(MULTICAST, PAD_BYTES, BUFFER_BYTES, ground.buffers),
            )
        )

    return launch


def launcher_sm80(ground: Ground) -> Launcher:
    """The same with the code for A100."""
    return launcher(ground, 80)


def bits_of(value: Any, kind: str) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind in ("f32", "f64"):
        return int.from_bytes(struct.pack("<f" if kind == "f32" else "<d", value), "little")
    return int(value)


def _regions(ground: Ground) -> Sequence[Region]:
    size = 8 * ground.memory.world_size
    return [
        *(Region(f"the buffer of rank {rank}", begin, BUFFER_BYTES) for rank, begin in enumerate(ground.buffers)),
        *(Region(f"the pad of rank {rank}", begin, PAD_BYTES) for rank, begin in enumerate(ground.pads)),
        Region("the table of buffers", ground.memory.table, size, is_writable=False),
        Region("the table of pads", ground.memory.pads, size, is_writable=False),
    ]


def _of_tensors(tensors: Mapping[str, Tensor], notes_reads: bool) -> Sequence[Region]:
    return [Region(name, each.data_ptr(), _extent(each), notes_reads=notes_reads) for name, each in tensors.items()]


def _extent(tensor: Tensor) -> int:
    """The bytes from the first element of a tensor to its last one, and those between that are of no element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
