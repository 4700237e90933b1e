"""What Python sees of CUDA where it is pretended: `torch.cuda`'s streams, events and devices, and `ProcessGroupNCCL`.

This file is loaded by its path in every process (`environment`), before the package can be: it imports nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

library: Any = None
"""The library that pretends CUDA, once this process has loaded it."""

patience_s = float(os.environ.get("SHARDPROOF_PRETENDED_PATIENCE_S", "180"))
"""How long the host waits for what peers send; less once they have not come."""

AFTERWARDS_S = 0.2

unfinished: list[Any] = []
"""What carries calls that were given up: it would not end before they do, so it is kept."""

MEMORY_BYTES = 80 << 30
CAPABILITY = (9, 0)


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
        major, minor = CAPABILITY
        total_memory = MEMORY_BYTES
        multi_processor_count = 132

    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: int(os.environ.get("SHARDPROOF_PRETENDED_DEVICES", "8"))
    cuda.current_device = torch.accelerator.current_device_index
    cuda.set_device = lambda device: torch.accelerator.set_device_index(_device(torch, device).index)
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, stream
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream(_device(torch, device))
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(_device(torch, device))
    cuda.get_device_name = lambda device=None: Properties.name
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_properties = lambda device=None: Properties
    cuda.mem_get_info = lambda device=None: (MEMORY_BYTES, MEMORY_BYTES)
    setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL)  # noqa: B010 - a class that torch has elsewhere
    library.pretended_on_wait(_say_place)


ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"


@ctypes.CFUNCTYPE(None)
def _say_place() -> None:
    """Tells the library from where in the package the calling thread waits: `backend/ranks/totals.py:norm`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (not frame.f_code.co_filename.startswith(ROOT) or frame.f_globals is globals()):
        frame = frame.f_back
    place = "" if frame is None else f"{frame.f_code.co_filename[len(ROOT) :]}:{frame.f_code.co_name}"
    library.pretended_place(place.encode())


def _device(torch: Any, device: Any) -> Any:
    """The device meant: the current one where none is said, or no number."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return found if found.index is not None else torch.device("cuda", torch.accelerator.current_device_index())


class Work:
    """A collective that goes on: to wait for it is a matter of streams, of which the host waits for none. Values are
    there when the call returns, unless peers have not come in `patience_s`: then the host goes on with zeros, as
    NCCL's would at once, so that the log shows what it would have given to streams next."""

    def __init__(
        self, end: Any, carried: Any, held: Sequence[Any], finish: Callable[[], None], given_up: Callable[[], None]
    ):
        self._end, self._carried, self._held, self._finish = end, carried, held, finish
        self._given_up = given_up

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; what the call keeps alive is let go of."""
        import torch

        torch.accelerator.current_stream().wait_event(self._end)
        if self._carried is not None:
            if _came(self._carried):
                self._finish()
            else:
                self._given_up()
        self._carried, self._held = None, ()
        return True


def _came(carried: Any) -> bool:
    """Whether peers came in time. What a peer makes fail is raised."""
    global patience_s
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            carried.wait()
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=wait, name="pretended wait", daemon=True)
    waiting.start()
    waiting.join(patience_s)
    if failed:
        raise failed[0]
    if waiting.is_alive():
        patience_s = min(patience_s, AFTERWARDS_S)
        return False
    return True


class NCCLConfig:
    """What torch lets Python set of `ncclConfig_t`; None is as NCCL likes."""

    def __init__(self) -> None:
        self.blocking: int | None = None
        self.cga_cluster_size: int | None = None
        self.min_ctas: int | None = None
        self.max_ctas: int | None = None
        self.net_name: str | None = None


class ProcessGroupNCCL:
    """As torch's: calls are queued in a stream of the communicator, after what the current stream has. The bytes go
    over gloo meanwhile. The log has each communicator with its members and options, and each call (`order`)."""

    class Options:
        """As torch's; the log has what was set."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(seconds=600)
            self.is_high_priority_stream = is_high_priority_stream
            self.group_name = ""
            self.global_ranks_in_group: list[int] = []
            self.config = NCCLConfig()
            self.split_from: Any = None
            self.split_color = 0

    def __init__(self, store: Any, rank: int, size: int, options: Any):
        import torch
        import torch.distributed as dist

        carrier = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        carrier._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        carrier._timeout, carrier._threads = options._timeout, 1
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("pretended", store), rank, size, carrier)
        self._stream = torch.cuda.Stream()
        self._number = 0
        self.options = options
        opened = {
            "name": options.group_name,
            "ranks": options.global_ranks_in_group or list(range(size)),
            "high_priority": options.is_high_priority_stream,
            "split_from": None if options.split_from is None else options.split_from.options.group_name,
            "split_color": options.split_color,
            **vars(options.config),
        }
        self._note("communicator", opened)

    def name(self) -> str:
        """The library that is pretended."""
        return "nccl"

    def eager_connect_single_device(self, device: Any) -> None:
        """It is connected."""

    def shutdown(self) -> None:
        """Nothing is left to end."""

    def alltoall_base(self, out: Any, given: Any, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        """As torch's."""
        self._call_begins("all_to_all", given, sent=list(counts), received=list(out_counts))
        return self._call(
            "all_to_all", [given], [out], lambda a, b: self._gloo.alltoall_base(b[0], a[0], out_counts, counts)
        )

    def _allgather_base(self, out: Any, given: Any) -> Work:
        self._call_begins("all_gather", given)
        return self._call("all_gather", [given], [out], lambda a, b: self._gloo._allgather_base(b[0], a[0]))

    def allreduce(self, tensors: Sequence[Any], options: Any) -> Work:
        """As torch's."""
        self._call_begins("all_reduce", tensors[0], reduction=_reduction(options))
        return self._call("all_reduce", tensors, tensors, lambda a, b: self._gloo.allreduce(b, options))

    def _reduce_scatter_base(self, out: Any, given: Any, options: Any) -> Work:
        self._call_begins("reduce_scatter", given, reduction=_reduction(options))
        return self._call(
            "reduce_scatter", [given], [out], lambda a, b: self._gloo._reduce_scatter_base(b[0], a[0], options)
        )

    def send(self, tensors: Sequence[Any], to: int, tag: int) -> Work:
        """As torch's."""
        self._call_begins("send", tensors[0], peer=to)
        return self._call("send", tensors, [], lambda a, b: self._gloo.send(a, to, tag))

    def recv(self, tensors: Sequence[Any], source: int, tag: int) -> Work:
        """As torch's."""
        self._call_begins("recv", tensors[0], peer=source)
        return self._call("recv", [], tensors, lambda a, b: self._gloo.recv(b, source, tag))

    def _call_begins(self, op: str, tensor: Any, **more: Any) -> None:
        """Notes what the call is, before it is in the stream."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._note("call", {"op": op, "dtype": dtype, "bytes": tensor.element_size(), "count": tensor.numel(), **more})

    def _note(self, kind: str, what: dict[str, Any]) -> None:
        stream = ctypes.c_int64(self._stream.stream_id)
        library.pretended_write(kind.encode(), stream, json.dumps(what).encode(), b"", b"")

    def _call(self, op: str, reads: Sequence[Any], writes: Sequence[Any], carry: Callable[[Any, Any], Any]) -> Work:
        import torch

        self._stream.wait_stream(torch.accelerator.current_stream())
        shapes = ";".join(f"{each.dtype}x{each.numel()}" for each in (reads or writes))
        library.pretended_write(
            b"collective",
            ctypes.c_int64(self._stream.stream_id),
            f"{op} {self.options.group_name} {shapes}".encode(),
            _ids(reads),
            _ids(writes),
        )
        library.pretended_flush()  # whoever looks for why a run hangs needs the call that hangs
        sent = [_copied(each) for each in reads]
        arrived = sent if reads is writes else [torch.empty(each.numel(), dtype=each.dtype) for each in writes]
        carried = carry(sent, arrived)

        def finish() -> None:
            for target, values in zip(writes, arrived, strict=True):
                _bytes(target).copy_(values.view(torch.uint8))

        number, self._number = self._number, self._number + 1

        def given_up() -> None:
            self._note("given up", {"number": number})
            unfinished.append(self._gloo)
            for target in writes:
                _bytes(target).zero_()

        return Work(self._stream.record_event(), carried, (*reads, *writes), finish, given_up)


def _reduction(options: Any) -> str:
    """Its name in torch."""
    import torch.distributed as dist

    return next(name for name in ("SUM", "MAX", "MIN", "AVG") if options.reduceOp == getattr(dist.ReduceOp, name))


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
