"""`ExactSum`: the sum of fp32 numbers, or of their squares, without any rounding, so that order and cuts cannot matter.

ZeRO and pipeline cuts ignore parameter boundaries, so no order of leaves survives for the loss and the gradient norm. Both are sums of
numbers whose range is known: an fp32 is a multiple of 2^-149 below 2^128, its square a multiple of 2^-298 below 2^256. Values are
split on one fixed grid of 32-bit windows by adding and subtracting a large constant (the error-free extraction of Rump, Ogita and
Oishi 2008, algorithm 3.1); up to 2^20 parts of one window add up exactly in fp64 in any order; and Python's integers hold the total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transport.base import Group

CPU = torch.device("cpu")
WINDOW_BITS = 32
LOWEST_EXPONENT = -320
"""The grid starts at 2^-320, below the smallest square."""
NUM_LIMBS = 23
"""Limbs of 32 bits up to 2^416: the largest square times 2^160 numbers."""
_CHUNK = 1 << 16
"""Elements per pass, so that the fp64 copies stay in cache; at most 2^20 keep window sums exact."""

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

    def over(self, group: Group) -> ExactSum:
        """The sum over a group's members, the same on every one."""
        if group.size == 1:
            return self
        gathered = group.all_gather(self.to_tensor())
        return sum((ExactSum.from_tensor(tensor) for tensor in gathered), ExactSum(device=self.device))

    def to_tensor(self) -> Tensor:
        """int64 [24]: 23 limbs of 32 bits, lowest first, the highest with the sign; then the flags."""
        mask = (1 << WINDOW_BITS) - 1
        limbs = [(self.total >> WINDOW_BITS * i) & mask for i in range(NUM_LIMBS - 1)]
        highest = self.total >> WINDOW_BITS * (NUM_LIMBS - 1)
        return torch.tensor([*limbs, highest, self.special], dtype=torch.int64, device=self.device)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> ExactSum:
        """The inverse of `to_tensor`."""
        *limbs, special = tensor.tolist()
        return cls(sum(limb << WINDOW_BITS * i for i, limb in enumerate(limbs)), special, tensor.device)


def exact_sum(tensors: Iterable[Tensor], *, squares: bool = False, device: torch.device = CPU) -> ExactSum:
    """The sum over all elements of fp32 tensors, or of their squares."""
    total = ExactSum(device=device)
    for tensor in tensors:
        assert tensor.dtype == torch.float32, tensor.dtype
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            values = chunk.double()
            total += _sum_chunk(values * values if squares else values, device)
    return total


def _sum_chunk(values: Tensor, device: torch.device) -> ExactSum:
    if not values.numel():
        return ExactSum(device=device)
    largest = values.abs().max().item()
    special = 0
    if not math.isfinite(largest):
        special = _flags(values)
        values = values[values.isfinite()]
        largest = values.abs().max().item() if values.numel() else 0.0
    total, window = 0, _highest_window(largest)
    while largest:
        assert window >= 0
        exponent = LOWEST_EXPONENT + WINDOW_BITS * window
        constant = math.ldexp(1.5, exponent + 52)
        high = (values + constant).sub_(constant)
        total += int(math.ldexp(high.sum().item(), -exponent)) << WINDOW_BITS * window
        values = values - high
        largest = values.abs().max().item()
        window -= 1
    return ExactSum(total, special, device)


def _highest_window(largest: float) -> int:
    """The window whose parts are at most 2^31 units for values up to `largest`."""
    exponent = math.frexp(largest)[1]
    return max(0, -(-(exponent - (WINDOW_BITS - 1) - LOWEST_EXPONENT) // WINDOW_BITS))


def _flags(values: Tensor) -> int:
    has = [bool((values == math.inf).any()), bool((values == -math.inf).any()), bool(values.isnan().any())]
    return sum(flag for flag, present in zip((_POSITIVE, _NEGATIVE, _NAN), has, strict=True) if present)
