"""Order-aware digests that add up: the digest of a tensor is the sum of the digests of its pieces, wherever it was cut.

Each element, as an integer, is multiplied by a key that its index in the *full* tensor draws, and the products are
added modulo 2^64 (multilinear hashing: Carter & Wegman 1981, New hash functions and their use in authentication and set
equality). Integer addition has no order, so ranks digest what they hold and the pieces are added afterwards; two
elements that trade places still change the result. Keys are odd: an element that differs alone is always seen, others
are missed with a chance of 2^-32 in each of the two lanes. The digest guards against errors, not against an adversary.

The loops are compiled (`csrc`) where the installation could; without them numpy gives the same digests,
some thirty times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

try:
    from . import _digest as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

Digest = tuple[int, int]
Region = tuple[tuple[int, int], ...]
"""A box of a tensor: `(lo, hi)` per dimension."""

EMPTY: Digest = (0, 0)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LANE_SEEDS = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))
_WORD_MASK = np.uint64(0x9E3779B9)
_BLOCK = np.uint64(1024)
"""Elements that have keys of their own; those of the next block are these times its factor."""
_CHUNK = 1 << 16
"""Elements multiplied at once: the temporaries stay in the cache."""


def digest(values: np.ndarray, shape: Sequence[int] | None = None, region: Region | None = None) -> Digest:
    """The digest of `values`, which fill `region` of a tensor of `shape` (without them: the whole tensor). Bits
    count, so -0.0 is not 0.0.

    >>> whole = np.arange(12.0).reshape(3, 4)
    >>> left, right = whole[:, :1], whole[:, 1:]
    >>> digest(whole) == add([digest(left, (3, 4), ((0, 3), (0, 1))), digest(right, (3, 4), ((0, 3), (1, 4)))])
    True
    """
    words = bit_words(values).reshape(-1)
    shape = values.shape if shape is None else shape
    region = full_region(shape) if region is None else region
    size = region_size(region)
    assert len(words) == size, f"{len(words)} values do not fill a region of {size} elements"
    if compiled is None:
        return digest_plainly(words, element_index(shape, region).reshape(-1))
    starts, length = runs_of(shape, region)
    return compiled.runs(words, words.itemsize, length, starts)


def digest_bytes(content: bytes | bytearray | memoryview, first: int = 0) -> Digest:
    """The digest of bytes as words of eight, the last one filled up with zeros; how many there are is not in
    it. They are those from byte `first` on, a multiple of eight, of a longer sequence, the digest of which is
    the sum of those of its parts.

    >>> digest_bytes(b"eight by" b"tes") == add([digest_bytes(b"eight by"), digest_bytes(b"tes", 8)])
    True
    """
    assert first % 8 == 0, first
    data = np.frombuffer(content, dtype=np.uint8)
    whole, number = len(data) // 8 * 8, first // 8
    words = [
        data[:whole].view(np.uint64),
        np.frombuffer(data[whole:].tobytes().ljust(8, b"\0"), dtype=np.uint64)[: len(data) > whole],
    ]
    places = ((number, number + whole // 8), (number + whole // 8, number + -(-len(data) // 8)))
    return add(digest(part, (1 << 60,), (place,)) for part, place in zip(words, places, strict=True))


def digest_plainly(words: np.ndarray, index: np.ndarray) -> Digest:
    """The digest of words `[n]` that are the elements `index` (uint64) of their tensor, by numpy."""
    return add(_digest_chunk(words[lo : lo + _CHUNK], index[lo : lo + _CHUNK]) for lo in range(0, len(words), _CHUNK))


def add(digests: Iterable[Digest]) -> Digest:
    """The digest of disjoint pieces together."""
    first, second = 0, 0
    for a, b in digests:
        first, second = first + a, second + b
    return first % 2**64, second % 2**64


def to_hex(value: Digest) -> str:
    """32 hexadecimal digits."""
    return f"{value[0]:016x}{value[1]:016x}"


def bit_words(values: np.ndarray) -> np.ndarray:
    """The bit patterns of `values` as unsigned integers of their width."""
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}")


def element_index(shape: Sequence[int], region: Region | None = None) -> np.ndarray:
    """The row-major index of every element of `region` in a tensor of `shape`, in the shape of the region (uint64)."""
    region = region if region is not None else full_region(shape)
    assert len(region) == len(shape) and all(
        0 <= lo <= hi <= size for (lo, hi), size in zip(region, shape, strict=True)
    ), (shape, region)
    index: np.ndarray = np.zeros((), dtype=np.uint64)
    for (lo, hi), size in zip(region, shape, strict=True):
        index = index[..., None] * np.uint64(size) + np.arange(lo, hi, dtype=np.uint64)
    return index


_WHOLE = np.zeros(1, dtype=np.uint64)


def runs_of(shape: Sequence[int], region: Region) -> tuple[np.ndarray, int]:
    """The first elements (uint64) of the runs that a region is made of, each of neighbours in the whole
    tensor, and their length."""
    length, outer = 1, len(shape)
    while outer and (outer == len(shape) or region[outer] == (0, shape[outer])):
        outer -= 1
        length *= region[outer][1] - region[outer][0]
    if not outer and (not shape or region[0][0] == 0):
        return _WHOLE, length
    inside = math.prod(shape[outer:])
    first = math.prod(shape[outer + 1 :]) * region[outer][0]
    return (element_index(shape[:outer], region[:outer]) * np.uint64(inside) + np.uint64(first)).reshape(-1), length


def rows_of(shape: Sequence[int], region: Region) -> np.ndarray:
    """The first elements (uint64) of the rows of a matrix's region."""
    (top, bottom), (left, _) = region
    return np.arange(top, bottom, dtype=np.uint64) * np.uint64(shape[1]) + np.uint64(left)


def full_region(shape: Sequence[int]) -> Region:
    """The region that is the whole tensor."""
    return tuple((0, int(size)) for size in shape)


def region_size(region: Region) -> int:
    """Elements of a region."""
    size = 1
    for lo, hi in region:
        size *= hi - lo
    return size


def regions_overlap(a: Region, b: Region) -> bool:
    """True when two regions of one tensor share an element."""
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))


def _digest_chunk(words: np.ndarray, index: np.ndarray) -> Digest:
    first, second = (int((_numbers(words) * _keys(index, seed)).sum(dtype=np.uint64)) for seed in _LANE_SEEDS)
    return first, second


def keys_of(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The odd numbers that the elements `index` (uint64) of a tensor are multiplied by, in both lanes."""
    return _keys(index, _LANE_SEEDS[0]), _keys(index, _LANE_SEEDS[1])


def _numbers(words: np.ndarray) -> np.ndarray:
    """What stands for words of any width: none of zeros is 0, and the highest bit of 64, which would be lost in every
    other sum, is not alone."""
    wide = words.astype(np.uint64)
    return wide ^ _WORD_MASK if words.itemsize < 8 else wide ^ (wide >> np.uint64(32)) ^ GOLDEN


def _keys(index: np.ndarray, seed: np.uint64) -> np.ndarray:
    """The odd numbers that elements are multiplied by."""
    own, factor = mix(index % _BLOCK * GOLDEN + seed), mix(index // _BLOCK * GOLDEN + ~seed)
    return (own | np.uint64(1)) * (factor | np.uint64(1))


def mix(z: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea & Flood 2014, figure 17, variant 13 of Stafford): a
    bijection of 64 bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
