"""What training draws, by its definition and without code of the backend: element i of an operation in a step is a
function of (seed, operation, step, i). numpy only."""

from __future__ import annotations

import hashlib

import numpy as np

BITS = 24
"""Random bits of an element."""


def uniform(seed: int, operation: str, step: int, index: np.ndarray) -> np.ndarray:
    """fp64 of the shape of `index`, from 0 up to but without 1: the first `BITS` bits of splitmix64's finalizer
    (Steele, Lea & Flood 2014, figure 17, variant 13 of Stafford) of index times the golden gamma, plus a key.

    >>> float(uniform(0, "embedding", 0, np.array([0]))[0]) == float(uniform(0, "embedding", 0, np.array([1, 0]))[1])
    True
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}:{operation}:{step}".encode(), digest_size=8).digest(), "<u8")[0]
    with np.errstate(over="ignore"):
        words = index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    words ^= words >> np.uint64(31)
    return (words >> np.uint64(64 - BITS)).astype(np.float64) * 2.0**-BITS


def dropout_factor(seed: int, operation: str, step: int, index: np.ndarray, probability: float) -> np.ndarray:
    """fp64 of the shape of `index`: 0 where an element is dropped, 1/(1-p) where it is kept."""
    survives = uniform(seed, operation, step, index) >= round(probability * 2**BITS) * 2.0**-BITS
    return survives / (1.0 - probability)
