"""Runs of a flat buffer as boxes of its tensors, and who keeps which elements of a bucket."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.data_parallel.buckets import boxes
from shardproof.core.program.buckets import owned_interval


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (4, 1, 3)])
def test_boxes_are_a_run_of_elements_in_order(shape):
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    for lo in range(x.numel() + 1):
        for hi in range(lo, x.numel() + 1):
            found = list(boxes(shape, lo, hi))
            assert [value for box in found for value in x[box].flatten().tolist()] == list(range(lo, hi))
            assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize(("copies", "cp"), [(1, 1), (5, 1), (6, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("elements", [3, 10, 101])
def test_copies_keep_every_element_once(elements, copies, cp):
    retained = [range(*owned_interval(elements, copies, cp, copy)) for copy in range(copies)]
    assert sorted(element for part in retained for element in part) == list(range(elements))
