"""In which order the windows or documents of a text come: a permutation of its own for every pass, a function of seed
and pass alone.

Texts in memory are sorted by random words (`permutation`): an array of 8 bytes a window, and the order of all runs so
far. Token files, which may have billions of windows, use a keyed permutation (`keyed`) that is computed for the wanted
places alone, in a time and memory that do not depend on their number.
"""

from __future__ import annotations

import functools

import numpy as np

ROUNDS = 8
"""Rounds of the Feistel network. Four with random functions are indistinguishable from a random permutation (Luby and
Rackoff, 1988); small halves need more."""


def shuffled(numbers: np.ndarray, num_items: int, seed: int, *, in_memory: bool) -> np.ndarray:
    """The items of the samples `numbers`, int64: sample `i` is at place `i % num_items` of pass `i // num_items`."""
    passes, places = np.divmod(np.asarray(numbers, dtype=np.int64), num_items)
    items = np.empty_like(places)
    for epoch in np.unique(passes).tolist():
        here = passes == epoch
        order = permutation(num_items, seed, epoch)[places[here]] if in_memory else None
        items[here] = keyed(places[here], num_items, seed, epoch) if order is None else order
    return items


@functools.lru_cache(maxsize=4)
def permutation(num_items: int, seed: int, epoch: int) -> np.ndarray:
    """The order of items in one pass: their numbers sorted by the raw Philox words of key (seed, epoch).

    Raw words are the same in every version of numpy, which `Generator.permutation` does not promise.
    """
    return np.argsort(_words(num_items, seed, epoch), kind="stable")


def keyed(places: np.ndarray, num_items: int, seed: int, epoch: int) -> np.ndarray:
    """The items at some places of one pass, int64: a Feistel network with keys from Philox, on the smallest even number
    of bits that holds all items, applied again to what is none of them (cycle walking). It permutes less than four
    times as many numbers as there are items, so that a place takes less than four applications on average.

    >>> sorted(keyed(np.arange(10), 10, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(1, -(-(num_items - 1).bit_length() // 2))
    keys = _words(ROUNDS, seed, epoch)
    items = _feistel(places.astype(np.uint64), half, keys)
    while (outside := items >= num_items).any():
        items[outside] = _feistel(items[outside], half, keys)
    return items.astype(np.int64)


def _feistel(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _mixed(words: np.ndarray) -> np.ndarray:
    """Words of 64 bits in which every bit depends on all of the given ones (the finaliser of SplitMix64, Steele, Lea
    and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _words(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(count)
