"""Random numbers by counter: element i of a tensor is a function of (seed, name, i), so a rank
can draw its slice alone.

A normal draw is the scaled sum of eight uniform 16-bit integers (Irwin-Hall): integer arithmetic and one
rounding, so its bits do not depend on a mathematics library. It has the mean and variance of a normal and ends
at 4.9 standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SUMMANDS = 8
_SUM_MEAN = _SUMMANDS * (2**16 - 1) / 2
_SUM_STD = math.sqrt(_SUMMANDS * (2**32 - 1) / 12)
_ELEMENTS_PER_COUNTER = 2
"""One Philox counter gives four 64-bit words: sixteen 16-bit numbers."""
_ROWS_BYTES = 1 << 25
"""Raw words drawn at once."""


def normal(seed: int, name: str, shape: Sequence[int], slices: Sequence[slice], std: float) -> Tensor:
    """The `slices` part of a normal fp32 tensor of `shape` with mean 0: the same numbers as cutting the whole.

    Rows outside the first slice are not drawn; columns outside the others are drawn and dropped. The
    slice holds at least one row.
    """
    rows, row_elements = slices[0], math.prod(shape[1:])
    step = max(1, _ROWS_BYTES // (16 * row_elements))
    pieces = []
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        drawn = _standard(seed, name, first * row_elements, last * row_elements).reshape(last - first, *shape[1:])
        pieces.append(drawn[(slice(None), *slices[1:])] * (std / _SUM_STD))
    return torch.from_numpy(np.concatenate(pieces).astype(np.float32))


def _standard(seed: int, name: str, lo: int, hi: int) -> np.ndarray:
    """Integers-and-a-half with mean 0 and standard deviation `_SUM_STD` for the elements `[lo, hi)` of the
    flat tensor, as fp64."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
    first_counter, last_counter = lo // _ELEMENTS_PER_COUNTER, -(-hi // _ELEMENTS_PER_COUNTER)
    generator = np.random.Philox(key=key)
    generator.advance(first_counter)
    words = generator.random_raw(4 * (last_counter - first_counter)).astype("<u8", copy=False)
    sums = words.view("<u2").reshape(-1, _SUMMANDS).sum(axis=1, dtype=np.int64)
    skipped = lo - first_counter * _ELEMENTS_PER_COUNTER
    return sums[skipped : skipped + hi - lo] - _SUM_MEAN
