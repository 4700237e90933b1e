"""Whole numbers of PTX for which numpy has no one function, on arrays. `ptx_numbers` has them for one number, which may
be unknown."""

from __future__ import annotations

import numpy as np

Array = np.ndarray
_BYTE = np.uint32(0xFF)


def high_half(a: Array, b: Array) -> Array:
    """The upper half of the product of two arrays of one type."""
    width = a.dtype.itemsize * 8
    if width < 64:
        wide = np.dtype(np.int64 if a.dtype.kind == "i" else np.uint64)
        return (a.astype(wide) * b.astype(wide) >> wide.type(width)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = (x0 * y0 >> half) + (x1 * y0 & low) + (x0 * y1 & low)
    high = x1 * y1 + (x1 * y0 >> half) + (x0 * y1 >> half) + (middle >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0).astype(np.uint64) - np.where(b < 0, x, 0).astype(np.uint64)
    return high.view(a.dtype)


def cut_quotient(a: Array, b: Array) -> Array:
    """a / b without its fraction; what numpy makes of it where b is 0."""
    quotient = a // b
    return quotient + ((np.fmod(a, b) != 0) & ((a < 0) != (b < 0)))


def field_of(values: Array, position: Array, length: Array) -> Array:
    """`length` bits of whole numbers from bit `position` on. Of signed ones what lies above the field, or above their
    own highest bit, is the field's highest bit (PTX ISA, "bfe")."""
    width = 8 * values.itemsize
    word = np.dtype(f"uint{width}").type
    bits = values.view(word)
    begin, count = (np.minimum(each & _BYTE, width).astype(np.int64) for each in (position, length))
    count_here = np.minimum(count, width - begin)
    mask = np.where(count_here < width, _shifted(word(1), count_here, word) - word(1), ~word(0))
    field = np.where(begin < width, bits >> np.minimum(begin, width - 1).astype(word), word(0)) & mask
    if values.dtype.kind == "u":
        return field.astype(word)
    last = np.clip(begin + count - 1, 0, width - 1).astype(word)
    is_set = ((bits >> last) & word(1)).astype(bool) & (count > 0)
    return np.where(is_set, field | ~mask, field).astype(word).view(values.dtype)


def _shifted(value: Array, by: Array, word: type) -> Array:
    """0 where all bits leave, which numpy leaves open."""
    return np.where(by < 8 * value.itemsize, value << np.minimum(by, 8 * value.itemsize - 1).astype(word), word(0))


def chosen_bytes(low: Array, high: Array, selector: Array) -> Array:
    """Four bytes out of the eight of two uint32, each chosen by four bits of `selector`, of which the highest asks for
    the byte's sign in all its bits."""
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    result = np.zeros(np.broadcast_shapes(low.shape, high.shape, selector.shape), np.uint32)
    for place in range(4):
        choice = (selector >> np.uint32(4 * place)) & np.uint32(0xF)
        byte = (both >> (np.uint64(8) * (choice & np.uint32(7)))).astype(np.uint32) & _BYTE
        sign = np.where(byte & np.uint32(0x80), _BYTE, np.uint32(0))
        result |= np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * place)
    return result
