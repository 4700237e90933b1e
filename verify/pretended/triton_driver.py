"""`PretendedDriver`: Triton's driver on pretended CUDA. A launch is the kernel's PTX, carried out on this process.

Triton compiles as for a GPU of the pretended capability, so launches, their arguments and their grids are those of the
code for GPUs. Blocks run one after the other; a kernel that meets peers meets those of other processes, or of other
threads. What a launch reads and writes is noted in the log of streams.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ..kernels.ptx_block import LaunchContext
from ..kernels.ptx_floor import bits_of
from ..kernels.ptx_machine import executable
from ..kernels.ptx_memory import Array, Memory, Region

PATIENCE_S = 60.0
"""How long a kernel waits for its peers."""

MOST_ALLOCATIONS = 1 << 14
MOST_SHARED_BYTES = 232448
"""Of one block, on an H100; an A100 has 166,912."""

THREADS_OF_BLOCK = 1024


class Utils:
    """What Triton asks of a driver about devices and code."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Those that a compilation looks at."""
        found = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": MOST_SHARED_BYTES,
            "max_num_regs": 65536,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": 32,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers of a thread, spills and threads of a block; nothing is loaded."""
        return 1, 1, registers_of(code), 0, THREADS_OF_BLOCK

    def unload_module(self, module: int) -> None:
        """Nothing was loaded."""


def registers_of(code: bytes) -> int:
    """Of a thread, as NVIDIA's own tool reads them from the assembled kernel. Raises `RuntimeError`."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+)", said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump of Triton {triton.__version__} does not read its code: {said.stderr[-200:]}")
    return int(found.group(1))


class Noted(Memory):
    """Memory of a launch that knows which regions were read and which were written; races inside a block are looked for
    by the floor "PTX executed" (`verify/kernels`) alone."""

    def __init__(self, regions: list[Region]):
        super().__init__(regions)
        self.reads: set[str] = set()
        self.writes: set[str] = set()

    def load(self, addresses: Array, width: int, count: int = 1, users: Any = None) -> list[Array]:
        """As `Memory`."""
        self._uses(addresses, self.reads)
        return super().load(addresses, width, count)

    def store(self, addresses: Array, width: int, values: Any, users: Any = None) -> None:
        """As `Memory`."""
        self._uses(addresses, self.writes)
        super().store(addresses, width, values)

    def _uses(self, addresses: Array, names: set[str]) -> None:
        for address in (addresses.min(), addresses.max()) if len(addresses) else ():
            found = (each.name for each in self.regions if each.begin <= address < each.begin + each.size)
            names |= {name for name in found if name.isdecimal()}  # those of this process


class PretendedLauncher:
    """One compiled kernel: `source` has the types of its arguments, `metadata` where its PTX is kept."""

    def __init__(self, source: Any, metadata: Any):
        self._names = list(source.signature)
        self._kinds = list(source.signature.values())
        self._constants = {self._names[path[0]]: value for path, value in source.constants.items()}
        self._metadata, self._name = metadata, str(metadata.name)
        self._ready: Any = None

    def _executable(self) -> Any:
        if self._ready is None:
            path = triton.runtime.cache.get_cache_manager(self._metadata.hash).get_file(f"{self._name}.ptx")
            assert path is not None, "Triton keeps the PTX of what it has compiled"
            self._ready = executable(Path(path).read_text())
        return self._ready

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        """A launch of x blocks; the arguments of the function are the last of `rest`."""
        assert y == z == 1, "kernels here have one dimension of blocks"
        arguments = dict(zip(self._names, rest[len(rest) - len(self._names) :], strict=True))
        launch = Launch(self._name, self._executable(), x, int(self._metadata.shared), self._values(arguments))
        current = torch.cuda.current_stream()
        if (graph := _stubs().CUDAGraph.of(current)) is None:
            launch.run()
            launch.note(current.stream_id)
            return
        touched = sorted({number for each in arguments.values() if (number := _memory(each))})
        size = int(self._constants.get("WORLD", 1)) if "pads" in arguments else 1
        gang = Gang.of(_addresses(int(arguments["pads"]), size)) if size > 1 else None
        work = launch.run if gang is None else functools.partial(gang.add, launch.run)
        graph.call(current, f"triton::{self._name}", work, touched, touched)

    def _values(self, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """The bits of the parameters; the last ones are scratch memory, of which there is none."""
        given = [arguments[name] for name, kind in zip(self._names, self._kinds, strict=True) if kind != "constexpr"]
        types = self._executable().program.parameters
        values = [bits_of(value, types[number]) for number, value in enumerate(given)]
        return (*values, *[0] * (len(types) - len(values)))


class Launch:
    """A kernel with its arguments, that may run several times."""

    def __init__(self, name: str, ready: Any, num_blocks: int, shared_bytes: int, parameters: tuple[int, ...]):
        self._name, self._ready, self._num_blocks = name, ready, num_blocks
        self._shared_bytes, self._parameters = shared_bytes, parameters
        self._regions = allocations()  # a graph's memory stays where it is
        self._memory = Noted([])

    def run(self) -> None:
        """All blocks, one after the other."""
        self._memory = Noted([*{**self._regions, **allocations()}.values(), *PEERS])
        self._ready.run(
            LaunchContext(
                parameters=self._parameters,
                num_blocks=self._num_blocks,
                num_threads=self._ready.program.num_threads,
                shared_bytes=self._shared_bytes,
                memory=self._memory,
                failed=patient(self._name),
            )
        )

    def note(self, stream: int) -> None:
        """What it has read and written goes into the log of streams."""
        _stubs().library.pretended_write(
            b"op",
            ctypes.c_int64(stream),
            f"triton::{self._name}".encode(),
            ",".join(sorted(self._memory.reads)).encode(),
            ",".join(sorted(self._memory.writes)).encode(),
        )


@dataclass
class Gang:
    """Kernels of one process that meet each other: a replay, which does one thing after the other, begins them when the
    last has come."""

    size: int
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, pads: tuple[int, ...]) -> Gang | None:
        """The kernels that meet at these pads, where all are memory of this process."""
        mine = {region.begin for region in allocations().values()}
        return _GANGS.setdefault(pads, cls(len(pads))) if mine.issuperset(pads) else None

    def add(self, run: Callable[[], None]) -> None:
        """One more of them."""
        self.waiting.append(run)
        if len(self.waiting) == self.size:
            waiting, self.waiting = self.waiting, []
            with ThreadPoolExecutor(self.size) as threads:
                list(threads.map(lambda each: each(), waiting))


_GANGS: dict[tuple[int, ...], Gang] = {}


def _memory(value: Any) -> int:
    """The number of a tensor's memory, 0 of anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return int(_stubs().library.pretended_memory(ctypes.c_void_p(value.untyped_storage().data_ptr())))


def _addresses(table: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * count).from_address(table))


def patient(kernel: str) -> Callable[[int], None]:
    """What a compare-and-swap that found another value does: it sleeps, for peers that share a core with this one.
    Raises `RuntimeError` where peers do not come."""
    deadline = time.monotonic() + PATIENCE_S

    def failed(address: int) -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{kernel} waits at {address:#x} for a peer that does not come.")
        time.sleep(1e-4)

    return failed


PEERS: list[Region] = []
"""Memory of other processes that this one maps."""

_REGIONS: dict[int, Region] = {}
"""By the number of an allocation, which is used once."""


def allocations() -> dict[int, Region]:
    """All memory of pretended devices of this process, by its number, which is its name too."""
    numbers = np.empty((MOST_ALLOCATIONS, 3), np.int64)
    count = _stubs().library.pretended_memories(
        numbers.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(MOST_ALLOCATIONS)
    )
    assert count <= MOST_ALLOCATIONS, f"{count} allocations are more than are looked at"
    found = {number: (begin, size) for number, begin, size in numbers[:count].tolist()}
    with _LOCK:
        for number in _REGIONS.keys() - found.keys():
            del _REGIONS[number]
        for number, (begin, size) in found.items():
            if number not in _REGIONS:
                _REGIONS[number] = Region(str(number), begin, size)
        return dict(_REGIONS)


_LOCK = threading.Lock()


def _stubs() -> Any:
    return sys.modules["shardproof_pretended_stubs"]


class PretendedDriver(DriverBase):
    """As NVIDIA's: the current device and stream are those of torch."""

    def __init__(self) -> None:
        self.utils = Utils()
        self.launcher_cls = PretendedLauncher

    @classmethod
    def is_active(cls) -> bool:
        """It is chosen by who pretends."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No C is compiled."""
        raise NotImplementedError("launches on pretended devices are Python.")

    def get_current_device(self) -> int:
        """Its number."""
        return int(torch.cuda.current_device())

    def set_current_device(self, device: int) -> None:
        """As torch's."""
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        """Its number."""
        return int(torch.cuda.current_stream(device).stream_id)

    def get_device_capability(self, device: int) -> tuple[int, int]:
        """The pretended one."""
        major, minor = torch.cuda.get_device_capability(device)
        return major, minor

    def get_current_target(self) -> GPUTarget:
        """A GPU of that capability."""
        major, minor = self.get_device_capability(0)
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        """The current one."""
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        """Of torch."""
        return torch.cuda

    def get_benchmarker(self) -> Any:
        """Nothing is tuned here."""
        raise NotImplementedError("pretended devices have no clock.")
