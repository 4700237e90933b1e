"""Tiles on a GPU: which views the library multiplies as their copies is measured, whatever device multiplies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardproof.backend.numerics import same_bits
from shardproof.backend.numerics.same_bits import Operands

CPU = torch.device("cpu")
PLACES = (((8, 12), (24, 1)), ((8, 20), (40, 1)), ((20, 12), (1, 20)))


@pytest.fixture(autouse=True)
def afresh():
    """Nothing is remembered from others, nor by them."""
    caches = (same_bits._same_from_views, same_bits._joins, same_bits._adds)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_views_are_used_where_their_product_is_that_of_copies() -> None:
    assert same_bits._same_from_views(PLACES, CPU, torch.float32)


def test_a_library_whose_bits_depend_on_strides_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.mm

    def mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        made = stock(left, right) if right.is_contiguous() else stock(left.flip(1), right.flip(0))
        return made if out is None else out.copy_(made)

    monkeypatch.setattr(torch, "mm", mm)
    assert not same_bits._same_from_views(PLACES, CPU, torch.float32)


def test_views_that_are_not_aligned_are_copied_unmeasured() -> None:
    flat = torch.zeros(400)
    aligned = flat[:160].view(8, 20)
    assert aligned.data_ptr() % 16 == 0
    assert same_bits._views_do(aligned, aligned[:, :8], aligned[:8])
    for off in (flat[1:161].view(8, 20), flat[:168].view(8, 21), flat[:8].view(8, 1)):
        assert not same_bits._views_do(off, off, off)
    assert same_bits._same_from_views.cache_info().currsize == 1


def test_tiles_are_joined_on_a_device_only_where_it_was_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that adds up k in another order for more rows."""
    operands = Operands(False, False, 1, CPU)
    assert operands.joins((8,), 64, (16,))
    stock = torch.mm

    def mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        made = stock(left.flip(1), right.flip(0)) if len(left) > 8 else stock(left, right)
        return made if out is None else out.copy_(made)

    monkeypatch.setattr(torch, "mm", mm)
    same_bits._joins.cache_clear()
    assert not operands.joins((8, 8), 64, (16, 16))
