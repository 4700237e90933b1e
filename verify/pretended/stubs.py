"""What Python sees of CUDA where it is pretended: `torch.cuda`'s streams, events and devices, and `ProcessGroupNCCL`.

This file is loaded by its path in every process (`environment`), before the package can be: it imports nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

library: Any = None
"""The library that pretends CUDA, once this process has loaded it."""

patience_s = float(os.environ.get("SHARDPROOF_PRETENDED_PATIENCE_S", "180"))
"""How long the host waits for what peers send; less once they have not come."""

AFTERWARDS_S = 0.2

unfinished: list[Any] = []
"""What carries calls that were given up: it would not end before they do, so it is kept."""

MEMORY_BYTES = 80 << 30


def capability() -> tuple[int, int]:
    """Of the pretended devices."""
    major, minor = os.environ.get("SHARDPROOF_PRETENDED_CAPABILITY", "9.0").split(".")
    return int(major), int(minor)


def install(torch: Any) -> None:
    """Puts what is missing into `torch.cuda` and `torch.distributed`, once torch is loaded."""
    import torch.distributed as dist

    for name in ("capture_begin", "capturing", "call", "go_on", "new_pool", "memory", "memories", "allocate_from"):
        getattr(library, f"pretended_{name}").restype = ctypes.c_int64
    library.pretended_capture_end.restype = library.pretended_replay.restype = ctypes.c_char_p

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            made = super().__new__(cls, device=_device(torch, device), priority=priority)
            number = ctypes.c_int64(made.stream_id)
            library.pretended_write(b"stream", number, _place().encode(), b"", b"")  # of a pool: others may have it
            return made

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, external: bool = False, **others: Any) -> Any:
            made = super().__new__(cls, device="cuda", enable_timing=enable_timing)
            made._external, made._is_inside = external, False
            return made

        def record(self, stream: Any = None) -> None:
            on = stream or torch.accelerator.current_stream()
            graph = CUDAGraph.of(on)
            if self._external and graph is not None:
                graph.call(on, "an event's time", self._take_time)  # each replay has a time of its own
            else:
                super().record(on)
                self._take_time()
            self._is_inside = graph is not None and not self._external

        def _take_time(self) -> None:
            self._time_s = time.perf_counter()  # the work is done when it is given

        def query(self) -> bool:
            if self._is_inside:
                raise RuntimeError(
                    "an event of a captured stream is no time: only an external one is recorded by replays"
                )
            return bool(super().query())

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
    cuda.can_device_access_peer = lambda one, other: os.environ.get("SHARDPROOF_PRETENDED_PEERS") != "none"
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

    @contextlib.contextmanager
    def captured(graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream or Stream()):
            graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        library.pretended_capture_is_over(ctypes.c_int64(graph.number))

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        before = library.pretended_allocate_from(ctypes.c_int64(pool.number))
        try:
            yield
        finally:
            library.pretended_allocate_from(ctypes.c_int64(before))

    cuda.MemPool, cuda.use_mem_pool = MemPool, use_mem_pool
    cuda.CUDAGraph, cuda.graph = CUDAGraph, captured
    cuda.graph_pool_handle = lambda: (0, library.pretended_new_pool())
    cuda.is_current_stream_capturing = lambda: CUDAGraph.of(torch.accelerator.current_stream()) is not None
    setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL)  # noqa: B010 - a class that torch has elsewhere
    library.pretended_on_wait(_say_place)


ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"


def _is_ours(path: str) -> bool:
    return path.startswith(ROOT) and "site-packages" not in path


@ctypes.CFUNCTYPE(None)
def _say_place() -> None:
    """Tells the library from where in the package the calling thread waits: `backend/ranks/totals.py:norm`."""
    library.pretended_place(_place().encode())


def _place() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and (not _is_ours(frame.f_code.co_filename) or frame.f_globals is globals()):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename[len(ROOT) :]}:{frame.f_code.co_name}"


def _ours(module: str) -> Any:
    """A module of this folder, once the package can be imported."""
    return importlib.import_module(f"shardproof.verify.pretended.{module}")


def install_triton(module: Any) -> None:
    """Triton's driver is the pretended one. `module` is `triton.runtime.driver`."""

    def create() -> Any:
        return _ours("triton_driver").PretendedDriver()

    module._create_driver = create


def install_symmetric(module: Any) -> None:
    """Symmetric memory is that of `symmetric`. `module` is `torch.distributed._symmetric_memory`."""

    def empty(*size: Any, dtype: Any = None, device: Any = None) -> Any:
        return _ours("symmetric").empty(*size, dtype=dtype, device=device)

    def rendezvous(tensor: Any, group: Any) -> Any:
        return _ours("symmetric").rendezvous(tensor, group)

    class SymmetricMemory:
        @staticmethod
        def set_group_info(name: str, rank: int, size: int, store: Any) -> None:
            _ours("symmetric").know(name, rank, size, store)

    module.empty, module.rendezvous, module._SymmetricMemory = empty, rendezvous, SymmetricMemory


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


class MemPool:
    """As torch's: memory that is given to nobody else. The log has what is allocated from it."""

    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False):
        assert allocator is not None, "a pool that NCCL is to know takes memory of NCCL's allocator"
        self.number = next(self._numbers)

    @property
    def id(self) -> tuple[int, int]:
        """Its id."""
        return 0, self.number


class CUDAGraph:
    """As torch's: what is given to the streams of a capture, done again by every replay."""

    _all: ClassVar[dict[int, CUDAGraph]] = {}
    """By number those that are being captured."""

    @classmethod
    def of(cls, stream: Any) -> CUDAGraph | None:
        """The graph for which a stream is captured."""
        return cls._all.get(library.pretended_capturing(ctypes.c_int64(stream.stream_id)))

    def __init__(self, keep_graph: bool = False):
        self.number, self._pool, self._calls = 0, (0, 0), dict[int, Callable[[], object]]()
        self.communicators: set[ProcessGroupNCCL] = set()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """What the current stream is given from now on is captured."""
        import torch

        self._pool = pool or torch.cuda.graph_pool_handle()
        stream = torch.accelerator.current_stream()
        if stream.stream_id == 0:
            raise RuntimeError("the default stream cannot be captured")
        others = [_number_of(each) for each in threading.enumerate() if each is not threading.current_thread()]
        self.number = library.pretended_capture_begin(
            ctypes.c_int64(stream.stream_id), ctypes.c_int64(self._pool[1]), *_ids_of(others)
        )
        CUDAGraph._all[self.number] = self

    def capture_end(self) -> None:
        """Raises `RuntimeError` where a stream that took part is not waited for."""
        CUDAGraph._all.pop(self.number, None)
        if wrong := library.pretended_capture_end(ctypes.c_int64(self.number)):
            raise RuntimeError(wrong.decode())

    def replay(self) -> None:
        """Does it again, in the order in which it was given. Raises `RuntimeError` where what it uses is gone."""
        if wrong := library.pretended_replay(ctypes.c_int64(self.number)):
            raise RuntimeError(wrong.decode())
        text = ctypes.create_string_buffer(2000)
        while call := library.pretended_go_on(ctypes.c_int64(self.number), text, ctypes.c_int64(len(text))):
            if call < 0:
                raise RuntimeError(f"a replay fails: {text.value.decode()}")
            self._calls[call]()

    def reset(self) -> None:
        """Lets go of it."""
        library.pretended_forget_graph(ctypes.c_int64(self.number))
        self._calls.clear()
        while self.communicators:
            self.communicators.pop()._captured_by.discard(self)

    def pool(self) -> Any:
        """The handle of its memory."""
        return self._pool

    def call(
        self, stream: Any, name: str, work: Callable[[], object], reads: Sequence[int] = (), writes: Sequence[int] = ()
    ) -> None:
        """Work of Python, done again by a replay at this place; `reads` and `writes` are memories."""
        number = library.pretended_call(
            ctypes.c_int64(self.number),
            ctypes.c_int64(stream.stream_id),
            name.encode(),
            *_ids_of(reads),
            *_ids_of(writes),
        )
        self._calls[number] = work


def _number_of(thread: threading.Thread) -> int:
    """The system's, which one that is just being started does not have yet."""
    while thread.native_id is None:
        time.sleep(0)
    return thread.native_id


def _ids_of(ids: Sequence[int]) -> tuple[Any, Any]:
    """Numbers as the library takes them: an array and its length."""
    return (ctypes.c_int64 * len(ids))(*ids), ctypes.c_int64(len(ids))


class Work:
    """A collective that goes on: to wait for it is a matter of streams, of which the host waits for none. Values are
    there when the call returns, unless peers have not come in `patience_s`: then the host goes on with zeros, as
    NCCL's would at once, so that the log shows what it would have given to streams next."""

    def __init__(self, end: Any, finish: Callable[[], bool], held: Sequence[Any], given_up: Callable[[], None]):
        self._end, self._finish, self._held, self._given_up = end, finish, held, given_up
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; what the call keeps alive is let go of."""
        import torch

        if not self._is_over and not self._finish():
            self._given_up()
        torch.accelerator.current_stream().wait_event(self._end)
        self._is_over, self._held = True, ()  # not before: who waits has the memory back then
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

    _numbers: ClassVar[Iterator[int]] = itertools.count()

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
        self._stream = torch.cuda.Stream(priority=-1 if options.is_high_priority_stream else 0)
        self._captured_by = weakref.WeakSet[CUDAGraph]()
        self._communicator, self._number, self._position = next(self._numbers), 0, rank
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

    mem_allocator = "pretended ncclMemAlloc"

    def rank(self) -> int:
        """Its position."""
        return self._position

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether the device has multicast."""
        return os.environ.get("SHARDPROOF_PRETENDED_MULTICAST") != "none"

    def register_mem_pool(self, pool: MemPool, symm: bool = False) -> None:
        """The log has it."""
        self._note("register", {"pool": pool.number, "symmetric": symm})

    def deregister_mem_pool(self, pool: MemPool) -> None:
        """The log has it."""
        self._note("deregister", {"pool": pool.number})

    def shutdown(self) -> None:
        """The log has it. NCCL's does not return while a graph is there that has captured calls of it
        (`commDestroySync`, of `ncclCommAbort` too)."""
        self._note("shut down", {})
        if num := len(self._captured_by):
            said = f"ends-under-graph: communicator {self.options.group_name!r} has calls in {num} graphs"
            library.pretended_write(b"noticed", ctypes.c_int64(0), said.encode(), b"", b"")
        library.pretended_flush()

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
        stream, said = ctypes.c_int64(self._stream.stream_id), {"communicator": self._communicator, **what}
        library.pretended_write(kind.encode(), stream, json.dumps(said).encode(), b"", b"")

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
        graph = CUDAGraph.of(self._stream)
        call = Call([_Place.of(each) for each in reads], [_Place.of(each) for each in writes], carry, reads is writes)
        call.begin()
        if graph is not None:
            self._captured_by.add(graph)
            graph.communicators.add(self)
            graph.call(self._stream, f"{op} begins", call.begin, [each.memory for each in call.reads])
        end = self._stream.record_event()

        def finish() -> bool:
            came = call.finish()
            if graph is not None:
                # in the stream that waits: what the communicator's was given is over there
                waiting = torch.accelerator.current_stream()
                graph.call(waiting, op, call.finish, (), [each.memory for each in call.writes])
            return came

        number, self._number = self._number, self._number + 1

        def given_up() -> None:
            self._note("given up", {"number": number})
            unfinished.append(self._gloo)
            for target in call.writes:
                target.bytes().zero_()

        return Work(end, finish, (*reads, *writes), given_up)


def _reduction(options: Any) -> str:
    """Its name in torch."""
    import torch.distributed as dist

    return next(name for name in ("SUM", "MAX", "MIN", "AVG") if options.reduceOp == getattr(dist.ReduceOp, name))


class Call:
    """The bytes of a collective on their way over gloo, once or, in a graph, again and again."""

    def __init__(
        self, reads: Sequence[_Place], writes: Sequence[_Place], carry: Callable[[Any, Any], Any], inside: bool
    ):
        self.reads, self.writes, self._carry, self._inside = reads, writes, carry, inside
        self._carried: Any = None
        self._arrived: list[Any] = []

    def begin(self) -> None:
        """What is read leaves."""
        import torch

        sent = [each.bytes().clone().view(each.dtype) for each in self.reads]
        made = [torch.empty(each.num_bytes, dtype=torch.uint8).view(each.dtype) for each in self.writes]
        self._arrived = sent if self._inside else made
        self._carried = self._carry(sent, self._arrived)

    def finish(self) -> bool:
        """What has come is written; whether it has."""
        import torch

        if came := _came(self._carried):
            for target, values in zip(self.writes, self._arrived, strict=True):
                target.bytes().copy_(values.view(torch.uint8))
        self._carried, self._arrived = None, []
        return came


@dataclass(frozen=True)
class _Place:
    """Where a contiguous tensor lies on pretended CUDA."""

    address: int
    num_bytes: int
    dtype: Any
    memory: int

    @classmethod
    def of(cls, tensor: Any) -> _Place:
        assert tensor.is_contiguous(), "NCCL takes tensors whose elements lie one after the other"
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.dtype, _memory(tensor))

    def bytes(self) -> Any:
        """Its bytes, where they lie."""
        import torch

        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = (ctypes.c_char * self.num_bytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _ids(tensors: Sequence[Any]) -> bytes:
    return ",".join(str(_memory(each)) for each in tensors).encode()


def _memory(tensor: Any) -> int:
    return int(library.pretended_memory(ctypes.c_void_p(tensor.untyped_storage().data_ptr())))
