"""The interpreter against torch, and the peers that it runs in: who did not come, and that nothing stays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from helpers import kernel_jobs as jobs
from shardproof.verify.kernels.case import Case
from shardproof.verify.kernels.cases import Outcome, run_case
from shardproof.verify.kernels.processes import PeerFailed, Peers, PeersMissing

GATHER = Case("all_gather", 3, "fp32", 100)


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with Peers(4, patience_s=4.0) as found:  # with 1.0 right peers were given up next to eight busy processes
        yield found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_bf16_is_rounded_to_nearest_even(peers):
    patterns = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000], dtype=torch.int32)
    patterns[: len(ties)] = ties
    source = patterns.view(torch.float32).nan_to_num(1.0)
    (got,) = peers.run(jobs.converted, source, torch.bfloat16, world_size=1)
    assert torch.equal(bits(got), bits(source.to(torch.bfloat16)))
    (back,) = peers.run(jobs.converted, got, torch.float32, world_size=1)
    assert torch.equal(bits(back), bits(got.float()))


def test_not_a_number_stays_one_in_bf16(peers):
    source = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    (got,) = peers.run(jobs.converted, source, torch.bfloat16, world_size=1)
    assert bool(got.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_bf16_to_other_types(peers, dtype):
    source = (torch.randn(64, generator=torch.Generator().manual_seed(1)) * 100).to(torch.bfloat16)
    (got,) = peers.run(jobs.converted, source, dtype, world_size=1)
    assert torch.equal(got, source.to(dtype))


def test_arithmetic_on_bf16_is_refused(peers):
    with pytest.raises(PeerFailed, match="arithmetic on bfloat16 in the interpreter: cast to float32 first"):
        peers.run(jobs.added, torch.ones(16, dtype=torch.bfloat16), world_size=1)


def test_a_product_of_bf16_with_a_bound_of_run_time(peers):
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-8, 9, shape, generator=generator).to(torch.bfloat16) for shape in ((16, 64), (64, 16)))
    (got,) = peers.run(jobs.multiplied, a, b, world_size=1)
    assert torch.equal(got, a.float() @ b.float())  # whole numbers, so exact in any order


def test_a_sum_in_another_order_has_other_bits(peers):
    case = Case("all_reduce_one_shot", 4, "fp32", 100)
    assert all(outcome.right for outcome in peers.run(run_case, case))
    assert all(outcome.wrong_bits > 0 for outcome in peers.run(jobs.run_case_added_in_sequence, case))


def test_a_kernel_that_does_not_wait_is_found(peers):
    case = Case("all_gather", 3, "fp32", 100, slow_rank=2)
    outcomes = peers.run(jobs.run_case_without_meeting, case, world_size=3)
    assert sum(outcome.wrong_bits for outcome in outcomes) > 0


def test_a_rank_that_does_not_come_is_named_and_the_pads_are_cleared(peers):
    with pytest.raises(PeersMissing, match=r"ranks \[1\] did not come: rank 0 waits for rank 1 in block 0") as missing:
        peers.run(jobs.run_case_unless, GATHER, 1, "returns", world_size=3)
    assert missing.value.ranks == (1,)
    assert peers.run(run_case, GATHER, world_size=3) == [Outcome(0, 0)] * 3


def test_a_rank_that_raises_is_quoted(peers):
    with pytest.raises(PeerFailed, match=r"rank 1:\n(?s:.*)ValueError: a job of rank 1"):
        peers.run(jobs.run_case_unless, GATHER, 1, "raises", world_size=3)
    assert peers.run(run_case, GATHER, world_size=3) == [Outcome(0, 0)] * 3


def test_a_rank_that_ends_is_named_and_no_process_stays():
    with Peers(2, patience_s=0.5) as peers:
        processes_of = peers.run(jobs.process_of)
        with pytest.raises(PeersMissing, match="rank 1: ended") as missing:
            peers.run(jobs.run_case_unless, Case("all_gather", 2, "fp32", 8), 1, "ends")
        assert missing.value.ranks == (1,)
    for process in processes_of:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_floor_that_cannot_be_loaded_is_an_error():
    with pytest.raises(PeersMissing, match="rank 0: ended"):
        Peers(1, floor="shardproof.verify.kernels.processes:nothing")
