"""Initial weights are a function of seed, name and element, so a slice is cut from the whole without drawing it."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.backend.numerics.random import normal

SHAPE = (37, 11)


def whole(seed=1234, name="layers.0.mlp.up.weight", std=0.02, shape=SHAPE):
    return normal(seed, name, shape, [slice(0, size) for size in shape], std)


@given(st.data())
def test_any_slice_equals_the_cut_of_the_whole(data):
    bounds = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in SHAPE]
    slices = tuple(slice(lo, hi) for lo, hi in bounds)
    assert torch.equal(normal(1234, "layers.0.mlp.up.weight", SHAPE, slices, 0.02), whole()[slices])


def test_one_draw_by_hand_from_numpys_philox():
    key = int.from_bytes(hashlib.blake2b(b"7:w", digest_size=16).digest(), "little")
    words = np.random.Philox(key=key).random_raw(4).view("<u2").astype(np.int64)  # two elements of eight 16-bit numbers
    std = math.sqrt(8 * (2**32 - 1) / 12)
    expected = [(int(part.sum()) - 8 * 65535 / 2) * (3.0 / std) for part in (words[:8], words[8:])]
    assert normal(7, "w", (2,), (slice(0, 2),), 3.0).tolist() == np.array(expected).astype(np.float32).tolist()


def test_large_tensors_are_drawn_in_pieces_without_seams():
    shape = (5000, 700)  # 56 MB of raw words: two pieces
    assert torch.equal(
        normal(1, "w", shape, (slice(2900, 3100), slice(0, 700)), 1.0), whole(1, "w", 1.0, shape)[2900:3100]
    )


def test_mean_and_deviation_are_those_asked_for():
    draws = whole(shape=(1000, 1000), std=0.02).double()
    assert abs(draws.mean()) < 4 * 0.02 / 1000  # four standard errors of the mean of a million draws
    assert abs(draws.std() / 0.02 - 1) < 4 / math.sqrt(2e6)
    assert abs(((draws / 0.02) ** 4).mean() - 2.85) < 0.03  # kurtosis of a sum of eight uniforms: 3 - 1.2/8
    assert draws.abs().max() < 0.02 * math.sqrt(24)


@pytest.mark.parametrize("other", [{"seed": 1235}, {"name": "layers.1.mlp.up.weight"}])
def test_another_seed_or_name_gives_unrelated_numbers(other):
    a, b = whole(shape=(200, 200)), whole(shape=(200, 200), **other)
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.03
