"""Data inside a group: one member opens them and gives them to the others; and the part of a batch that a
context-parallel rank takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..base.streams import to_device
from ..transport.base import Group


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor looks like before it is there. Any dtype, any number of dimensions, any of them 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def broadcast(
    tensors: Mapping[str, Tensor] | None,
    group: Group,
    *,
    source: int = 0,
    specs: Mapping[str, TensorSpec] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """The tensors of member `source` on every member, by name, on `device`; all other members hand in None.

    One exchange of bytes where all members know `specs`, the same on each; without them a description is sent
    first (two more exchanges). Raises `ValueError` when the source's tensors are not those of `specs`, or when
    another member brings some.
    """
    here = group.rank == source
    if here != (tensors is not None):
        what = "none, but it is the source" if here else f"some, but member {source} is the source"
        raise ValueError(f"{group}: broadcast takes tensors from one member; this one was given {what}.")
    found = (
        None if tensors is None else {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in tensors.items()}
    )
    if specs is not None and found is not None and list(specs.items()) != list(found.items()):
        raise ValueError(f"{group}: broadcast expects {_text(specs)}, but the source has {_text(found)}.")
    if group.size > 1 and specs is None:
        specs = _described(found, group, source, device)
    payload = None if tensors is None else _bytes_of(tensors.values(), device)
    if group.size > 1:
        assert specs is not None
        payload = _from_source(payload, sum(spec.num_bytes for spec in specs.values()), group, source, device)
    specs = found if specs is None else specs
    assert specs is not None and payload is not None
    parts = payload.split([spec.num_bytes for spec in specs.values()]) if specs else ()
    # a copy of its own begins where any dtype may begin
    return {
        name: part.clone().view(spec.dtype).view(spec.shape)
        for (name, spec), part in zip(specs.items(), parts, strict=True)
    }


def context_positions(sequence: int, cp: int, cp_rank: int, *, documents: Sequence[int] | None = None) -> Tensor:
    """int64 positions of the tokens that a context-parallel rank r takes of a sequence: chunks r and 2cp -
    1 - r of 2cp equal ones.

    So all ranks have equal work under a causal mask (Dubey et al. 2024, Llama 3, section 3.3.2). With `documents`,
    the lengths of what is packed into the sequence, each document is cut like that. Raises `ValueError` for a
    length that 2cp does not divide.

    >>> context_positions(16, 2, 0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    """
    lengths = [sequence] if documents is None else list(documents)
    if sum(lengths) != sequence:
        raise ValueError(f"documents of {lengths} tokens are {sum(lengths)} together, but the sequence has {sequence}.")
    if wrong := [length for length in lengths if cp > 1 and length % (2 * cp)]:
        raise ValueError(
            f"cp={cp} cuts into {2 * cp} equal chunks, but {wrong[0]} tokens do not divide. Pad to "
            f"{_next(wrong[0], 2 * cp)}."
        )
    if cp == 1:
        return torch.arange(sequence)
    chunks = []
    for length, first in zip(lengths, accumulate(lengths, initial=0), strict=False):
        size = length // (2 * cp)
        chunks += [
            torch.arange(first + chunk * size, first + (chunk + 1) * size) for chunk in (cp_rank, 2 * cp - 1 - cp_rank)
        ]
    return torch.cat(chunks)


def context_part(x: Tensor, cp: int, cp_rank: int, *, dim: int = 1, documents: Sequence[int] | None = None) -> Tensor:
    """What a context-parallel rank takes of `x`, whose dimension `dim` is the sequence (`context_positions`); `x`
    itself where cp is 1."""
    if cp == 1:
        return x
    return x.index_select(dim, to_device(context_positions(x.shape[dim], cp, cp_rank, documents=documents), x.device))


def context_whole(parts: Sequence[Tensor], *, dim: int = 1, documents: Sequence[int] | None = None) -> Tensor:
    """The whole from what every context-parallel rank took of it, in rank order: the inverse of `context_part`."""
    joined = torch.cat(list(parts), dim)
    sequence, cp = joined.shape[dim], len(parts)
    positions = torch.cat([context_positions(sequence, cp, cp_rank, documents=documents) for cp_rank in range(cp)])
    return joined.index_select(dim, to_device(positions.argsort(), joined.device))


def _described(
    found: Mapping[str, TensorSpec] | None, group: Group, source: int, device: torch.device | str
) -> dict[str, TensorSpec]:
    """The source's specs on every member: first how long their description is, then the description."""
    text = None
    if found is not None:
        table = [[name, list(spec.shape), str(spec.dtype).removeprefix("torch.")] for name, spec in found.items()]
        text = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8).to(device)
    length = None if text is None else _bytes_of([torch.tensor(text.numel())], device)
    num_bytes = int(_from_source(length, 8, group, source, device).view(torch.int64))
    received = _from_source(text, num_bytes, group, source, device)
    table = json.loads(bytes(received.tolist()))
    return {name: TensorSpec(tuple(shape), getattr(torch, dtype)) for name, shape, dtype in table}


def _from_source(
    payload: Tensor | None, num_bytes: int, group: Group, source: int, device: torch.device | str
) -> Tensor:
    """The source's bytes on every member; `payload` is None on all others."""
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    parts = [nothing if payload is None or member == group.rank else payload for member in range(group.size)]
    shapes = [(num_bytes if payload is None and member == source else 0,) for member in range(group.size)]
    arrived = group.all_to_all(parts, shapes)
    return arrived[source] if payload is None else payload


def _bytes_of(tensors: Iterable[Tensor], device: torch.device | str) -> Tensor:
    """All elements as bytes, one tensor after the other."""
    parts = [to_device(tensor.detach(), device).contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _text(specs: Mapping[str, TensorSpec]) -> str:
    return (
        ", ".join(f"{name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for name, spec in specs.items())
        or "nothing"
    )


def _next(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
