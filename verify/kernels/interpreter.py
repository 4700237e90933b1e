"""The floor "interpreted", on Triton's interpreter as `kernels.interpreted` mends it.

The stock interpreter spins where a signal has not come; here it says so. TRITON_INTERPRET must be set before Triton is
loaded, so all of this lives in the processes of `processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...backend.kernels.interpreted import Builder, mend
from ...backend.kernels.kernel import Kernel, Launcher
from .processes import Ground


def launcher(ground: Ground) -> Launcher:
    """Runs kernels interpreted, one block after the other."""
    mend()
    _mend_swaps(ground.failed)

    def launch(
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        ground.begin()
        kernel.function[(num_blocks,)](**arguments, **constants)

    return launch


def _mend_swaps(failed: Callable[[int], None]) -> None:
    """`failed(address)` is called after each compare-and-swap that found another value, that of the last call."""
    stock = Builder.stock["create_atomic_cas"]

    def swap(self: Any, pointer: Any, expected: Any, value: Any, *order: Any) -> Any:
        found = stock(self, pointer, expected, value, *order)
        other = np.broadcast_to(found.data != expected.data, np.shape(pointer.data))
        if other.any():
            failed(int(np.asarray(pointer.data)[other].flat[0]))
        return found

    Builder.create_atomic_cas = swap
