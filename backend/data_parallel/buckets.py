"""`FlatBucket`: parameters of a stage in one contiguous buffer, of which every copy of the stage keeps a part (ZeRO).

See `core.program.buckets` for what lies in a bucket and who keeps which elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...core.model.parameters import Parameter
from ...core.program.buckets import Bucket, owned_interval
from ..base.host_copies import HostCopies
from ..gradients.parameter import Shard, canonical, canonical_slices
from ..transport.base import Group


@dataclass(frozen=True)
class OwnedPiece:
    """A box of a parameter that this rank keeps: its place in the full parameter, its master weights and the run of
    the bucket's elements `[lo, hi)` of this rank's part that it is. `tensor`, gradients (`of`), and `rounded`, which
    master weights in host memory have on the device, have the parameter's orientation."""

    parameter: Parameter
    slices: tuple[slice, ...]
    tensor: Tensor
    run: tuple[int, int]
    shape: tuple[int, ...]
    rounded: Tensor | None = None

    def of(self, part: Tensor) -> Tensor:
        """This box of what a rank's part of the bucket holds, [n]."""
        return canonical(self.parameter, part[slice(*self.run)].view(self.shape))


class FlatBucket:
    """The weights of a bucket one after the other, which `shards` become views of, and the part of
    them that this rank keeps.

    `weights` are what layers compute with. `master`, fp32, is the part that is updated: a view of the weights where
    these are fp32. The fp32 weights of other elements are then given up. With `rests_in_parts` (ZeRO 3) so are the
    weights themselves, but between `gather` and `free`. After `send_master` the master is in host memory, and this
    rank's part of the weights on the device at all times: `rounded`.
    """

    def __init__(
        self, bucket: Bucket, shards: Mapping[str, Shard], group: Group, cp: int, *, rests_in_parts: bool = False
    ):
        """`shards` are those of the stage that are trained, `group` joins the ranks that keep parts of one copy; `cp`
        as in `owned_interval`."""
        self.bucket = bucket
        self.group = group
        self.rests_in_parts = rests_in_parts and group.size > 1
        names = [usage.parameter.name for usage in bucket.usages if usage.parameter.name in shards]
        self.keys = [usage.key for usage in bucket.usages if usage.parameter.name in shards]
        self.shards = [shards[name] for name in names]
        ends = list(accumulate((shard.storage.numel() for shard in self.shards), initial=0))
        self.places = list(pairwise(ends))
        self.owned = [owned_interval(ends[-1], group.size, cp, member) for member in range(group.size)]
        self.own = self.owned[group.rank]
        self.memory: Tensor | None = None
        """Where `gather` brings the weights together; new memory each time where there is none."""

    def __len__(self) -> int:
        return self.places[-1][1] if self.places else 0

    def flatten(self) -> None:
        """Moves the weights into one buffer."""
        lo, hi = self.own
        self.dtype = self.shards[0].operand.dtype
        masters = torch.cat([shard.storage.reshape(-1) for shard in self.shards])
        self.weights = torch.cat([shard.operand.reshape(-1) for shard in self.shards])
        self.master = masters[lo:hi].clone() if self.keeps_masters else self.weights[lo:hi]
        self.device = self.weights.device
        self._rounded: Tensor | None = None
        self._lend()
        self.give_up_masters()
        if self.rests_in_parts:
            self.free()

    def send_master(self, copies: HostCopies) -> None:
        """From now on the master rests in host memory, if layers compute with another format."""
        if self.dtype == torch.float32:
            return
        lo, hi = self.own
        self._rounded = self.master.to(self.dtype) if self.rests_in_parts else self.weights[lo:hi]
        self.master = copies.copied(self.master)

    def round_master(self) -> None:
        """Brings a master in host memory to its part of the weights."""
        if self._rounded is not None:
            self._rounded.copy_(self.master)

    @property
    def updated(self) -> Tensor:
        """What an update leaves on the device of this rank's part, and `share` reads."""
        return self.master if self._rounded is None else self._rounded

    @property
    def keeps_masters(self) -> bool:
        """Whether this rank's fp32 weights are not what layers compute with."""
        return self.rests_in_parts or self.dtype != torch.float32

    @property
    def longest(self) -> int:
        """Elements of the longest part that a rank keeps."""
        return max(last - first for first, last in self.owned)

    def want_rooms(self) -> None:
        """Asks for the memory that weights are gathered in."""
        num_bytes = self.longest * self.dtype.itemsize
        self.group.want_room(num_bytes, self.group.size * num_bytes)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of weights that are there between `gather` and `free` only."""
        return self.weights.nbytes if self.rests_in_parts else 0

    def _lend(self) -> None:
        """Layers compute with `weights`."""
        for shard, (first, last) in zip(self.shards, self.places, strict=True):
            shard.operand.data = self.weights[first:last].view(shard.operand.shape)

    def restore_masters(self) -> None:
        """Brings the fp32 weights of all copies together in `Shard.storage`, to be saved: one all-gather."""
        if not self.keeps_masters:
            return
        parts = self.group.all_gather(self.master.to(self.device), [(hi - lo,) for lo, hi in self.owned])
        whole = torch.cat(
            [parts[member] for member in sorted(range(len(parts)), key=lambda member: self.owned[member])]
        )
        for shard, (first, last) in zip(self.shards, self.places, strict=True):
            shard.storage.data = whole[first:last].view(shard.storage.shape)

    def give_up_masters(self) -> None:
        """Lets go of what `restore_masters` brings."""
        if self.keeps_masters:
            for shard in self.shards:
                shard.storage.data = _nothing(self.master.dtype, shard.storage)

    def gather(self) -> None:
        """Brings the weights of all copies together, where they rest in parts: one all-gather
        of parts of one length."""
        if self.rests_in_parts:
            self.weights = (
                torch.empty(len(self), dtype=self.dtype, device=self.device) if self.memory is None else self.memory
            )
            self._bring()
            self._lend()

    def free(self) -> None:
        """Lets go of what `gather` brings."""
        if self.rests_in_parts:
            self.weights = torch.empty(0, dtype=self.dtype, device=self.device)
            for shard in self.shards:
                shard.operand.data = _nothing(self.dtype, shard.operand)

    def pieces(self) -> Iterator[OwnedPiece]:
        """What this rank keeps, parameter by parameter in boxes."""
        lo, hi = self.own
        for shard, (first, last) in zip(self.shards, self.places, strict=True):
            if max(lo, first) >= min(hi, last):
                continue
            run_start = max(lo, first)
            for box in boxes(tuple(shard.storage.shape), run_start - first, min(hi, last) - first):
                shape = tuple(each.stop - each.start for each in box)
                run = run_start - lo, run_start - lo + torch.Size(shape).numel()
                run_start += torch.Size(shape).numel()
                tensor, rounded = (
                    None if part is None else canonical(shard.parameter, part[slice(*run)].view(shape))
                    for part in (self.master, self._rounded)
                )
                assert tensor is not None
                yield OwnedPiece(shard.parameter, canonical_slices(shard, box), tensor, run, shape, rounded)

    def share(self) -> None:
        """Every copy gets the updated weights of all others, as `gather` does; those that rest in parts wait for it."""
        if not self.rests_in_parts:
            self._bring()

    @property
    def parts(self) -> set[str]:
        """The parts of the stage that compute with these weights, as `LayerContext.comes_to` names them; `head`
        is whatever comes last."""
        return {part_of(usage.parameter.name) for usage in self.bucket.usages}

    def _bring(self) -> None:
        lo, hi = self.own
        if self.rests_in_parts or (self.keeps_masters and self._rounded is None):
            self.weights[lo:hi] = self.updated
        if self.group.size == 1:
            return
        own = self.group.room(self.weights, self.longest)
        own[: hi - lo] = self.weights[lo:hi]
        own[hi - lo :].zero_()
        with self.group.recorder.layer(self.bucket.layer):
            gathered = self.group.all_gather(own)
        for (first, last), part in zip(self.owned, gathered, strict=True):
            self.weights[first:last] = part[: last - first]


def part_of(name: str) -> str:
    """The part of a stage that a parameter is in: `embedding`, `layers.3`, `mtp`, `head`."""
    part, number, *_ = name.split(".")
    return f"layers.{number}" if part == "layers" else part


def _nothing(dtype: torch.dtype, like: Tensor) -> Tensor:
    """Of the shape of `like`, and without memory of its own: no numbers, so that whoever computes
    with them is found out."""
    return torch.full((1,), torch.nan, dtype=dtype, device=like.device).expand(like.shape)


def boxes(shape: Sequence[int], lo: int, hi: int) -> Iterator[tuple[slice, ...]]:
    """The elements `[lo, hi)` of a row-major tensor as boxes, in order: at most two for each of its dimensions.

    >>> [tuple((part.start, part.stop) for part in box) for box in boxes((3, 4), 2, 9)]
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if lo >= hi:
        return
    if len(shape) == 1:
        yield (slice(lo, hi),)
        return
    row = torch.Size(shape[1:]).numel()
    first_whole, last_whole = -(-lo // row), hi // row
    if first_whole > last_whole:  # inside one row
        yield from _in_row(shape, last_whole, lo, hi)
        return
    yield from _in_row(shape, first_whole - 1, lo, first_whole * row)
    if first_whole < last_whole:
        yield (slice(first_whole, last_whole), *(slice(0, size) for size in shape[1:]))
    yield from _in_row(shape, last_whole, last_whole * row, hi)


def _in_row(shape: Sequence[int], index: int, lo: int, hi: int) -> Iterator[tuple[slice, ...]]:
    offset = index * torch.Size(shape[1:]).numel()
    for box in boxes(shape[1:], lo - offset, hi - offset):
        yield (slice(index, index + 1), *box)
