"""`ExactSum`: the sum of fp32 numbers, or of their squares, without any rounding, so that order and cuts cannot matter.

ZeRO and pipeline cuts ignore parameter boundaries, so no order of leaves survives for the loss and the gradient norm.
Both are sums of numbers whose range is known: an fp32 is a multiple of 2^-149 below 2^128, its square a multiple of
2^-298 below 2^256. Values are split into parts of 38 bits by adding and subtracting a large constant (the error-free
extraction of Rump, Ogita and Oishi 2008, algorithm 3.1); 2^15 parts of one size add up exactly in fp64 in any order;
and Python's integers hold the total. On the CPU compiled loops (`csrc`) do the same where they were built. The sum has
no rounding, so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transport.base import Group

try:
    from . import _exact as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

CPU = torch.device("cpu")
LIMB_BITS = 32
LOWEST_EXPONENT = -320
"""Totals are multiples of 2^-320, which is below the smallest square."""
NUM_LIMBS = 23
"""Limbs of 32 bits up to 2^416: the largest square times 2^160 numbers."""
_CHUNK_BITS = 15
"""2^15 elements at a time: their fp64 copies stay in cache."""
_PART_BITS = 53 - _CHUNK_BITS
"""So many parts of so many bits have an exact sum in fp64."""
_NUM_PARTS = 3
"""Parts taken before looking whether anything is left: 114 bits below the largest element. Squares have 48."""

_POSITIVE, _NEGATIVE, _NAN = 1, 2, 4


@dataclass(frozen=True)
class ExactSum:
    """`total` * 2^-320. `special` holds flags for +inf, -inf and nan among the summands.

    `float()` rounds once, to the nearest fp64 (ties to even).
    """

    total: int = 0
    special: int = 0
    device: torch.device = CPU

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.total + other.total, self.special | other.special, self.device)

    def __float__(self) -> float:
        if self.special:
            return {_POSITIVE: math.inf, _NEGATIVE: -math.inf}.get(self.special, math.nan)
        return self.total / (1 << -LOWEST_EXPONENT)  # the quotient of two integers is correctly rounded

    @property
    def value(self) -> Tensor:
        """`float()` as fp64 [] on the device."""
        return torch.full((), float(self), dtype=torch.float64, device=self.device)

    def over(self, group: Group) -> ExactSum:
        """The sum over a group's members, the same on every one."""
        if group.size == 1:
            return self
        gathered = group.all_gather(self.to_tensor())
        return sum((ExactSum.from_tensor(tensor) for tensor in gathered), ExactSum(device=self.device))

    def to_tensor(self) -> Tensor:
        """int64 [24]: 23 limbs of 32 bits, lowest first, the highest with the sign; then the flags."""
        mask = (1 << LIMB_BITS) - 1
        limbs = [(self.total >> LIMB_BITS * i) & mask for i in range(NUM_LIMBS - 1)]
        highest = self.total >> LIMB_BITS * (NUM_LIMBS - 1)
        return torch.tensor([*limbs, highest, self.special], dtype=torch.int64, device=self.device)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> ExactSum:
        """The inverse of `to_tensor`."""
        *limbs, special = tensor.tolist()
        return cls(sum(limb << LIMB_BITS * i for i, limb in enumerate(limbs)), special, tensor.device)


def exact_sum(tensors: Iterable[Tensor], *, squares: bool = False, device: torch.device = CPU) -> ExactSum:
    """The sum over all elements of fp32 tensors, or of their squares."""
    total = ExactSum(device=device)
    for tensor in tensors:
        assert tensor.dtype == torch.float32, tensor.dtype
        flat = _in_a_row(tensor.detach())
        if compiled is not None and flat.is_cpu:
            total += ExactSum(*compiled.exact_sum(flat.numpy(), squares), device)
            continue
        for chunk in flat.split(1 << _CHUNK_BITS):
            total += _sum_chunk(chunk, squares, device)
    return total


def _in_a_row(tensor: Tensor) -> Tensor:
    """All elements one behind the other; a matrix whose columns lie so is not copied."""
    return (tensor.mT if tensor.dim() > 1 and not tensor.is_contiguous() else tensor).reshape(-1).contiguous()


def _sum_chunk(chunk: Tensor, squares: bool, device: torch.device) -> ExactSum:
    largest, special = _largest(chunk), 0
    if not math.isfinite(largest):
        special = _flags(chunk.abs() if squares else chunk)
        chunk = chunk[chunk.isfinite()]
        largest = _largest(chunk)
    rest = chunk.double()
    if squares:
        rest.mul_(rest)
        largest *= largest
    total, exponent, parts = 0, math.frexp(largest)[1], torch.empty_like(rest)
    while largest:  # below 2^exponent
        for _ in range(_NUM_PARTS):
            exponent = max(exponent - _PART_BITS, LOWEST_EXPONENT)
            constant = math.ldexp(1.5, exponent + 52)
            torch.add(rest, constant, out=parts).sub_(constant)  # the multiples of 2^exponent nearest to the rest
            total += int(math.ldexp(parts.sum().item(), -exponent)) << (exponent - LOWEST_EXPONENT)
            rest.sub_(parts)
        largest = _largest(rest)
    return ExactSum(total, special, device)


def _largest(values: Tensor) -> float:
    """The largest magnitude; 0 of nothing, and not finite where a value is not."""
    if not values.numel():
        return 0.0
    lowest, highest = torch.aminmax(values)
    return max(-lowest.item(), highest.item())


def _flags(values: Tensor) -> int:
    has = [bool((values == math.inf).any()), bool((values == -math.inf).any()), bool(values.isnan().any())]
    return sum(flag for flag, present in zip((_POSITIVE, _NEGATIVE, _NAN), has, strict=True) if present)
