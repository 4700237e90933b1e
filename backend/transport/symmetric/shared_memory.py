"""Groups and channels through shared memory, and the transport that opens them for ranks of one host."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.base.errors import named
from ....core.base.reduction import cut
from ...base.recorder import Recorder
from ...watch.watch import Board
from ..base import (
    DEFAULT_TIMEOUT_S,
    Channel,
    Group,
    ReduceOp,
    Shape,
    TransportError,
    check_ends,
    check_members,
    num_elements,
)
from ..exchanged import exchanged_all_reduce, folded
from ..process_group import ProcessGroupTransport
from .heap import Mapped, Region
from .membership import Meetings, Membership, compiled

SLOT_BYTES = 1 << 19
"""Of the slots that a member of two has for the other; those of more members are as much smaller."""

BOARD_BYTES = 1 << 19
"""Of the slots that a member has for what it gives to all."""

ONE_SHOT_BYTES = 1 << 16
ONE_SHOT_OF_TWO_BYTES = 1 << 21
"""Up to so many bytes of all members together every member adds up all of a sum: one exchange in place of two. Two
members read as much as in two exchanges; above it they read and write memory a third less where each adds a half."""

PULLED_BYTES = 1 << 17
"""Messages from so many bytes on are copied once, out of the sender's own memory, where the system lets the receiver
read it: 1.4 to 1.8 times less work than two copies through a buffer (docs/measurements.md)."""

LEAST_SLOT_BYTES = 64
MOST_BEGUN = 64
"""Messages of a channel that have begun and not ended."""

NOTE = struct.Struct("<QQQ")
"""What a channel says of a message: where its buffer begins in the sender's heap, the buffer's bytes, and the
message's. A message that is pulled has no buffer: it says where it lies, and 0."""

LEAST_BUFFER_BYTES = 1 << 16


class SharedMemoryTransport(ProcessGroupTransport):
    """A process's way to the ranks of its host through shared memory, and to all others over gloo.

    The members of a group agree on it when it is opened. `reasons` says of those that go over gloo why they do.
    """

    def __init__(
        self,
        store: dist.Store,
        global_rank: int,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        recorder: Recorder | None = None,
        board: Board | None = None,
    ):
        super().__init__(store, global_rank, world_size, timeout_s=timeout_s, recorder=recorder, board=board)
        self.reasons: dict[str, str] = {}
        self._meetings = Meetings(self._store, global_rank, timeout_s)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why what this rank opened goes over gloo, a sentence for each reason."""
        names: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            names.setdefault(reason, []).append(name)
        over_gloo = (f"{self}: {named(found)} over gloo, not shared memory: {why}." for why, found in names.items())
        return (*over_gloo, *super().notes)

    def close(self) -> None:
        super().close()
        self._meetings.close()

    def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group:
        members = check_members(name, ranks, self.global_rank)
        if len(members) == 1:
            return super()._group(name, axis, members)
        slot_bytes = max(2 * SLOT_BYTES // len(members) // 64 * 64, LEAST_SLOT_BYTES)
        joined = self._meetings.join(name, members, slot_bytes, BOARD_BYTES)
        if isinstance(joined, Membership):
            return SharedMemoryGroup(name, axis, joined, self.recorder)
        self.reasons[name] = joined
        return super()._group(name, axis, members)

    def _channel(self, name: str, source: int, destination: int) -> Channel:
        check_ends(name, source, destination, self.global_rank)
        notes_bytes = -(-MOST_BEGUN * NOTE.size // 64) * 64
        joined = self._meetings.join(name, (source, destination), LEAST_SLOT_BYTES, notes_bytes)
        if isinstance(joined, Membership):
            return SharedMemoryChannel(name, source, destination, joined)
        self.reasons[name] = joined
        return super()._channel(name, source, destination)


class SharedMemoryGroup(Group):
    """A group whose members map each other's memory."""

    def __init__(self, name: str, axis: str, members: Membership, recorder: Recorder):
        super().__init__(name, axis, members.ranks, members.ranks[members.rank], recorder)
        self._members = members

    def _all_to_all(self, parts: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        parts = [part.contiguous() for part in parts]
        received, targets, counts = _room(shapes, parts[0].dtype)
        sources, sent = tuple(part.data_ptr() for part in parts), tuple(part.nbytes for part in parts)
        end = compiled.exchange(self._members.handle, sources, sent, targets, counts, self._members.timeout_s)
        self._members.check(end, f"{self}: all_to_all")
        return received

    def _tree_all_reduce(self, values: Tensor, rows: list[int], merges: list[int], dtype: torch.dtype) -> Tensor:
        num_bytes = sum(rows) * values.shape[1] * values.element_size()
        if num_bytes <= (ONE_SHOT_OF_TWO_BYTES if self.size == 2 else ONE_SHOT_BYTES):
            return self._tree_sum([values] * self.size, rows, merges).to(dtype)
        if dtype != torch.float32 or not _is_added_here(values, rows):
            return super()._tree_all_reduce(values, rows, merges, dtype)
        bounds = [cut(values.shape[1], self.size, member) for member in range(self.size)]
        total = torch.empty(values.shape[1:], dtype=torch.float32)
        self._add([values[:, lo:hi] for lo, hi in bounds], rows, merges, total, is_shared=True)
        return total

    def _tree_sum(self, parts: list[Tensor], rows: list[int], merges: list[int]) -> Tensor:
        if not _is_added_here(parts[0], rows):
            return super()._tree_sum(parts, rows, merges)
        total = torch.empty(parts[self.rank].shape[1:], dtype=torch.float32)
        self._add(parts, rows, merges, total, is_shared=False)
        return total

    def _add(self, parts: list[Tensor], rows: list[int], merges: list[int], total: Tensor, *, is_shared: bool) -> None:
        """Puts the sum of what all members have for this one into `total`; or, if it `is_shared`, the sums of all
        members one after the other, each of which is passed on as it is made."""
        parts = [part if _has_whole_rows(part) else part.contiguous() for part in parts]
        end = compiled.tree_sum(
            self._members.handle,
            tuple(part.data_ptr() for part in parts),
            tuple(part.stride(0) for part in parts),
            tuple(num_elements(tuple(part.shape[1:])) for part in parts),
            tuple(rows),
            tuple(merges),
            total.data_ptr(),
            is_shared,
            self._members.timeout_s,
        )
        self._members.check(end, f"{self}: tree_sum")

    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]:
        tensor = tensor.contiguous()
        received, targets, counts = _room(shapes, tensor.dtype)
        end = compiled.gather(self._members.handle, tensor.data_ptr(), targets, counts, self._members.timeout_s)
        self._members.check(end, f"{self}: all_gather")
        return received

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, used_up: bool) -> Tensor:
        if op == "sum" and tensor.dtype == torch.float32:
            in_turn = [0] + [1] * (self.size - 1)
            total = self._tree_all_reduce(tensor.reshape(1, -1), [1] * self.size, in_turn, tensor.dtype)
            return total.view(tensor.shape)
        return exchanged_all_reduce(tensor, op, self.size, self._all_to_all, self._all_gather)

    def _reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        return folded(self._all_to_all(parts, [tuple(parts[0].shape)] * self.size), "sum")

    def _barrier(self) -> None:
        self._all_gather(torch.zeros(1, dtype=torch.uint8), [(1,)] * self.size)

    def _end(self) -> None:
        self._members.close()


class SharedMemoryChannel(Channel):
    """A channel through the sender's memory: a message lies whole in a buffer there, or where the sender has it, so
    that no send that has begun waits for anything but its receive, and the board has a note of each."""

    def __init__(self, name: str, source: int, destination: int, members: Membership):
        super().__init__(name, source, destination, members.ranks[members.rank])
        self._members = members
        board = members.mapped[0]  # the sender's, at the end of its region
        self._notes_at = board.num_bytes - MOST_BEGUN * NOTE.size
        self._view = memoryview(board.view).cast("B")
        self._begun = self._ended = 0
        # the sender's: its buffers, each with the last message that lay in it; the receiver's: those it has mapped
        self._buffers: list[tuple[Region, Mapped, int]] = []
        self._mapped: dict[int, Mapped] = {}

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        self._check_end(self.source, "send")
        tensor = tensor.detach().contiguous()
        number = self._begun + 1
        if number > MOST_BEGUN:
            self._wait_taken(number - MOST_BEGUN)
        note = self._notes_at + number % MOST_BEGUN * NOTE.size
        if self.pulls(tensor.nbytes):
            NOTE.pack_into(self._view, note, tensor.data_ptr(), 0, tensor.nbytes)
        else:
            region, mapped = self._buffer(tensor.nbytes, number)
            _tensor_at(mapped, tensor.nbytes).copy_(tensor.reshape(-1).view(torch.uint8))
            NOTE.pack_into(self._view, note, region.offset, region.num_bytes, tensor.nbytes)
        compiled.post(self._members.handle, 1)
        self._begun = number

        def end(held: Tensor = tensor) -> None:  # what is pulled stays in memory until it was
            self._wait_taken(number)

        return end

    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        self._check_end(self.destination, "receive")
        self._begun += 1
        number = self._begun

        def receive() -> Tensor:
            end = compiled.wait_posted(self._members.handle, 0, number, self._members.timeout_s)
            self._members.check(end, f"{self}: receive")
            note = self._notes_at + number % MOST_BEGUN * NOTE.size
            offset, room, num_bytes = NOTE.unpack_from(self._view, note)
            if num_bytes != num_elements(shape) * dtype.itemsize:
                raise TransportError(f"{self}: expects {dtype} {tuple(shape)}, but {num_bytes} bytes were sent.")
            if self.pulls(num_bytes):
                sender = self._members.regions[0].process
                result = torch.empty(shape, dtype=dtype)
                end = compiled.pull(self._members.handle, 0, sender, offset, result.data_ptr(), num_bytes)
                self._members.check(end, f"{self}: receive")
            else:
                result = _tensor_at(self._map(offset, room), num_bytes).clone().view(dtype).reshape(shape)
            compiled.take(self._members.handle, 0)
            return result

        return receive

    def pulls(self, num_bytes: int) -> bool:
        """True where a message of so many bytes is copied once, out of the sender's own memory."""
        return self._members.pulls and num_bytes >= PULLED_BYTES

    def _buffer(self, num_bytes: int, number: int) -> tuple[Region, Mapped]:
        """A buffer whose last message was taken, or a new one."""
        for place, (region, mapped, last) in enumerate(self._buffers):
            if last <= self._ended and region.num_bytes >= num_bytes:
                self._buffers[place] = (region, mapped, number)
                return region, mapped
        try:
            region, mapped = self._members.heap.allocate(max(LEAST_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length()))
        except OSError as error:
            raise TransportError(f"{self}: send failed: no shared memory for {num_bytes:,} bytes: {error}.") from error
        self._buffers.append((region, mapped, number))
        return region, mapped

    def _wait_taken(self, number: int) -> None:
        end = compiled.wait_taken(self._members.handle, 1, number, self._members.timeout_s)
        self._members.check(end, f"{self}: send")
        self._ended = max(self._ended, number)

    def _map(self, offset: int, num_bytes: int) -> Mapped:
        """The sender's buffer."""
        if offset not in self._mapped:
            sender, region = self._members.neighbours[0], self._members.regions[0]
            assert sender is not None
            self._mapped[offset] = sender.map(replace(region, offset=offset, num_bytes=num_bytes))
        return self._mapped[offset]

    def _end(self) -> None:
        self._members.close()


def _room(shapes: Sequence[Shape], dtype: torch.dtype) -> tuple[list[Tensor], tuple[int, ...], tuple[int, ...]]:
    """Tensors to receive into, which lie one after the other, their addresses and bytes."""
    counts = [num_elements(shape) for shape in shapes]
    whole = torch.empty(sum(counts), dtype=dtype)
    tensors = list(whole.split(counts))
    return (
        [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)],
        tuple(tensor.data_ptr() for tensor in tensors),
        tuple(tensor.nbytes for tensor in tensors),
    )


def _is_added_here(values: Tensor, rows: list[int]) -> bool:
    """True where the C code adds such numbers, of so many rows of each member."""
    return values.dtype == torch.float32 and max(rows) <= compiled.MOST_ROWS


def _has_whole_rows(part: Tensor) -> bool:
    """True where each row is one run of numbers, wherever it lies."""
    return not len(part) or part[0].is_contiguous()


def _tensor_at(mapped: Mapped, num_bytes: int) -> Tensor:
    """The first bytes of mapped memory as a tensor."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapped.view, dtype=torch.uint8, count=num_bytes)
