"""`DeviceLauncher`: runs kernels on a GPU, with as many blocks as run at the same time on every peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..transport.symmetric.view import SymmetricMemory
from .grid import DeviceLimits, Grid, KernelUse, agreed_grid, meeting_grid
from .kernel import Kernel
from .peers import OF_RANKS


def launch_alone(
    kernel: Kernel,
    num_blocks: int,
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
    reached: Sequence[Tensor] = (),
) -> None:
    """Runs a kernel that meets nobody on the current GPU, as `Launcher`."""
    kernel.function[(num_blocks,)](**arguments, **constants, **kernel.options)


class DeviceLauncher:
    """Launches kernels on the current stream of the device of `memory`.

    `gather` returns what every rank gives, by rank; it is called at the first launch of each variant of a kernel, which
    is the same one on all ranks. `grids` says of each variant how many blocks it has and what limits them. `sharing`
    ranks run their kernels on this device at the same time.
    """

    def __init__(self, memory: SymmetricMemory, gather: Callable[[int], Sequence[int]], sharing: int = 1):
        self.grids: dict[tuple[Any, ...], Grid] = {}
        self._memory, self._gather, self._sharing = memory, gather, sharing
        self._device = memory.own.device
        self._limits = DeviceLimits.of(torch.cuda.get_device_properties(self._device))

    def __call__(
        self,
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        """As `Launcher`; `num_blocks` is the most that have work, and the number where a kernel does not meet. Raises
        `ValueError` for a tensor that does not begin at a multiple of 16 bytes: its kernel would be another one than
        that of its peers."""
        given = {**arguments, **constants, **kernel.options}
        with torch.cuda.device(self._device):
            if not kernel.meets:
                launch_alone(kernel, num_blocks, arguments, constants)
                return
            variant = (kernel.name, num_blocks, *map(_kind, arguments.items()), *constants.items())
            if variant not in self.grids:
                self.grids[variant] = self._grid(kernel, num_blocks, given)
            kernel.function[(self.grids[variant].num_blocks,)](**given)

    def _grid(self, kernel: Kernel, num_blocks: int, given: Mapping[str, Any]) -> Grid:
        compiled = kernel.function.warmup(grid=(1,), **given)
        compiled._init_handles()
        use = KernelUse(compiled.n_regs, compiled.metadata.shared, compiled.metadata.num_warps)
        own = meeting_grid(
            use,
            self._limits,
            work_blocks=num_blocks,
            pad_blocks=self._memory.most_blocks(),
            sharing=self._sharing,
        )
        return agreed_grid(own, self._gather)


def _kind(argument: tuple[str, Any]) -> tuple[Any, ...]:
    """What Triton may compile a variant for: types, and whether a number is 1 or a multiple of 16."""
    name, value = argument
    if isinstance(value, Tensor):
        if value.data_ptr() % 16:
            raise ValueError(f"{name} begins at {value.data_ptr():#x}, which is no multiple of 16 bytes.")
        return name, value.dtype
    return (name,) if name in OF_RANKS or isinstance(value, float) else (name, value == 1, value % 16 == 0)
