"""Every kernel, interpreted by processes that share memory: no wrong bit, no signal left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.gates import sampled
from shardproof.backend.kernels.catalog import KERNELS
from shardproof.verify.kernels.case import Case
from shardproof.verify.kernels.cases import PRODUCTS, all_cases, few_cases, run_case
from shardproof.verify.kernels.processes import Peers
from shardproof.verify.kernels.stories import STORIES

INTERPRETED = [kernel.name for kernel in KERNELS if "interpreted" in kernel.floors]


def sizes(*world_sizes: int) -> list[tuple[str, int]]:
    """Every kernel with those numbers of peers; those that meet none, on one."""
    return [(kernel, size) for kernel in INTERPRETED for size in (world_sizes if kernel not in PRODUCTS else (1,))]


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with Peers(4) as found:
        yield found


def wrong(peers: Peers, cases: Iterator[Case] | tuple[Case, ...]) -> dict[str, list]:
    outcomes = {str(case): peers.run(run_case, case, world_size=case.world_size) for case in cases}
    return {name: ranks for name, ranks in outcomes.items() if not all(rank.right for rank in ranks)}


def test_every_kernel_has_a_story_and_every_story_a_kernel():
    assert set(STORIES) == {kernel.name for kernel in KERNELS}


@sampled(("kernel", "world_size"), sorted(sizes(2, 3), key=lambda case: case[1] == 2), on_push=len(sizes(3)))
def test_kernel(peers, kernel, world_size):
    cases = few_cases(kernel, world_size)
    if kernel in PRODUCTS:  # of both types, one with whole vectors: the others at every size
        cases = tuple(case for case in cases if (case.k % 16 == 0) == (case.dtype == "bf16"))
    assert {case.dtype for case in cases} == {"fp32", "bf16"}
    assert wrong(peers, cases) == {}


@pytest.mark.full
@pytest.mark.parametrize(("kernel", "world_size"), sizes(2, 3, 4))
def test_kernel_at_every_size(peers, kernel, world_size):
    assert wrong(peers, all_cases(kernel, world_size)) == {}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [5, 8])
def test_kernels_of_more_peers(world_size):
    with Peers(world_size, patience_s=300.0) as peers:
        for kernel in (each for each in INTERPRETED if each not in PRODUCTS):
            assert wrong(peers, few_cases(kernel, world_size)) == {}
