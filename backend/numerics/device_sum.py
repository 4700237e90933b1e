"""`DeviceSum`: an exact sum on a device that the host does not wait for.

The same integers as `exact_sum`: a total is a multiple of 2^-320, in limbs of 32 bits. What the host decides there
from the numbers it sees is fixed here: every number is cut at all multiples of 32 bits that its format reaches, by
adding and subtracting a large constant (Rump, Ogita and Oishi 2008, algorithm 3.1), and 2^21 parts of one size have an
exact sum in fp64 in any order. The total is rounded once, to the nearest fp64, as Python rounds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transport.base import Group
from .exact_sum import LIMB_BITS, LOWEST_EXPONENT, NUM_LIMBS

RUN_BITS = 53 - LIMB_BITS
"""2^21 parts of at most 2^32 have an exact sum in fp64."""

CHUNK_ELEMENTS = 1 << 24
"""Elements at a time, of as many tensors as there are in them: their fp64 copies take 256 MB."""

HIGHEST_EXPONENT = {False: 128, True: 256}
"""No fp32 number, and no square of one, reaches 2 to the power of it."""

SMALLEST_EXPONENT = {False: -149, True: -298}
"""All are multiples of 2 to the power of it."""

FLAG_BITS = 20
"""Of the counts of +inf, -inf and nan, side by side in one number: of tensors and ranks that have one."""


@dataclass(frozen=True)
class DeviceSum:
    """`limbs`, int64 [24] on the device: 23 of 32 bits, lowest first, not yet carried, and what is not finite."""

    limbs: Tensor

    @property
    def value(self) -> Tensor:
        """fp64 []: nobody waits."""
        return rounded(self.limbs)

    def __float__(self) -> float:
        return float(self.value)

    def __add__(self, other: DeviceSum) -> DeviceSum:
        return DeviceSum(self.limbs + other.limbs)

    def over(self, group: Group) -> DeviceSum:
        """The sum over a group's members, the same on every one."""
        return self if group.size == 1 else DeviceSum(torch.stack(group.all_gather(self.limbs)).sum(0))


def device_sum(tensors: Iterable[Tensor], *, squares: bool = False, device: torch.device) -> DeviceSum:
    """The sum over all elements of fp32 tensors, or of their squares."""
    limbs = torch.zeros(NUM_LIMBS + 1, dtype=torch.int64, device=device)
    for chunk in _chunks(tensors):
        _add(limbs, chunk, squares)
    return DeviceSum(limbs)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """All elements, about `CHUNK_ELEMENTS` at a time."""
    held: list[Tensor] = []
    for tensor in tensors:
        assert tensor.dtype == torch.float32, tensor.dtype
        for part in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS) if tensor.numel() else ():
            if held and sum(map(len, held)) + len(part) > CHUNK_ELEMENTS:
                yield torch.cat(held)
                held = []
            held.append(part)
    if held:
        yield torch.cat(held)


def _add(limbs: Tensor, chunk: Tensor, squares: bool) -> None:
    is_finite = chunk.isfinite()
    limbs[NUM_LIMBS] += _flags(chunk.abs() if squares else chunk)
    width = min(len(chunk), 1 << RUN_BITS)
    runs = -(-len(chunk) // width)
    rest = torch.zeros(runs * width, dtype=torch.float64, device=chunk.device)
    rest[: len(chunk)] = torch.where(is_finite, chunk, 0)
    if squares:
        rest.mul_(rest)
    rest = rest.view(runs, width)
    highest = (HIGHEST_EXPONENT[squares] - LOWEST_EXPONENT - 1) // LIMB_BITS
    lowest = (SMALLEST_EXPONENT[squares] - LOWEST_EXPONENT) // LIMB_BITS
    parts = torch.empty_like(rest)
    for limb in range(highest, lowest - 1, -1):
        exponent = LIMB_BITS * limb + LOWEST_EXPONENT
        constant = 1.5 * 2.0 ** (exponent + 52)
        torch.add(rest, constant, out=parts).sub_(constant)  # the multiples of 2^exponent nearest to the rest
        rest.sub_(parts)
        sums = (parts.sum(1) * 2.0**-exponent).long()
        limbs[limb] += (sums & _MASK).sum()
        limbs[limb + 1] += (sums >> LIMB_BITS).sum()


_MASK = (1 << LIMB_BITS) - 1


def _flags(values: Tensor) -> Tensor:
    found = torch.stack([(values == torch.inf).any(), (values == -torch.inf).any(), values.isnan().any()]).long()
    return found[0] + (found[1] << FLAG_BITS) + (found[2] << 2 * FLAG_BITS)


def rounded(limbs: Tensor) -> Tensor:
    """The total, fp64 [], rounded to nearest, ties to even; infinite or nan where a number was.

    Two halves of it are exact in fp64: the highest 48 bits from the first limb that is not zero on, and what lies
    below, of which all that is lost is noted in its last bit. So their sum is rounded once (Boldo and Melquiond 2008:
    rounding to odd leaves the next rounding right).
    """
    total = _carried(limbs[:NUM_LIMBS])
    is_negative = total[-1] < 0
    total = _carried(torch.where(is_negative, -total, total))
    places = torch.arange(NUM_LIMBS, device=limbs.device)
    top = (places * (total != 0)).amax().clamp(min=2)
    first, second, third = (total.gather(0, (top - below).view(1))[0] for below in range(3))
    is_more = ((places < top - 2) & (total != 0)).any()
    high = first.double() * 2.0**LIMB_BITS + ((second >> 16) << 16).double()
    low = (second & 0xFFFF).double() + (third | is_more.long()).double() * 2.0**-LIMB_BITS
    scale = torch.ones((), dtype=torch.float64, device=limbs.device)
    for limb in range(NUM_LIMBS):  # a power of two of a tensor may be rounded on a GPU
        scale = torch.where(top == limb, 2.0 ** (LIMB_BITS * (limb - 1) + LOWEST_EXPONENT), scale)
    value = (high + low) * scale
    flags = limbs[NUM_LIMBS]
    plus, minus, nan = ((flags >> FLAG_BITS * place) % (1 << FLAG_BITS) > 0 for place in range(3))
    value = torch.where(is_negative, -value, value)
    value = torch.where(plus, torch.inf, torch.where(minus, -torch.inf, value))
    return torch.where(nan | (plus & minus), torch.nan, value)


def _carried(limbs: Tensor) -> Tensor:
    """The same total with limbs from 0 to 2^32 - 1, but for the highest, which has the sign."""
    found, carry = [], torch.zeros((), dtype=torch.int64, device=limbs.device)
    for limb in limbs.unbind()[:-1]:
        limb = limb + carry
        found.append(limb & _MASK)
        carry = limb >> LIMB_BITS
    return torch.stack([*found, limbs[-1] + carry])
