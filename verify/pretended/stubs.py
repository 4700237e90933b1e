"""What Python sees of CUDA where it is pretended: `torch.cuda`'s streams, events and devices, and `ProcessGroupNCCL`.

This file is loaded by its path in every process (`environment`), before the package can be: it imports nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

library: Any = None
"""The library that pretends CUDA, once this process has loaded it."""

MEMORY_BYTES = 80 << 30


def capability() -> tuple[int, int]:
    """Of the pretended devices."""
    major, minor = os.environ.get("SHARDPROOF_PRETENDED_CAPABILITY", "9.0").split(".")
    return int(major), int(minor)


def install(torch: Any) -> None:
    """Puts what is missing into `torch.cuda` and `torch.distributed`, once torch is loaded."""
    import torch.distributed as dist

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=_device(torch, device))

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **others: Any) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(stream or torch.accelerator.current_stream())
            self._time_s = time.perf_counter()  # the work is done when it is given

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * float(other._time_s - self._time_s)

    @contextlib.contextmanager
    def stream(which: Any) -> Iterator[None]:
        if which is None:
            yield
            return
        with which:
            yield

    class Properties:
        name = "pretended CUDA"
        major, minor = capability()
        total_memory = MEMORY_BYTES
        multi_processor_count = 132
        regs_per_multiprocessor = 65536
        max_threads_per_multi_processor = 2048
        shared_memory_per_multiprocessor = 233472

    @contextlib.contextmanager
    def device(which: Any) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        cuda.set_device(which)
        try:
            yield
        finally:
            cuda.set_device(before)

    cuda = torch.cuda
    torch.version.cuda = "pretended"
    cuda.nccl.version = lambda: (0,)
    cuda.device = device
    cuda._lazy_init = lambda: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: int(os.environ.get("SHARDPROOF_PRETENDED_DEVICES", "8"))
    cuda.current_device = torch.accelerator.current_device_index
    cuda.set_device = lambda device: torch.accelerator.set_device_index(_device(torch, device).index)
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, stream
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream(_device(torch, device))
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(_device(torch, device))
    cuda.get_device_name = lambda device=None: Properties.name
    cuda.get_device_capability = lambda device=None: capability()
    cuda.get_device_properties = lambda device=None: Properties
    cuda.mem_get_info = lambda device=None: (MEMORY_BYTES, MEMORY_BYTES)
    setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL)  # noqa: B010 - a class that torch has elsewhere


def install_triton(module: Any) -> None:
    """Triton's driver is the pretended one. `module` is `triton.runtime.driver`."""

    def create() -> Any:
        from shardproof.verify.pretended.triton_driver import PretendedDriver

        return PretendedDriver()

    module._create_driver = create


def install_symmetric(module: Any) -> None:
    """Symmetric memory is that of `symmetric`. `module` is `torch.distributed._symmetric_memory`."""

    def empty(*size: Any, dtype: Any = None, device: Any = None) -> Any:
        from shardproof.verify.pretended.symmetric import empty

        return empty(*size, dtype=dtype, device=device)

    def rendezvous(tensor: Any, group: Any) -> Any:
        from shardproof.verify.pretended.symmetric import rendezvous

        return rendezvous(tensor, group)

    module.empty, module.rendezvous = empty, rendezvous


AFTER: dict[str, Callable[[Any], None]] = {
    "torch": install,
    "triton.runtime.driver": install_triton,
    "torch.distributed._symmetric_memory": install_symmetric,
}
"""What is done to a module once it is loaded."""


def _device(torch: Any, device: Any) -> Any:
    """The device meant: the current one where none is said, or no number."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return found if found.index is not None else torch.device("cuda", torch.accelerator.current_device_index())


class Work:
    """A collective that goes on: to wait for it is a matter of streams; the values are there when the call returns."""

    def __init__(self, end: Any, carried: Any, held: Sequence[Any], finish: Callable[[], None]):
        self._end, self._carried, self._held, self._finish = end, carried, held, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; what the call keeps alive is let go of."""
        import torch

        torch.accelerator.current_stream().wait_event(self._end)
        if self._carried is not None:
            self._carried.wait()
            self._finish()
        self._carried, self._held = None, ()
        return True


class ProcessGroupNCCL:
    """As torch's: calls are queued in a stream of the communicator, after what the current stream has. The bytes go
    over gloo meanwhile."""

    class Options:
        """As torch's, of which the time limit is looked at."""

        def __init__(self) -> None:
            self._timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Any):
        import torch
        import torch.distributed as dist

        carrier = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        carrier._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        carrier._timeout, carrier._threads = options._timeout, 1
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("pretended", store), rank, size, carrier)
        self._stream = torch.cuda.Stream()
        self._name = f"communicator of {size}"

    def name(self) -> str:
        """The library that is pretended."""
        return "nccl"

    def eager_connect_single_device(self, device: Any) -> None:
        """It is connected."""

    def shutdown(self) -> None:
        """Nothing is left to end."""

    def alltoall_base(self, out: Any, given: Any, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        """As torch's."""
        return self._call(
            "all_to_all", [given], [out], lambda a, b: self._gloo.alltoall_base(b[0], a[0], out_counts, counts)
        )

    def _allgather_base(self, out: Any, given: Any) -> Work:
        return self._call("all_gather", [given], [out], lambda a, b: self._gloo._allgather_base(b[0], a[0]))

    def allreduce(self, tensors: Sequence[Any], options: Any) -> Work:
        """As torch's."""
        return self._call("all_reduce", tensors, tensors, lambda a, b: self._gloo.allreduce(b, options))

    def _reduce_scatter_base(self, out: Any, given: Any, options: Any) -> Work:
        return self._call(
            "reduce_scatter", [given], [out], lambda a, b: self._gloo._reduce_scatter_base(b[0], a[0], options)
        )

    def send(self, tensors: Sequence[Any], to: int, tag: int) -> Work:
        """As torch's."""
        return self._call("send", tensors, [], lambda a, b: self._gloo.send(a, to, tag))

    def recv(self, tensors: Sequence[Any], source: int, tag: int) -> Work:
        """As torch's."""
        return self._call("recv", [], tensors, lambda a, b: self._gloo.recv(b, source, tag))

    def _call(self, op: str, reads: Sequence[Any], writes: Sequence[Any], carry: Callable[[Any, Any], Any]) -> Work:
        import torch

        self._stream.wait_stream(torch.accelerator.current_stream())
        shapes = ";".join(f"{each.dtype}x{each.numel()}" for each in (reads or writes))
        library.pretended_write(
            b"collective",
            ctypes.c_int64(self._stream.stream_id),
            f"{op} {id(self):x} {shapes}".encode(),
            _ids(reads),
            _ids(writes),
        )
        sent = [_copied(each) for each in reads]
        arrived = sent if reads is writes else [torch.empty(each.numel(), dtype=each.dtype) for each in writes]
        carried = carry(sent, arrived)

        def finish() -> None:
            for target, values in zip(writes, arrived, strict=True):
                _bytes(target).copy_(values.view(torch.uint8))

        return Work(self._stream.record_event(), carried, (*reads, *writes), finish)


def _ids(tensors: Sequence[Any]) -> bytes:
    found = [library.pretended_memory(ctypes.c_void_p(each.untyped_storage().data_ptr())) for each in tensors]
    return ",".join(map(str, found)).encode()


def _bytes(tensor: Any) -> Any:
    """The bytes of a contiguous tensor on pretended CUDA, where they lie."""
    import torch

    assert tensor.is_contiguous(), "NCCL takes tensors whose elements lie one after the other"
    if not tensor.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copied(tensor: Any) -> Any:
    """Its values now, one after the other, as a tensor of the host."""
    return _bytes(tensor).clone().view(tensor.dtype)
