"""`Kernel`: a Triton function with the floors on which it is proved and the limits that hold for its assembly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

Floor = Literal["interpreted", "PTX executed", "assembled", "model-checked", "device"]
"""interpreted: by Triton's interpreter, on processes that share memory. PTX executed: the compiled code, instruction by
instruction, on such processes. assembled: by ptxas for each architecture, within limits. model-checked: its barriers
explored under a weak memory model. device: run on a GPU."""


@dataclass(frozen=True)
class Limits:
    """What the assembly of a kernel may take: registers of a thread, spilled loads and stores together. And the bytes
    of the widest access to memory of a peer that it must have, 0 for any."""

    registers: int = 255
    spills: int = 4
    vector_bytes: int = 16


@dataclass(frozen=True)
class Kernel:
    """A Triton function `function` and the floors it stands on; `not_on` says of other floors why it does not.

    `num_warps` and `num_stages` are those of a launch. An exact kernel is compiled without contraction of a product and
    a sum into one operation, which would round once where the canonical sum rounds twice. GPUs older than
    `least_architecture` (compute capability times ten) have not what it needs. The floor "PTX executed" carries out the
    code for `executed_architecture`; `executed_because` says why it is another than that of an H100.
    """

    name: str
    function: Any
    floors: tuple[Floor, ...]
    limits: Limits = Limits()
    not_on: Mapping[Floor, str] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    exact: bool = False
    least_architecture: int = 80
    executed_architecture: int = 90
    executed_because: str = ""

    @property
    def meets(self) -> bool:
        """Whether its blocks wait for those of peers."""
        return "pads" in self.function.arg_names

    @property
    def options(self) -> dict[str, Any]:
        """Of a compilation."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": not self.exact}


class Launcher(Protocol):
    """How a kernel is run: interpreted, as executed PTX, or on a device. Cases of a kernel are written against it."""

    def __call__(
        self,
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        """Runs `num_blocks` programs. `arguments` are tensors, addresses and whole numbers by the function's names of
        them; `constants` what is compiled in (`tl.constexpr`). `reached` are tensors besides whose addresses the kernel
        finds in memory."""
