"""bf16: operands are rounded, sums are not. Errors against fp64 have a stated bound; fast numerics
stay near exact ones."""

from __future__ import annotations

import pytest
import torch

from helpers.plans import plan
from shardproof.backend.numerics import OwnedLeaves, make_numerics
from shardproof.backend.numerics.tokens import owned_tokens
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.leaves import Leaves
from shardproof.core.plan.plan import Plan

HALF_ULP = 2.0**-8
"""bf16 keeps 8 significant bits: rounding to nearest errs by at most 2^-9 of the next power of
two, 2^-8 of the value."""
WIDTH, FEATURES = 96, 40


def plan_of(tp: int = 1, *, mode="exact", dtype="bf16", sequence_parallel=False, learning_rate=0.01) -> Plan:
    return plan(
        model="tiny-gpt-6h",
        num_layers=2,
        samples=4,
        micro=2,
        dtype=dtype,
        mode=mode,
        learning_rate=learning_rate,
        tp=tp,
        sequence_parallel=sequence_parallel,
    )


def contracted(transport, plan: Plan) -> torch.Tensor:
    """[2, 24, FEATURES]: a product whose 96 summands lie in 12 leaves on the ranks, or this rank's tokens of it."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((2, 24, WIDTH), (WIDTH, FEATURES)))
    group = transport.group("tp", "tp", range(transport.world_size))
    leaves = OwnedLeaves(Leaves(WIDTH, 8), 1, group.size, group.rank)
    lo, hi = leaves.items
    return make_numerics(plan).contract(
        x[..., lo:hi].contiguous(), weight[lo:hi], leaves, group, owned_tokens(plan, group)
    )


def true_product() -> tuple[torch.Tensor, torch.Tensor]:
    """The product in fp64, and the sum of the summands' magnitudes."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(*shape, generator=generator).bfloat16().double() for shape in ((2, 24, WIDTH), (WIDTH, FEATURES))
    )
    return x @ weight, x.abs() @ weight.abs()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_exact_sums_are_rounded_once_whatever_the_cut_and_the_library_errs_more(tp, sequence_parallel):
    right, magnitude = true_product()
    ranks = run_threads(MemoryWorld(tp, timeout_s=60), contracted, plan_of(tp, sequence_parallel=sequence_parallel))
    exact = torch.cat(ranks, 1) if sequence_parallel and tp > 1 else ranks[0]
    error = (exact.double() - right).abs()
    assert exact.dtype == torch.bfloat16 and (error <= right.abs() * HALF_ULP + magnitude * WIDTH * 2.0**-24).all()
    one = run_threads(MemoryWorld(1, timeout_s=60), contracted, plan_of())[0]
    assert torch.equal(exact, one)
    library = run_threads(MemoryWorld(tp, timeout_s=60), contracted, plan_of(tp, mode="fast"))[0]
    assert error.square().mean() <= (library.double() - right).square().mean()
    if tp > 2:
        assert error.square().mean() < 0.8 * (library.double() - right).square().mean()


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_are_fp32_and_in_exact_numerics_not_rounded_to_bf16(mode):
    numerics, generator = make_numerics(plan_of(mode=mode)), torch.Generator().manual_seed(4)
    x, y = (torch.randn(1, 24, size, generator=generator).bfloat16() for size in (WIDTH, FEATURES))
    contribution = numerics.weight_gradient(x, y, OwnedLeaves(Leaves(WIDTH, 8), 1, 1, 0))
    gradient = contribution[0] if mode == "exact" else contribution.total()
    error = (gradient.double() - x[0].double().t() @ y[0].double()).abs()
    bound = x[0].double().abs().t() @ y[0].double().abs()
    assert gradient.dtype == torch.float32 and (error <= bound * (24 * 2.0**-24 if mode == "exact" else HALF_ULP)).all()
    sums = numerics.token_sums(x)
    assert (sums[0] if mode == "exact" else sums).dtype == torch.float32


def trained(transport, plan: Plan) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    rank = TrainingRank(transport, plan)
    losses = [rank.step(step)[0].loss for step in range(3)]
    shards = list(rank.stages[0].shards.values())
    return losses, [shard.storage for shard in shards], [shard.operand for shard in shards]


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_fast_numerics_with_sequence_parallelism_stay_near_exact_ones(dtype, bound):
    exact, fast = (
        run_threads(MemoryWorld(3, timeout_s=60), trained, plan_of(3, mode=mode, dtype=dtype, sequence_parallel=True))
        for mode in ("exact", "fast")
    )
    assert exact[0][0] == pytest.approx(fast[0][0], rel=bound) and fast[0][0] == fast[1][0] == fast[2][0]
    assert exact[0][0][-1] < exact[0][0][0]


def test_master_weights_keep_updates_that_bf16_would_lose():
    """Updates of 1e-6 are far below a bf16 step of weights near 1, such as those of norms."""
    _, masters, operands = run_threads(MemoryWorld(1, timeout_s=60), trained, plan_of(learning_rate=1e-6))[0]
    norms = [
        (master, operand)
        for master, operand in zip(masters, operands, strict=True)
        if master.ndim == 1 and (operand == 1).all()
    ]
    assert norms and all((master != 1).any() for master, _ in norms)
    for master, operand in zip(masters, operands, strict=True):
        assert master.dtype == torch.float32 and torch.equal(operand, master.bfloat16())


def test_bf16_follows_fp32():
    fp32, bf16 = (
        run_threads(MemoryWorld(1, timeout_s=60), trained, plan_of(dtype=dtype))[0][0] for dtype in ("fp32", "bf16")
    )
    assert bf16 == pytest.approx(fp32, rel=1e-2) and bf16 != fp32
