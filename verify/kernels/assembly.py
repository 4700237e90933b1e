"""The floor "assembled": every kernel compiled and assembled for each architecture, and what its assembly takes.

It needs no GPU: ptxas, cuobjdump and nvdisasm come with Triton. Kernels are compiled in a process of their own
(`assemble`), which Triton's compiler may end or fill with its messages.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...backend.kernels.kernel import Kernel
from .ptx_counts import chained, copied_bytes, fused, multiplied, stored_bytes, vector_bytes

if TYPE_CHECKING:
    from .launches import LaunchOf

ARCHITECTURES = (80, 90, 100)
"""Compute capability times ten: A100, H100 and H200, B200."""


@dataclass(frozen=True)
class Assembled:
    """One launch of a kernel for one architecture: registers of a thread, spilled loads and stores, shared memory of a
    block, the widest load of a peer's memory or the narrowest of a product's operands in bytes, the PTX, and its
    operations that are products and sums in one or that ptxas may make so: those that do not ask for a rounding of
    their own (PTX ISA, "add"), but for those of which a leaf of fp32 is made. `others` are what else is wrong."""

    kernel: str
    architecture: int
    registers: int
    spills: int
    shared_bytes: int
    vector_bytes: int
    fused: int
    ptx: str
    form: str = ""
    others: tuple[str, ...] = ()

    def why_not(self, kernel: Kernel) -> str:
        """What is beyond the kernel's limits; empty where nothing is."""
        limits, found = kernel.limits, list(self.others)
        if self.registers > limits.registers:
            found.append(f"{self.registers} registers are more than {limits.registers}")
        if self.spills > limits.spills:
            found.append(f"{self.spills} spilled loads and stores are more than {limits.spills}")
        if self.vector_bytes < limits.vector_bytes:
            of = "peers" if kernel.meets else "operands"
            found.append(f"{of} are read {self.vector_bytes} bytes at a time, not {limits.vector_bytes}")
        if kernel.exact and self.fused:
            found.append(f"{self.fused} products and sums are one operation or may become one")
        return ": ".join([self.form] * bool(self.form and found) + ["; ".join(found)])


def assembled(kernel: Kernel, architecture: int) -> list[Assembled]:
    """Compiles the launches of a kernel here."""
    from .launches import launches_of

    return [_assembled(launch, architecture) for launch in launches_of(kernel, architecture)]


def _assembled(launch: LaunchOf, architecture: int) -> Assembled:
    from .compiling import compiled_launch

    kernel = launch.kernel
    made = compiled_launch(kernel, launch.arguments, launch.constants, architecture)
    ptx, usage = made.asm["ptx"], _usage(made.asm["cubin"])
    of = _of_product(launch, ptx) if "TILE_M" in launch.constants else Counted(vector_bytes(ptx), fused(ptx))
    return Assembled(
        kernel=kernel.name,
        architecture=architecture,
        registers=usage["registers"],
        spills=usage["spills"],
        shared_bytes=made.metadata.shared,
        vector_bytes=of.vector_bytes,
        fused=of.fused,
        ptx=ptx,
        form=launch.form,
        others=of.others,
    )


class Counted(NamedTuple):
    """What is counted in PTX."""

    vector_bytes: int
    fused: int
    others: tuple[str, ...] = ()


def _of_product(launch: LaunchOf, ptx: str) -> Counted:
    """A tile is multiplied by tensor cores where operands have 16 bits, else by one operation a term; results are
    written 16 bytes at a time."""
    num_warps, others = launch.kernel.num_warps, []
    tile = tuple(launch.constants[f"TILE_{dim}"] for dim in "MNK")
    due, in_chains = math.prod(tile), chained(ptx, 32 * num_warps)
    by_cores = launch.arguments["left"].element_size() == 2
    found = multiplied(ptx, num_warps, tile) if by_cores else in_chains
    if not found or found % due:
        how = "by tensor cores" if by_cores else "in sequence"
        others.append(f"{found:,} terms are multiplied {how} for {due:,} of a tile")
    if (stored := stored_bytes(ptx)) != 16:
        others.append(f"results are written {stored} bytes at a time, not 16")
    return Counted(copied_bytes(ptx), fused(ptx) - (0 if by_cores else in_chains // (32 * num_warps)), tuple(others))


def _usage(cubin: bytes) -> dict[str, int]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
    registers = re.search(r"REG:(\d+)", said.stdout + said.stderr)
    if registers is None or not code:
        raise RuntimeError(f"the tools of Triton {triton.__version__} do not read its own code: {said.stderr[-200:]}")
    return {"registers": int(registers.group(1)), "spills": len(re.findall(r"\b(?:LDL|STL)\b", code))}


def assemble(names: Sequence[str] = (), architectures: Iterable[int] = ARCHITECTURES) -> list[Assembled]:
    """The kernels of the catalog of those names, all without, in a process of its own."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"]
    asked = json.dumps([list(names), list(architectures)])
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kernels are not compiled: {done.stderr[-2000:]}")
    return [Assembled(**{**each, "others": tuple(each["others"])}) for each in json.loads(done.stdout)]


def main() -> None:
    """The process of `assemble`: names and architectures on standard input, what was found on standard output."""
    from ...backend.kernels.catalog import KERNELS

    names, architectures = json.loads(sys.stdin.read())
    kernels = [kernel for kernel in KERNELS if not names or kernel.name in names]
    found = [
        each
        for kernel in kernels
        for architecture in architectures
        if architecture >= kernel.least_architecture
        for each in assembled(kernel, architecture)
    ]
    json.dump([asdict(each) for each in found], sys.stdout)
