"""Every kernel as compiled for GPUs, its PTX carried out by processes that share memory: no bit is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from helpers import kernel_jobs as jobs
from helpers.gates import sampled
from shardproof.backend.kernels import catalog
from shardproof.backend.kernels.catalog import KERNELS
from shardproof.verify.kernels.case import Case
from shardproof.verify.kernels.cases import OF_ROWS, PRODUCTS, all_cases, few_cases, run_case
from shardproof.verify.kernels.compilation_mutants import CompilationMutant, run_changed
from shardproof.verify.kernels.compiling import code_of_launch
from shardproof.verify.kernels.processes import PTX_EXECUTED, PeerFailed, Peers, PeersMissing
from shardproof.verify.kernels.products_story import AS_LAUNCHED
from shardproof.verify.kernels.ptx_counts import copied_bytes, vector_bytes

EXECUTED = [kernel.name for kernel in KERNELS if "PTX executed" in kernel.floors]
MEETING = [name for name in EXECUTED if name not in PRODUCTS]


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with Peers(4, floor=PTX_EXECUTED, environment={}) as found:
        yield found


def wrong(peers: Peers, cases: Iterable[Case]) -> dict[str, list]:
    outcomes = {str(case): peers.run(run_case, case, world_size=case.world_size) for case in cases}
    return {name: ranks for name, ranks in outcomes.items() if not all(rank.right for rank in ranks)}


def vectors(kernel: str, world_size: int) -> Case:
    """Blocks as they are launched, 16 bytes a thread, on sizes that are multiples of 16 elements."""
    n, width = (3, 1024 + 16) if kernel in OF_ROWS else (2 * 1024 + 16, 1)
    return Case(kernel, world_size, "bf16", n, width, block=1024)


def test_every_kernel_stands_on_this_floor() -> None:
    assert set(EXECUTED) == {kernel.name for kernel in KERNELS}


@sampled("world_size", [3, 2], on_push=1)  # of two peers, by blocks of a launch: `test_kernel_with_vectors`
@pytest.mark.parametrize("kernel", MEETING)
def test_kernel(peers: Peers, kernel: str, world_size: int) -> None:
    assert wrong(peers, few_cases(kernel, world_size)) == {}


@sampled(
    "case",
    sorted(
        few_cases("exact_product", 1, compiled=True),
        key=lambda case: (case.k % 16 == 0, not case.any_numbers and case.dtype == "fp32"),
    ),
    on_push=2,
    ids=str,
)
def test_products(peers: Peers, case: Case) -> None:
    assert wrong(peers, [case]) == {}


@pytest.mark.full
@pytest.mark.parametrize("case", few_cases("exact_product", 1, block=AS_LAUNCHED, compiled=True), ids=str)
def test_products_with_the_tiles_of_a_launch(peers: Peers, case: Case) -> None:
    assert wrong(peers, [case]) == {}


def test_products_of_multiples_of_16_are_copied_16_bytes_at_a_time(peers: Peers) -> None:
    """And others by threads, element by element: both are carried out."""
    odd, even = (case for case in few_cases("exact_product", 1) if case.dtype == "bf16")
    for case, widths in ((odd, {2}), (even, {8, 16})):  # 8 where a tile has no more for each thread
        (texts,) = peers.run(jobs.texts_of, case, world_size=1)
        assert {copied_bytes(text) for text in texts} == widths
        assert all("mma.sync" in text for text in texts)


@pytest.mark.full
def test_the_barriers_of_a_product_have_others_next_to_them(peers: Peers) -> None:
    """So no floor can find that they are missing: they are for compilers that put their own elsewhere."""
    (case,) = (each for each in few_cases("exact_product", 1) if each.dtype == "bf16" and each.k % 16 == 0)
    for comment in (
        "what other threads have left there is there",
        "other threads have read what lay there",
    ):
        mutant = CompilationMutant(
            comment, "exact_product", {}, file="products", before=f"tl.debug_barrier()  # {comment}", after="pass"
        )
        assert peers.run(run_changed, case, mutant, world_size=1)[0].right


@pytest.mark.parametrize("kernel", MEETING)
def test_kernel_with_vectors(peers: Peers, kernel: str) -> None:
    assert wrong(peers, [vectors(kernel, 2)]) == {}


@pytest.mark.full
def test_products_of_every_size(peers: Peers) -> None:
    assert wrong(peers, all_cases("exact_product", 1, compiled=True)) == {}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kernel", MEETING)
def test_kernel_at_every_size(peers: Peers, kernel: str, world_size: int) -> None:
    assert wrong(peers, [*all_cases(kernel, world_size), vectors(kernel, world_size)]) == {}


@pytest.mark.full
def test_the_code_for_an_older_architecture() -> None:
    with Peers(3, floor=f"{PTX_EXECUTED}_sm80", environment={}) as peers:
        for kernel in (each.name for each in KERNELS if each.least_architecture <= 80 and each.name in MEETING):
            assert wrong(peers, [*few_cases(kernel, 3), vectors(kernel, 2)]) == {}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [5, 8])
def test_kernels_of_more_peers(world_size: int) -> None:
    with Peers(world_size, floor=PTX_EXECUTED, environment={}, patience_s=300.0) as peers:
        for kernel in MEETING:
            assert wrong(peers, few_cases(kernel, world_size)) == {}


def test_a_sum_in_another_order_has_other_bits(peers: Peers) -> None:
    case = Case("all_reduce_one_shot", 4, "fp32", 100)
    assert all(outcome.right for outcome in peers.run(run_case, case))
    assert all(outcome.wrong_bits > 0 for outcome in peers.run(jobs.run_case_added_in_sequence, case))


def test_a_kernel_that_does_not_wait_is_found(peers: Peers) -> None:
    case = Case("all_gather", 3, "fp32", 100, slow_rank=2)
    outcomes = peers.run(jobs.run_case_without_meeting, case, world_size=3)
    assert sum(outcome.wrong_bits for outcome in outcomes) > 0


def test_a_rank_that_does_not_come_is_named(peers: Peers) -> None:
    case = Case("all_gather", 3, "fp32", 100)
    assert wrong(peers, [case]) == {}  # its code is in Triton's cache, so nobody waits for a compiler below
    with Peers(3, floor=PTX_EXECUTED, environment={}, patience_s=3.0) as impatient:
        with pytest.raises(PeersMissing, match=r"ranks \[1\] did not come: rank 0 waits for rank 1 in block 0"):
            impatient.run(jobs.run_case_unless, case, 1, "returns")
        assert wrong(impatient, [case]) == {}


def test_code_is_specialised_as_a_launch_specialises_it() -> None:
    kernel, out = catalog.kernel("all_gather"), torch.zeros(4096, dtype=torch.bfloat16)
    arguments = {"table": 1 << 20, "pads": 1 << 21, "out": out, "n": 2048, "rank": 3}
    constants = {"WORLD": 2, "BLOCK": 1024}
    wide = code_of_launch(kernel, arguments, constants, 90)
    assert wide.parameters == ("table", "pads", "out", "n", "rank")
    assert code_of_launch(kernel, {**arguments, "n": 4096, "rank": 5}, constants, 90) is wide
    other = [
        code_of_launch(kernel, {**arguments, **changes}, constants, 90) for changes in ({"n": 2047}, {"out": out[1:]})
    ]
    assert [vector_bytes(each.ptx) for each in (wide, *other)] == [16, 2, 16]
    assert ["st.global.v4" in each.ptx for each in (wide, *other)] == [True, False, False]


def test_bf16_is_added_and_rounded_as_compiled(peers: Peers) -> None:
    """What the interpreter refuses."""
    source = torch.randn(64, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    (got,) = peers.run(jobs.added, source, world_size=1)
    assert torch.equal(got, source + source)


def test_threads_that_do_not_wait_for_what_others_write_are_a_race(peers: Peers) -> None:
    """In step they would read the right values."""
    assert peers.run(jobs.turned_through_memory, True, world_size=1)[0].tolist() == list(range(127, -1, -1))
    with pytest.raises(PeerFailed, match=r"thread \d+ reads byte \d+ of scratch, which thread \d+ writes"):
        peers.run(jobs.turned_through_memory, False, world_size=1)


def test_memory_beyond_an_argument_is_refused(peers: Peers) -> None:
    with pytest.raises(PeerFailed, match=r"ld\.global\S+ .* bytes beyond the end of source of 12 bytes"):
        peers.run(jobs.converted_beyond, torch.ones(3), world_size=1)


def test_products_by_descriptors_of_shared_memory_are_not_modelled(peers: Peers) -> None:
    a, b = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    with pytest.raises(PeerFailed, match=r"UnknownInstruction: .*not modelled"):
        peers.run(jobs.multiplied, a, b, world_size=1)


def test_products_of_a_warp_are_carried_out(peers: Peers) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-8, 9, shape, generator=generator).to(torch.bfloat16) for shape in ((16, 64), (64, 16)))
    (got,) = peers.run(jobs.multiplied, a, b, world_size=1)
    assert torch.equal(got, a.float() @ b.float())


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_a_sum_by_the_switch_is_near_the_exact_one(peers: Peers, world_size: int, dtype: torch.dtype) -> None:
    """Within a rounding to the type and one of fp32 an addition: the switch promises no order, nor does the model."""
    got = peers.run(jobs.multicast_sum, dtype, world_size=world_size)
    values = [jobs.own_values(rank, dtype).double() for rank in range(world_size)]
    exact, size = sum(values), sum(value.abs() for value in values)
    bound = size * world_size * 2.0**-24 + exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 0)
    assert all(torch.equal(each, got[0]) for each in got)
    assert bool(((got[0].double() - exact).abs() <= bound).all())


def test_without_triton_compiling_nothing_is_executed() -> None:
    case = replace(Case("all_gather", 1, "fp32", 8), calls=1)
    with (
        Peers(1, floor=PTX_EXECUTED, environment={"TRITON_INTERPRET": "1"}) as peers,
        pytest.raises(PeerFailed, match="all_gather is interpreted: unset TRITON_INTERPRET"),
    ):
        peers.run(run_case, case)
