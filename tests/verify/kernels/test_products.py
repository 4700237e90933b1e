"""The products of the catalog's kernel: wrong trees, leaves and places have other bits than the canonical sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.gates import sampled
from shardproof.backend.kernels.exact_products import tiles_for
from shardproof.backend.kernels.kernel import Kernel
from shardproof.verify.kernels.cases import few_cases, run_case
from shardproof.verify.kernels.oracle import canonical, tree_products
from shardproof.verify.kernels.processes import Peer, Peers
from shardproof.verify.kernels.products_story import AS_LAUNCHED, SMALL_TILES, sizes_of, tiles_of

CASES = few_cases("exact_product", 1)


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with Peers(1) as found:
        yield found


def run_spoiled(peer: Peer, case: Any, how: str) -> Any:
    """A job: a case whose launches have something wrong."""

    def launch(
        kernel: Kernel, num_blocks: int, arguments: Mapping[str, Any], constants: Mapping[str, Any], *rest: Any
    ) -> None:
        given = dict(arguments)
        if how == "in sequence":
            ends = given["merges"] % 2
            given["merges"] = torch.ones_like(ends) * 2 + ends
            given["merges"][0] = ends[0]
            for first in (torch.nonzero(ends[:-1]).flatten() + 1).tolist():
                given["merges"][first] = ends[first]
        elif how == "another leaf":
            given["leaf"] = given["leaf"] + 1
        peer.launch(kernel, num_blocks, given, constants, *rest)

    return run_case(replace(peer, launch=launch), case)


@pytest.mark.parametrize("how", ["in sequence", "another leaf"])
@sampled("case", sorted(CASES, key=lambda case: (case.k % 16 == 0, case.dtype == "bf16")), on_push=1, ids=str)
def test_another_order_has_other_bits(peers: Peers, case: Any, how: str) -> None:
    (outcome,) = peers.run(run_spoiled, case, how)
    assert outcome.wrong_bits > 100


def test_cases_of_a_launch_have_its_tiles_and_more_than_one_of_them() -> None:
    cpu = torch.device("cpu")
    assert tiles_of(AS_LAUNCHED, cpu) is tiles_for(80) and tiles_of(64, cpu) is SMALL_TILES
    of_launch = [(AS_LAUNCHED, tiles_for(architecture)) for architecture in (80, 90)]
    for dtype, (block, tiles) in itertools.product(SMALL_TILES, [(64, SMALL_TILES), *of_launch]):
        for tile, sizes in itertools.product(tiles[dtype], sizes_of(dtype, block)):
            assert sizes["n"] > tile.m and sizes["width"] > tile.n and sizes["k"] > 2 * tile.k


def test_leaves_in_sequence_are_rounded_after_each_term() -> None:
    left, right = torch.tensor([[2.0**24, 1.0, 1.0, 5.0]]), torch.ones(4, 1)
    whole = ((0, 1),)
    assert tree_products(left, right, 4, whole, in_sequence=True).item() == 2.0**24 + 4  # 1 + 1 are lost
    assert tree_products(left, right, 4, whole, in_sequence=False).item() == 2.0**24 + 8  # a tie to even
    parts = tree_products(left, right, 1, ((0, 4),), in_sequence=False)
    assert torch.equal(parts[0], canonical([left[:, k : k + 1] for k in range(4)]))
