"""Groups and channels over torch's process groups: gloo on CPUs, NCCL on GPUs.

The process groups are constructed directly over a store; nothing but `open_default_group` touches torch's default
group. Every group and every channel has a process group of its own, so message lanes, in threads of their own, share no
gloo or NCCL object with anybody. Only methods of the process-group objects are used, because the functions of
`torch.distributed` were renamed between the versions we run on (2.11, 2.13).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.machine.host import EXCHANGED_BYTES
from ..base.recorder import Recorder
from ..watch.watch import Board
from .base import (
    DEFAULT_TIMEOUT_S,
    Channel,
    Group,
    ReduceOp,
    Shape,
    Transport,
    TransportError,
    contiguous_copy,
    joined,
    num_elements,
)
from .exchanged import exchanged_all_reduce, folded
from .given import GivenGroups
from .interfaces import gloo_interfaces
from .nccl_options import plan_axis, set_options
from .registered import RegisteredRooms, Rooms, registrations

Backend = Literal["gloo", "nccl"]

MESSAGES = "pp"
"""What the axis of channels is called among those of groups."""

DEVICE_TYPES: dict[str, str] = {"gloo": "cpu", "nccl": "cuda"}
"""Which kind of device each library moves."""


class ProcessGroupTransport(Transport):
    """One process's way to the others: process groups over `store`, which all ranks share.

    A store may serve several transports one after the other, if all ranks make them in one order: each has its own part
    of the store. gloo listens on the interfaces that `GLOO_SOCKET_IFNAME` names, else on the address that the name of
    this host has. Raises `ValueError` when `backend` cannot move tensors of `device`.
    """

    def __init__(
        self,
        store: dist.Store,
        global_rank: int,
        world_size: int,
        *,
        backend: Backend = "gloo",
        device: str | torch.device = "cpu",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        recorder: Recorder | None = None,
        board: Board | None = None,
    ):
        device = torch.device(device)
        if DEVICE_TYPES.get(backend) != device.type:
            raise ValueError(
                f"backend {backend!r} does not move tensors of {device}; gloo moves cpu, nccl moves cuda tensors."
            )
        super().__init__(global_rank, world_size, device, recorder, board)
        self.backend = backend
        self.is_work_of_streams = backend == "nccl"
        self._store = own_part(store, world_size)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._has_default_group = False
        # Groups inside the user's default group, which outlives us.
        self._torch_groups: list[Any] = []
        self._parent: Any = None
        self._rooms: RegisteredRooms | None = None
        self.given: GivenGroups | None = None
        """The groups that the user brings."""

    def connect(self, name: str, axis: str, ranks: Sequence[int]) -> Any:
        """A torch process group of the members `ranks`, in that order. Returns when all of them have come."""
        store, rank = dist.PrefixStore(name, self._store), ranks.index(self.global_rank)
        with _named(f"rank {self.global_rank}, connecting {name!r}"):
            if self.backend == "nccl":
                return self._nccl(store, name, axis, ranks)
            return self._gloo(store, rank, len(ranks))

    def open_default_group(self) -> None:
        """Torch's default process group of all ranks, for those parts of torch that know no other: that which the user
        has made, or a new one, which closing the transport ends.

        All ranks call it together. Raises `TransportError` where the user's joins others, or is for another device.
        """
        if dist.is_initialized():
            self._check_default_group()
            return
        with _named(f"rank {self.global_rank}, connecting torch's default group"):
            store = dist.PrefixStore("default", self._store)
            dist.init_process_group(
                self.backend, store=store, rank=self.global_rank, world_size=self.world_size, timeout=self._timeout
            )
        self._has_default_group = True

    def _check_default_group(self) -> None:
        """Whether the user's default group can be used."""
        found, wanted = (dist.get_rank(), dist.get_world_size()), (self.global_rank, self.world_size)
        if found != wanted:
            raise TransportError(
                f"{self}: torch's default process group makes this process rank {found[0]} of {found[1]}, but the plan "
                f"rank {wanted[0]} of {wanted[1]}. Call init_process_group with the plan's ranks, or leave it to us."
            )
        config = dist.get_backend_config()
        if f"{self.device.type}:" not in config:
            raise TransportError(
                f"{self}: torch's default process group ({config}) moves no tensors of {self.device}. Call "
                f'init_process_group("{self.backend}"), or leave it to us.'
            )

    def torch_groups(self, members: Sequence[Sequence[int]]) -> list[Any]:
        """Torch's own groups of ranks inside its default group, which closing the transport ends. All ranks call it
        together, after `open_default_group`."""
        made = [dist.new_group(list(ranks)) for ranks in members]
        if not self._has_default_group:
            self._torch_groups += made
        return made

    def rooms_of(self, group: Group) -> Rooms | None:
        """The rooms of a group whose buffers are to be registered, which are none yet."""
        if self.backend != "nccl" or group.size == 1 or plan_axis(group.axis) not in self.communicators.registered:
            return None
        if self._rooms is None:
            self._rooms = RegisteredRooms(self.device, self.communicators.symmetric)
        if group.is_brought:
            self._rooms.reasons[group.name] = "it is the user's communicator"
            return None
        return self._rooms.of(group.name)

    def register_rooms(self) -> None:
        if self._rooms is not None:
            groups = [group for group in self.opened if isinstance(group, ProcessGroup)]
            members = {group.name: group.ranks for group in groups}
            self._rooms.open(registrations(groups), members, self._store)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.backend != "nccl":
            return super().notes
        return () if self._rooms is None else tuple(f"{self}: {note}" for note in self._rooms.notes)

    def close(self) -> None:
        self.let_go()
        if self._rooms is not None:
            self._rooms.close()
        super().close()
        parent, self._parent = self._parent, None
        _shut_down(parent)
        while self._torch_groups:
            dist.destroy_process_group(self._torch_groups.pop())
        if self._has_default_group:
            self._has_default_group = False
            dist.destroy_process_group()

    def leave(self) -> None:
        """Returns when all ranks have called it: a rank that closes its sockets early would reset
        messages still under way."""
        with _named(f"rank {self.global_rank}, leaving the world of {self.world_size} ranks"):
            if self._store.add("left", 1) == self.world_size:
                self._store.set("all-left", "1")
            self._store.wait(["all-left"], self._timeout)

    def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group:
        return ProcessGroup(self, name, axis, ranks)

    def _brought(self, name: str, axis: str, ranks: Sequence[int]) -> Group | None:
        if self.given is None or name != f"{axis}/{ranks[0]}":
            return None
        process_group = self.given.of(axis, ranks, self.device)
        return None if process_group is None else ProcessGroup(self, name, axis, ranks, process_group)

    def _channel(self, name: str, source: int, destination: int) -> Channel:
        return ProcessGroupChannel(self, name, source, destination)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.leave()
        self.close()

    def _whole(self) -> Any:
        """The communicator of all ranks, which others are split from: opened with the first of them."""
        if self._parent is None:
            everyone = range(self.world_size)
            self._parent = self._nccl(dist.PrefixStore("whole", self._store), "whole", "world", everyone)
        return self._parent

    def _gloo(self, store: dist.Store, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # which torch's types leave out
        options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in gloo_interfaces()]
        options._devices = options._devices or [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = self._timeout
        # one call at a time runs on a group, so one worker thread is enough; it also connects
        # several times faster than two
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: dist.Store, name: str, axis: str, ranks: Sequence[int]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        # what torch's flight recorder and NCCL's messages call it
        options.group_name = name  # type: ignore[assignment]  # torch 2.13 has a name for such texts, 2.11 none
        options.global_ranks_in_group = list(ranks)
        set_options(options, self.communicators, axis)
        torch.cuda.set_device(self.device)
        if self.communicators.split and name in self._by_all:
            # groups of an axis share no rank, so the first member distinguishes them
            options.split_from, options.split_color = self._whole(), ranks[0]
        process_group = dist.ProcessGroupNCCL(store, ranks.index(self.global_rank), len(ranks), options)
        process_group.eager_connect_single_device(self.device)
        return process_group


class ProcessGroup(Group):
    """A group over one torch process group (none for a single member): a new one, or one that the user brings."""

    def __init__(
        self, transport: ProcessGroupTransport, name: str, axis: str, ranks: Sequence[int], brought: Any = None
    ):
        super().__init__(name, axis, ranks, transport.global_rank, transport.recorder)
        self._device = transport.device
        self.is_brought = brought is not None
        self._process_group = brought
        if self.size > 1 and not self.is_brought:
            self._process_group = transport.connect(name, axis, self.ranks)
        self._rooms = transport.rooms_of(self)

    @property
    def process_group(self) -> Any:
        """Torch's own."""
        return self._process_group

    def want_room(self, sent_bytes: int, received_bytes: int) -> None:
        if self._rooms is not None:
            self._rooms.want(sent_bytes, received_bytes)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        num_bytes = num_elements(shape) * like.element_size()
        memory = None if self._rooms is None else self._rooms.to_send(num_bytes)
        return super().room(like, *shape) if memory is None else memory.view(like.dtype).view(shape)

    def _to_receive(self, num_bytes: int, given: Tensor) -> Tensor:
        """Bytes for what comes back: a room where what is sent lies in one."""
        memory = None if self._rooms is None else self._rooms.to_receive(num_bytes, given)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device) if memory is None else memory

    def _is_room(self, tensor: Tensor) -> bool:
        return self._rooms is not None and self._rooms.to_receive(0, tensor) is not None

    def _all_to_all(self, parts: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        dtype = parts[0].dtype
        outgoing = [_bytes(part) for part in parts]
        counts = [num_elements(shape) * dtype.itemsize for shape in shapes]
        sent = joined(outgoing)
        received = self._to_receive(sum(counts), sent)
        with _named(f"{self}: all_to_all"):
            self._process_group.alltoall_base(received, sent, counts, [part.numel() for part in outgoing]).wait()
        return [part.view(dtype).reshape(shape) for part, shape in zip(received.split(counts), shapes, strict=True)]

    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]:
        if self._device.type == "cpu" or len(set(shapes)) > 1:
            # gloo's all-gather takes 13 ms for 4 KiB over 8 ranks (4 ms over 4), its all-to-all of the same bytes 5 ms
            # (1 ms): measured with torch 2.13 on 2 cores. NCCL has no all-gather of uneven shapes.
            return self._all_to_all([tensor] * self.size, shapes)
        if not tensor.numel():  # of all members: rows of no bytes begin where no element could
            return [tensor.new_empty(shape) for shape in shapes]
        mine = _bytes(tensor)
        received = self._to_receive(self.size * mine.numel(), mine).view(self.size, -1)
        with _named(f"{self}: all_gather"):
            self._process_group._allgather_base(received, mine).wait()
        return [row.view(tensor.dtype).reshape(tensor.shape) for row in received.unbind()]

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, used_up: bool) -> Tensor:
        if self._is_exchanged(tensor.nbytes):
            return exchanged_all_reduce(tensor, op, self.size, self._all_to_all, self._all_gather)
        result = tensor if used_up and tensor.is_contiguous() else contiguous_copy(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        with _named(f"{self}: all_reduce {op}"):
            self._process_group.allreduce([result], options).wait()
        return contiguous_copy(result) if self._is_room(result) else result

    def _is_exchanged(self, payload_bytes: int) -> bool:
        return self._device.type == "cpu" and 0 < payload_bytes <= EXCHANGED_BYTES

    def _reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        if self._is_exchanged(sum(part.nbytes for part in parts)):
            return folded(self._all_to_all(parts, [tuple(parts[0].shape)] * self.size), "sum")
        flat = joined([part.reshape(-1) for part in parts])  # gloo compares the first dimensions
        is_room = self._is_room(flat)  # where the own part is summed where it lies
        result = flat.view(self.size, -1)[self.rank] if is_room else flat.new_empty(parts[0].numel())
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        with _named(f"{self}: reduce_scatter"):
            self._process_group._reduce_scatter_base(result, flat, options).wait()
        return (contiguous_copy(result) if is_room else result).view(parts[0].shape)

    def _barrier(self) -> None:
        if self._device.type == "cuda":
            # NCCL's own barrier picks a device by itself; a reduction of one number on ours, awaited by
            # the host, is the same thing
            self._all_reduce(torch.zeros(1, device=self._device), "sum", True)
            torch.cuda.current_stream(self._device).synchronize()
        else:
            with _named(f"{self}: barrier"):
                self._process_group.barrier().wait()

    def _end(self) -> None:
        self._rooms = None
        process_group, self._process_group = self._process_group, None
        if not self.is_brought:
            _shut_down(process_group)


class ProcessGroupChannel(Channel):
    """A channel over a process group of two: position 0 sends, position 1 receives."""

    def __init__(self, transport: ProcessGroupTransport, name: str, source: int, destination: int):
        super().__init__(name, source, destination, transport.global_rank)
        self._device = transport.device
        # NCCL only puts the message in a stream. A stream of its own keeps the wait for a late peer
        # out of the compute stream.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._process_group: Any = transport.connect(name, MESSAGES, (source, destination))

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        self._check_end(self.source, "send")
        data = _bytes(tensor.detach())
        if data.numel() == 0:
            # so that an empty message is a rendezvous too
            data = torch.empty(1, dtype=torch.uint8, device=self._device)
        with _named(f"{self}: send"), self._own_stream():
            if self._stream is not None:
                data.record_stream(self._stream)
            work = self._process_group.send([data], 1, 0)

        def send() -> None:
            self._end_message(work, data, "send")

        return send

    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        self._check_end(self.destination, "receive")
        num_bytes = num_elements(shape) * dtype.itemsize
        with _named(f"{self}: receive"), self._own_stream() as caller:
            data = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._device)
            work = self._process_group.recv([data], 0, 0)
            if caller is not None:
                data.record_stream(caller)

        def receive() -> Tensor:
            self._end_message(work, data, "receive")
            return data[:num_bytes].view(dtype).reshape(shape)

        return receive

    def _end_message(self, work: Any, data: Tensor, call: str) -> None:
        """Waits for a message, whose `data` the library reads or writes until then: on a GPU the current stream does,
        so that whoever is given what was received, or uses again what was sent, comes after it."""
        with _named(f"{self}: {call}"):
            if self._stream is None:
                work.wait()
            else:
                with torch.cuda.stream(self._stream):
                    work.wait()
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Runs the body in the channel's stream after what the caller has queued. Does nothing on CPUs."""
        if self._stream is None:
            yield None
            return
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield caller

    def _end(self) -> None:
        process_group, self._process_group = self._process_group, None
        _shut_down(process_group)


def own_part(store: dist.Store, world_size: int) -> dist.Store:
    """The part of a store that no transport before has left its addresses in: ranks come, all of them to one
    before any to the next."""
    number = (store.add("shardproof/came", 1) - 1) // world_size
    return dist.PrefixStore(f"shardproof/{number}", store)


def _shut_down(process_group: Any) -> None:
    """Ends what NCCL would keep; gloo's connections and threads go with the last reference."""
    if process_group is not None and process_group.name() == "nccl":
        process_group.shutdown()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns what torch raises into a `TransportError` that says who was doing what."""
    try:
        yield
    except TransportError:
        raise
    except RuntimeError as error:  # DistBackendError and DistStoreError are RuntimeErrors
        raise TransportError(f"{what} failed: {str(error).splitlines()[0]}") from error


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's elements in order, as a flat tensor of bytes: every dtype is sent so, also those
    a library cannot add."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
