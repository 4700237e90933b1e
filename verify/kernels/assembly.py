"""The floor "assembled": every kernel compiled and assembled for each architecture, and what its assembly takes.

It needs no GPU: ptxas, cuobjdump and nvdisasm come with Triton. Kernels are compiled in a process of their own
(`assemble`), which Triton's compiler may end or fill with its messages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...backend.kernels.kernel import Kernel
from ...core.base.reduction import merges_of

ARCHITECTURES = (80, 90, 100)
"""Compute capability times ten: A100, H100 and H200, B200."""

WORLD = 8
TYPES = {
    "table": "u64",
    "pads": "u64",
    "multicast": "u64",
    "out": "*bf16",
    "n": "i64",
    "rank": "i32",
    "tensors": "*i64",
    "counts": "*i32",
    "width": "i64",
    "residual": "*bf16",
    "weight": "*bf16",
    "tokens": "i32",
    "hidden": "i64",
    "eps": "fp32",
}
"""Of a kernel's arguments. Pointers, and sizes that are multiples of 16, are known as such, as in a launch of them."""

MULTIPLES = ("n", "width", "hidden")
PACKED = 8
"""Elements of bf16 that 16 bytes hold: a thread has one such pack of a block."""


@dataclass(frozen=True)
class Assembled:
    """One kernel for one architecture: registers of a thread, spilled loads and stores, shared memory of a block, the
    widest load of a peer's memory in bytes, the PTX, and its operations that are products and sums in one or that
    ptxas may make so: those that do not ask for a rounding of their own (PTX ISA, "add")."""

    kernel: str
    architecture: int
    registers: int
    spills: int
    shared_bytes: int
    vector_bytes: int
    fused: int
    ptx: str

    def why_not(self, kernel: Kernel) -> str:
        """What is beyond the kernel's limits; empty where nothing is."""
        limits, found = kernel.limits, []
        if self.registers > limits.registers:
            found.append(f"{self.registers} registers are more than {limits.registers}")
        if self.spills > limits.spills:
            found.append(f"{self.spills} spilled loads and stores are more than {limits.spills}")
        if self.vector_bytes < limits.vector_bytes:
            found.append(f"peers are read {self.vector_bytes} bytes at a time, not {limits.vector_bytes}")
        if kernel.exact and self.fused:
            found.append(f"{self.fused} products and sums are one operation or may become one")
        return "; ".join(found)


def constants_of(kernel: Kernel) -> dict[str, Any]:
    """What is compiled in, for `WORLD` ranks of one leaf each."""
    import triton.language as tl

    known = {
        "WORLD": WORLD,
        "BLOCK": kernel.num_warps * 32 * PACKED,
        "NODES": (1,) * WORLD,
        "MERGES": merges_of(WORLD, [(leaf, leaf + 1) for leaf in range(WORLD)]),
        "LEAF": tl.bfloat16,
        "UNITS_OF": (16, 4, 1),
    }
    return {name: known[name] for name in kernel.function.arg_names if name in known}


def assembled(kernel: Kernel, architecture: int, changes: Mapping[str, Any] | None = None) -> Assembled:
    """Compiles a kernel here; `changes` are other options of the compiler."""
    from .compiling import compiled

    constants, names = constants_of(kernel), kernel.function.arg_names
    types = {name: TYPES[name] for name in names if name not in constants}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in types and (types[name].startswith("*") or name in MULTIPLES)
    }
    types |= dict.fromkeys(constants, "constexpr")
    made = compiled(kernel, types, constants, aligned, architecture=architecture, changes=changes)
    ptx, usage = made.asm["ptx"], _usage(made.asm["cubin"])
    return Assembled(
        kernel=kernel.name,
        architecture=architecture,
        registers=usage["registers"],
        spills=usage["spills"],
        shared_bytes=made.metadata.shared,
        vector_bytes=vector_bytes(ptx),
        fused=fused(ptx),
        ptx=ptx,
    )


def fused(ptx: str) -> int:
    """How many products and sums of fp32 are one operation, or are left to ptxas to make one."""
    return len(re.findall(r"\b(?:fma\.rn|add|sub|mul)(?:\.ftz)?\.f32\b", ptx))


def vector_bytes(ptx: str) -> int:
    """The widest load of global memory; one of a 64-bit address is none."""
    widths = []
    for opcode in re.findall(r"\bld\.global[\w.:]*", ptx):
        *parts, element = opcode.split(".")
        count = next((int(part[1]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        if (count, element) != (1, "b64"):
            widths.append(count * int(element[1:]) // 8)
    return max(widths, default=0)


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
    return [Assembled(**each) for each in json.loads(done.stdout)]


def main() -> None:
    """The process of `assemble`: names and architectures on standard input, what was found on standard output."""
    from ...backend.kernels.catalog import KERNELS

    names, architectures = json.loads(sys.stdin.read())
    kernels = [kernel for kernel in KERNELS if not names or kernel.name in names]
    found = [
        assembled(kernel, architecture)
        for kernel in kernels
        for architecture in architectures
        if architecture >= kernel.least_architecture
    ]
    json.dump([asdict(each) for each in found], sys.stdout)
