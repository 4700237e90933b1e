"""`benchmarks/peers.py`: torch's parallelism trains as ours does, and what is said of the rounds.
Nothing depends on time."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim.adamw import adamw

import shardproof
from shardproof.backend.launching.launch import preload
from shardproof.backend.optimizers.held import Held
from shardproof.backend.optimizers.sharded import ShardedOptimizer
from shardproof.core.model.parameters import Parameter
from shardproof.core.plan.optimizer import Optimizer

BENCHMARKS = Path(shardproof.__file__).parent / "benchmarks"


def load_benchmark(name):
    """A benchmark as a module that rank processes can load too."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load_benchmark("peers")
SMALL = {"hidden_size": 64, "ffn_hidden_size": 96, "head_dim": 8, "num_layers": 4}


def small(name):
    """A case of the benchmark on two ranks, with a smaller model."""
    (found,) = (case for case in peers.cases(2) if case.name == name)
    return replace(found, plan=replace(found.plan, model=replace(found.plan.model, **SMALL)))


@pytest.mark.parametrize(("name", "bound"), [("ddp", 0.1), ("pp_zbv", 0.1)])
def test_a_peer_trains_as_ours_does_and_ours_holds_what_is_predicted(name, bound):
    """Copies of buckets that are reduced early meet the activations of the last backward or come
    after them, as it happens."""
    preload("torch.distributed.pipelining", "torch.distributed.fsdp", "torch._dynamo")
    row = peers.measure(small(name), rounds=1)
    assert row.apart <= peers.AGREEMENT
    assert row.ratio > 0 and row.interval == (row.ratio, row.ratio)
    assert abs(row.peak_error) <= bound
    assert row.our_peak_bytes / 2 < row.peer_peak_bytes < 2 * row.our_peak_bytes


def test_a_peer_that_trains_otherwise_is_not_timed():
    same, other = (5.0, 1.0), (5.0, 1.01)
    found = peers.Measured([(same, other)], [(1.0, 1.0)], [(1.0, 1.0)], (1, 1))
    with pytest.raises(AssertionError, match=r"ddp on 1 ranks trains otherwise: losses and norms are 9\.9e-03 apart"):
        peers.row_of(small("ddp"), [found])


def test_a_round_takes_as_long_as_its_slowest_rank_and_processor_seconds_add_up():
    totals = [((5.0, 1.0), (5.0, 1.0))]
    ranks = [
        peers.Measured(totals, [(1.0, 2.0), (1.0, 4.0)], [(1.0, 1.0), (1.0, 1.0)], (400, 10)),
        peers.Measured(totals, [(2.0, 1.0), (1.0, 1.0)], [(1.0, 3.0), (1.0, 3.0)], (300, 20)),
    ]
    row = peers.row_of(small("ddp"), ranks)
    assert (row.ratio, row.interval, row.cpu_ratio) == (2.5, (1.0, 4.0), 2.0)
    assert (row.our_peak_bytes, row.peer_peak_bytes) == (400, 20)


@pytest.mark.parametrize(("count", "lowest"), [(5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count, lowest):
    """The ranks of tables of the sign test at 5%: with 12 values the third and the tenth, with 20 the
    sixth and the fifteenth."""
    assert peers.interval_of_median(range(count)) == (lowest, count - 1 - lowest)


def test_the_update_is_torchs_single_operations_however_a_gradient_is_laid_out():
    """To the rounding of its last operations: torch's vector kernel contracts products and sums."""
    parameter = Parameter("weight", (5, 33))
    start, gradient = torch.randn(5, 33), torch.randn(5, 33)
    weight = start.t().contiguous().t()  # stored column by column
    optimizer = ShardedOptimizer([Held(parameter, (slice(0, 5), slice(0, 33)), weight, True)], Optimizer(), 1e-2)
    state = [torch.zeros(5, 33), torch.zeros(5, 33), torch.zeros(())]
    for _ in range(2):
        optimizer.step([gradient.clone()], torch.tensor(0.5, dtype=torch.float64))
        rates = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        adamw(
            [start],
            [gradient * 0.5],
            [state[0]],
            [state[1]],
            [],
            [state[2]],
            foreach=False,
            amsgrad=False,
            maximize=False,
            **rates,
        )
    torch.testing.assert_close(weight, start, rtol=1e-6, atol=1e-7)
    for name, value in optimizer.saved_state(optimizer.held[0]).items():
        torch.testing.assert_close(
            value, dict(zip(("exp_avg", "exp_avg_sq", "step"), state, strict=True))[name], rtol=1e-6, atol=1e-7
        )
