"""What moves tensors between ranks: `Group`, `Channel` and `Transport`, the same for threads, gloo and NCCL.

A transport moves bytes; the order of every sum is the caller's (`all_reduce` and `reduce_scatter` are the
exceptions, and only fast numerics use them). Groups and channels are explicit objects: nothing here is global, so
one process can hold several worlds.

What a caller may rely on, whatever the transport:

- Tensors handed in are read before the call returns and may be changed after it; tensors handed out
  belong to the caller alone.
- Gradients do not flow through: arguments are read as data, results have `requires_grad=False`.
- All members of a group make the same calls in the same order. One group or channel is used by one thread at a time,
  different ones by different threads freely.
- Calls on CUDA tensors are ordered on the calling thread's current stream, as torch's own operators are.
- A peer that died or did not come in time raises `TransportError`. After that the transport is of no further use.
- Closing a transport ends all its communicators, whoever still has one of its groups or channels: connections, threads
  and memory go then. Calls on them raise `TransportError` afterwards.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from ...core.base.errors import ShardproofError
from ...core.base.reduction import cut
from ...core.plan.communicators import Communicators
from ..base.recorder import Recorder
from ..watch.stop import StopRequest
from ..watch.watch import Board, RankWatch

Shape = tuple[int, ...]
ReduceOp = Literal["sum", "max"]

DEFAULT_TIMEOUT_S = 1800.0
"""How long one call waits for its peers: torch's own default for gloo. Generous, since a gloo group that timed out once
is lost, and since a peer that ended is noticed at once either way."""


class TransportError(ShardproofError, RuntimeError):
    """A peer ended, did not come in time, or came with something else. Names this rank, the group or
    channel, and the call."""


P = ParamSpec("P")
R = TypeVar("R")


def _waited_for(call: Callable[Concatenate[Group, P], R]) -> Callable[Concatenate[Group, P], R]:
    """A call of a group whose seconds its recorder hears of, where it takes them."""

    @functools.wraps(call)
    def timed(group: Group, /, *args: P.args, **kwargs: P.kwargs) -> R:  # no `self`: reports name who called
        waits = group.recorder.waits
        if waits is None:
            return call(group, *args, **kwargs)
        begun_s = perf_counter()
        try:
            return call(group, *args, **kwargs)
        finally:
            waits.add(group.recorder.scope[0], perf_counter() - begun_s)

    return timed


class Group(ABC):
    """One communicator over an axis.

    `ranks` are the global ranks of the members in order, `rank` is this rank's position among them, `size`
    their number. A group of one member never communicates and records nothing. `num_calls` counts the
    calls, the one being made too.
    """

    def __init__(self, name: str, axis: str, ranks: Sequence[int], global_rank: int, recorder: Recorder):
        self.name = name
        self.axis = axis
        self.ranks = check_members(name, ranks, global_rank)
        self.rank = self.ranks.index(global_rank)
        self.size = len(self.ranks)
        self.num_calls = 0
        self._global_rank = global_rank
        self._recorder = recorder
        self._is_open = True
        self.is_brought = False
        """Whether it is a group of the user's."""

    @property
    def recorder(self) -> Recorder:
        """What this group reports its calls to."""
        return self._recorder

    @_waited_for
    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """The tensors that the members sent here, in member order: `parts[i]` goes to member i, one of shape
        `shapes[i]` comes from it.

        All parts of all members have one dtype. Shapes may differ and may be empty. Raises `ValueError` for a
        wrong count or mixed dtypes.
        """
        parts = [part.detach() for part in parts]
        self._check("all_to_all", len(parts), len(shapes))
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise ValueError(
                f"{self}: all_to_all moves one dtype at a time, not {', '.join(sorted(map(str, dtypes)))}."
            )
        if tuple(parts[self.rank].shape) != tuple(shapes[self.rank]):
            raise ValueError(
                f"{self}: the own part has shape {tuple(parts[self.rank].shape)}, but "
                f"{tuple(shapes[self.rank])} is expected."
            )
        if self.size == 1:
            return [contiguous_copy(parts[0])]
        sent_bytes = sum(part.nbytes for i, part in enumerate(parts) if i != self.rank)
        self._begin_call()
        self._recorder.collective("all_to_all", self.axis, self.size, sent_bytes)
        return self._all_to_all(parts, [tuple(shape) for shape in shapes])

    @_waited_for
    def tree_sum(self, parts: Sequence[Tensor], rows: Sequence[int], merges: Sequence[int]) -> Tensor:
        """The sum, in one order, of all rows that the members have for this one; for exact numerics.

        `parts[i]`, [rows of this member, ...], goes to member i, whose part here has `rows[i]` rows. All rows, in the
        order of the members, are laid on a stack; after row k its two last values are added, left plus right,
        `merges[k]` times (`core.base.reduction.merges_of`). One value is left. The own part is used up. Recorded as
        the all-to-all that it is.
        """
        parts = [part.detach() for part in parts]
        self._check("tree_sum", len(parts), len(rows))
        own = parts[self.rank]
        if self.size == 1:
            return stack_sum(own, merges)
        self._begin_call()
        sent_bytes = sum(part.nbytes for i, part in enumerate(parts) if i != self.rank)
        self._recorder.collective("all_to_all", self.axis, self.size, sent_bytes)
        return self._tree_sum(parts, list(rows), list(merges))

    @_waited_for
    def tree_all_reduce(self, values: Tensor, rows: Sequence[int], merges: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The sum [count] that `tree_sum` makes of all rows of all members' `values` [rows of this member, count],
        rounded to `dtype`, on every member.

        Each adds up an even part of the elements, then all take all parts. Recorded as this all-to-all and all-gather,
        also where a transport needs one call. `values` are used up.
        """
        values = values.detach()
        self._check("tree_all_reduce", len(rows))
        if self.size == 1:
            return stack_sum(values, merges).to(dtype)
        self._begin_call()
        lo, hi = cut(values.shape[1], self.size, self.rank)
        sent_bytes = len(values) * (values.shape[1] - (hi - lo)) * values.element_size()
        self._recorder.collective("all_to_all", self.axis, self.size, sent_bytes)
        self._recorder.collective("all_gather", self.axis, self.size, (hi - lo) * dtype.itemsize * (self.size - 1))
        return self._tree_all_reduce(values, list(rows), list(merges), dtype)

    def _tree_all_reduce(self, values: Tensor, rows: list[int], merges: list[int], dtype: torch.dtype) -> Tensor:
        """`tree_all_reduce` of two members or more."""
        bounds = [cut(values.shape[1], self.size, member) for member in range(self.size)]
        own = self._tree_sum([values[:, lo:hi] for lo, hi in bounds], rows, merges).to(dtype)
        return joined(self._all_gather(own, [(hi - lo,) for lo, hi in bounds]))

    def _tree_sum(self, parts: list[Tensor], rows: list[int], merges: list[int]) -> Tensor:
        """`tree_sum` of two members or more."""
        shape = tuple(parts[self.rank].shape[1:])
        arrived = self._all_to_all(parts, [(count, *shape) for count in rows])
        return stack_sum([row for part in arrived for row in part], merges)

    @_waited_for
    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        """Every member's tensor, in member order. `shapes` says what each member brings; without it all
        bring the shape of `tensor`.

        Raises `ValueError` for a wrong count, or when `shapes` contradicts the tensor handed in.
        """
        tensor = tensor.detach()
        own = tuple(tensor.shape)
        shapes = [own] * self.size if shapes is None else [tuple(shape) for shape in shapes]
        self._check("all_gather", len(shapes))
        if shapes[self.rank] != own:
            raise ValueError(f"{self}: all_gather expects {shapes[self.rank]} from this member, but was given {own}.")
        if self.size == 1:
            return [contiguous_copy(tensor)]
        self._begin_call()
        self._recorder.collective("all_gather", self.axis, self.size, tensor.nbytes * (self.size - 1))
        return self._all_gather(tensor, shapes)

    @_waited_for
    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, wide: bool = False, used_up: bool = False) -> Tensor:
        """The sum or maximum over the members, in the order the library chooses: for fast numerics only.

        A `wide` sum is made in fp32, member after member, of elements that are sent in the tensor's own format, and
        rounded once. A tensor that is `used_up` may be written over, and be the result. Recorded as a ring: 2(n-1)/n of
        the payload leaves each rank, rounded up to whole bytes.
        """
        tensor = tensor.detach()
        if self.size == 1:
            return contiguous_copy(tensor)
        self._begin_call()
        self._recorder.collective("all_reduce", self.axis, self.size, ring_all_reduce_bytes(tensor.nbytes, self.size))
        return self._wide_all_reduce(tensor) if wide else self._all_reduce(tensor, op, used_up)

    @_waited_for
    def reduce_scatter(self, parts: Sequence[Tensor], *, wide: bool = False) -> Tensor:
        """The sum over the members of the part that each has for this one, in the order the library
        chooses: for fast numerics only.

        `parts[i]` is added up on member i; all have one shape. `wide` is that of `all_reduce`. Recorded as a ring:
        (n-1)/n of the payload leaves each rank, rounded up, which is what a wide sum sends too.
        """
        parts = [part.detach() for part in parts]
        self._check("reduce_scatter", len(parts))
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise ValueError(
                f"{self}: reduce_scatter adds parts of one shape and dtype, but was given "
                f"{[tuple(p.shape) for p in parts]}."
            )
        if self.size == 1:
            return contiguous_copy(parts[0])
        payload_bytes = sum(part.nbytes for part in parts)
        self._begin_call()
        self._recorder.collective(
            "reduce_scatter", self.axis, self.size, -(-(self.size - 1) * payload_bytes // self.size)
        )
        return self._wide_sum(parts) if wide else self._reduce_scatter(parts)

    def _wide_sum(self, parts: list[Tensor]) -> Tensor:
        """The sum of what all members have for this one, in fp32, rounded once: an all-to-all in place of the library's
        reduce-scatter, which rounds after every addition (Megatron-LM, `reduce_scatter_with_fp32_accumulation.py`)."""
        first, *others = self._all_to_all(parts, [tuple(parts[0].shape)] * self.size)
        total = first.float()
        for other in others:
            total += other.float()
        return total.to(first.dtype)

    def _wide_all_reduce(self, tensor: Tensor) -> Tensor:
        """Every member sums an even part, then all take all parts."""
        flat = tensor.reshape(-1)
        width = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, width * self.size - flat.numel()))
        own = self._wide_sum(list(padded.split(width))) if width else padded
        return torch.cat(self._all_gather(own, [(width,)] * self.size))[: flat.numel()].view(tensor.shape)

    def want_room(self, sent_bytes: int, received_bytes: int) -> None:
        """Says that calls of so many bytes will come, given what `room` gives: before `Transport.register_rooms`."""
        return

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor of the format of `like` to put together what the next call sends: where the communicator has memory
        that it knows beforehand, and enough, in that. It is used up by that call, and what an all-gather or all-to-all
        gives back by the one after it."""
        return like.new_empty(shape)

    def barrier(self) -> None:
        """Returns once every member has called it. Not recorded: it moves no data."""
        if self.size > 1:
            self._begin_call()
            self._barrier()

    def release(self) -> None:
        """Ends the communicator; for the transport that opened it. Calling it again does nothing."""
        self._is_open = False
        self._end()

    def waiting(self) -> AbstractContextManager[None]:
        """The caller waits inside, for a call of this group that another thread makes for it."""
        return nullcontext()

    def __str__(self) -> str:
        return f"rank {self._global_rank}, group {self.name!r} over ranks {_few(self.ranks)}"

    def _begin_call(self) -> None:
        if not self._is_open:
            raise TransportError(f"{self}: the transport was closed, and this group with it.")
        self.num_calls += 1

    def _check(self, op: str, *counts: int) -> None:
        if any(count != self.size for count in counts):
            raise ValueError(
                f"{self}: {op} needs one entry per member ({self.size}), but was given "
                f"{' and '.join(map(str, counts))}."
            )

    @abstractmethod
    def _all_to_all(self, parts: list[Tensor], shapes: list[Shape]) -> list[Tensor]: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp, used_up: bool) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, parts: list[Tensor]) -> Tensor: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class SoloGroup(Group):
    """A group of one rank, which belongs to no transport: it never communicates."""

    def __init__(self, axis: str, global_rank: int, recorder: Recorder):
        super().__init__(f"{axis}/{global_rank}", axis, (global_rank,), global_rank, recorder)

    def _all_to_all(self, parts: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        raise AssertionError("one rank sends nothing")

    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]:
        raise AssertionError("one rank sends nothing")

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, used_up: bool) -> Tensor:
        raise AssertionError("one rank sends nothing")

    def _reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        raise AssertionError("one rank sends nothing")

    def _barrier(self) -> None:
        raise AssertionError("one rank waits for nobody")

    def _end(self) -> None:
        """Nothing to let go of."""


class Channel(ABC):
    """One direction between two ranks: a communicator of its own, FIFO, blocking rendezvous.

    A send returns when its receive has taken the tensor, also where the library would buffer: what runs here runs under
    any transport. The caller records messages, because only it knows which action they belong to.
    """

    def __init__(self, name: str, source: int, destination: int, global_rank: int):
        check_ends(name, source, destination, global_rank)
        self.name = name
        self.source = source
        self.destination = destination
        self._global_rank = global_rank
        self._is_open = True

    def send(self, tensor: Tensor) -> None:
        """Gives `tensor` to the destination; returns when it has been received. Only the source calls it."""
        self.begin_send(tensor)()

    @abstractmethod
    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """`send` in two parts: begins it, and what comes back ends it. The tensor must stay as it is in between."""

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that leave the source when it sends `tensor`: all of it."""
        return tensor.nbytes

    def receive(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The next tensor of the source. `shape` and `dtype` must be what is sent: gloo ends the
        process where sizes differ."""
        return self.begin_receive(shape, dtype)()

    @abstractmethod
    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        """`receive` in two parts: begins it, and what comes back ends it. Several that have begun end in that order."""

    def release(self) -> None:
        """Ends the communicator; for the transport that opened it. Calling it again does nothing."""
        self._is_open = False
        self._end()

    def __str__(self) -> str:
        return f"rank {self._global_rank}, channel {self.name!r} from rank {self.source} to rank {self.destination}"

    def _check_end(self, expected: int, call: str) -> None:
        if self._global_rank != expected:
            raise ValueError(f"{self}: only rank {expected} may {call}.")
        if not self._is_open:
            raise TransportError(f"{self}: the transport was closed, and this channel with it.")

    @abstractmethod
    def _end(self) -> None: ...


class Transport(ABC):
    """One rank's way to all others. A context manager: leaving it closes everything it opened.

    `group` and `channel` are called by members only, eagerly, by all ranks in one agreed order; each name is used once.
    """

    def __init__(
        self,
        global_rank: int,
        world_size: int,
        device: torch.device,
        recorder: Recorder | None = None,
        board: Board | None = None,
    ):
        """`board` is where this rank shows what it is doing."""
        if not 0 <= global_rank < world_size:
            raise ValueError(f"global rank {global_rank} is outside the world of {world_size} ranks.")
        self.global_rank = global_rank
        self.world_size = world_size
        self.device = device
        self.recorder = recorder or Recorder()
        self.watch = RankWatch(global_rank, board)
        self.stop = StopRequest()
        """Where it is seen that this rank was asked to stop."""
        self.is_work_of_streams = False
        """Whether every call is work of a GPU's streams alone, as a captured step needs it: the host has no part."""
        self.communicators = Communicators()
        """How NCCL opens what is opened from now on."""
        self.before_end: list[Callable[[], None]] = []
        """What is called, the last one first, before communicators end. NCCL does not end one while a graph is there
        that has captured its calls: who captures lets go of its graphs here."""
        self._opened: dict[str, Group | Channel] = {}
        self._by_all: set[str] = set()

    def group(self, name: str, axis: str, ranks: Sequence[int], *, by_all: bool = False) -> Group:
        """A new communicator over `ranks`, in that order. `axis` is what the recorder calls it. `by_all` says that all
        ranks make this call together, each for a group of as many ranks: one split of all makes all of them."""
        self._check_name(name, ranks)
        if by_all:
            self._by_all.add(name)
        opened = self._opened[name] = self._brought(name, axis, ranks) or self._group(name, axis, ranks)
        return opened

    @property
    def everyone(self) -> Group:
        """The communicator of all ranks, for what they agree on outside of steps: opened when it is first asked for,
        which all ranks do together."""
        found = self._opened.get("world") or self.group("world", "world", range(self.world_size))
        assert isinstance(found, Group)
        return found

    def channel(self, name: str, source: int, destination: int) -> Channel:
        """A new communicator for one direction between two ranks."""
        self._check_name(name, (source, destination))
        opened = self._opened[name] = self._channel(name, source, destination)
        return opened

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what this rank opened otherwise than asked."""
        if not self.communicators.registered:
            return ()
        return (f"{self}: no buffers are registered: only NCCL does that, and this is another transport.",)

    def register_rooms(self) -> None:
        """Makes what groups have asked for by `want_room`. All ranks call it together, once."""
        return

    @property
    def opened(self) -> tuple[Group | Channel, ...]:
        """The groups and channels of this rank, in the order they were opened."""
        return tuple(self._opened.values())

    def close(self) -> None:
        """Ends all groups and channels, the last one first. Calling it again does nothing."""
        self.let_go()
        for opened in reversed(self.opened):
            opened.release()

    def let_go(self) -> None:
        """Calls what `before_end` has, once."""
        while self.before_end:
            self.before_end.pop()()

    def _brought(self, name: str, axis: str, ranks: Sequence[int]) -> Group | None:
        """A group that the user brings, in place of a new one."""
        return None

    @abstractmethod
    def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group: ...

    @abstractmethod
    def _channel(self, name: str, source: int, destination: int) -> Channel: ...

    def __str__(self) -> str:
        return f"rank {self.global_rank} of {self.world_size}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_name(self, name: str, ranks: Sequence[int]) -> None:
        """Raises `ValueError` for a name used before or a rank outside the world."""
        if name in self._opened:
            raise ValueError(
                f"rank {self.global_rank} has opened {name!r} before; every group and channel needs a name of its own."
            )
        outside = [rank for rank in ranks if not 0 <= rank < self.world_size]
        if outside:
            raise ValueError(f"{name!r} names ranks {outside}, which are outside the world of {self.world_size} ranks.")


def check_members(name: str, ranks: Sequence[int], global_rank: int) -> tuple[int, ...]:
    """`ranks` as a tuple. Raises `ValueError` for repeated ranks or when `global_rank` is not among them."""
    members = tuple(ranks)
    if len(set(members)) != len(members):
        raise ValueError(f"group {name!r} names a rank twice: {_few(members)}.")
    if global_rank not in members:
        raise ValueError(
            f"rank {global_rank} is not a member of group {name!r} over ranks {_few(members)}; only "
            "members open a group."
        )
    return members


def check_ends(name: str, source: int, destination: int, global_rank: int) -> None:
    """Raises `ValueError` where a channel goes from a rank to itself, or this rank is neither of its ends."""
    if source == destination or global_rank not in (source, destination):
        raise ValueError(
            f"channel {name!r} from rank {source} to rank {destination} cannot be opened on rank {global_rank}."
        )


def stack_sum(rows: Iterable[Tensor], merges: Sequence[int]) -> Tensor:
    """What `Group.tree_sum` says of rows that are all here; they are used up."""
    held: list[Tensor] = []
    for row, count in zip(rows, merges, strict=True):
        held.append(row)
        for _ in range(count):
            right = held.pop()
            held[-1].add_(right)
    (total,) = held
    return total


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors one after the other: without a copy where they lie so already."""
    first, place = vectors[0], vectors[0].data_ptr()
    for vector in vectors:
        if vector.data_ptr() != place or vector.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(vectors))
        place += vector.nbytes
    return first.as_strided((sum(len(vector) for vector in vectors),), (1,))


def ring_all_reduce_bytes(payload_bytes: int, size: int) -> int:
    """Bytes that leave each rank in a ring all-reduce: 2(n-1)/n of the payload (reduce-scatter, then
    all-gather), rounded up."""
    return -(-2 * (size - 1) * payload_bytes // size)


def num_elements(shape: Shape) -> int:
    """Elements of a tensor of `shape`; 1 for a scalar."""
    return math.prod(shape)


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy that shares nothing with `tensor`."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _few(ranks: Sequence[int]) -> str:
    """Ranks for a message: all of up to eight, otherwise the ends."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ... {ranks[-1]} ({len(ranks)} members)"
