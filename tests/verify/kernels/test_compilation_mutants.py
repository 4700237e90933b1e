"""Kernels that are compiled as they should not be are found, each by the floors that must find it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers import kernel_jobs as jobs
from helpers.gates import sampled
from shardproof.verify.kernels.compilation_mutants import (
    COMPILATION_MUTANTS,
    CompilationMutant,
    check_compilation_mutants,
)
from shardproof.verify.kernels.processes import PTX_EXECUTED, Peers
from shardproof.verify.kernels.product_mutants import PRODUCT_MUTANTS

MUTANTS = (*COMPILATION_MUTANTS, *PRODUCT_MUTANTS)
ON_PUSH = len(COMPILATION_MUTANTS) + 1


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    return check_compilation_mutants(MUTANTS if request.config.getoption("--full") else MUTANTS[:ON_PUSH])


@sampled("mutant", MUTANTS, on_push=ON_PUSH, ids=lambda mutant: mutant.name)
def test_a_wrong_compilation_is_found(found: dict[str, dict[str, str]], mutant: CompilationMutant) -> None:
    said = found[mutant.name]
    assert set(said) == set(mutant.finds)
    assert all(words in said[floor] for floor, words in mutant.finds.items())


@pytest.fixture(scope="module")
def one_peer() -> Iterator[Peers]:
    with Peers(1, floor=PTX_EXECUTED, environment={}) as peers:
        yield peers


def test_a_contraction_has_other_bits_than_a_product_and_a_sum(one_peer: Peers) -> None:
    generator = torch.Generator().manual_seed(6)
    a, b, c = (torch.randn(256, generator=generator) for _ in range(3))
    ((separate, together),) = one_peer.run(jobs.multiplied_and_added, a, b, c)
    assert torch.equal(separate, a * b + c)
    once = (a.double() * b.double() + c.double()).float()  # no sum here is near a tie of fp32
    assert torch.equal(together, once)
    assert int((separate != together).sum()) > 20
