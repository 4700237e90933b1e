"""ZeRO where stages have replicas and where experts compute in bf16, and replicas with unequal numbers of microbatches:
the bits of one device, and the bytes of the program."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.gates import sampled
from helpers.paths import ROOT
from helpers.plans import training_plan
from shardproof import lower
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Numerics
from shardproof.core.program import operations
from shardproof.core.program.buckets import ROUTERS, gathered_sizes
from shardproof.core.schedule.action import Kind
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.symbolic.symbolic import prove as prove_symbolically

# Clipped; blocks are small enough for every cut.
tiny = partial(training_plan, tied_embeddings=True, schedule="1F1B", gradient_token_block=2, reduction_token_block=2)


BUCKETS = {"bucket_bytes": 50_000, "overlap_grad_reduce": True}
PLANS = {
    "dualpipe-dp3-uneven": tiny(Layout(pp=2, dp=3, zero=1), samples=14, schedule="DualPipe"),
    "dualpipe-cp2": tiny(Layout(pp=2, cp=2, zero=1), samples=4, schedule="DualPipe"),
    "dualpipe-tp2-bf16": tiny(Layout(pp=2, tp=2, zero=1), samples=4, schedule="DualPipe", dtype="bf16"),
    "experts-bf16-ep2": tiny(Layout(dp=2, ep=2, zero=1), model="tiny-moe", samples=2, dtype="bf16"),
    "experts-bf16-tp2-dp3-sp-early": tiny(
        Layout(tp=2, dp=3, sequence_parallel=True, zero=1), model="tiny-moe", samples=3, dtype="bf16", **BUCKETS
    ),
    "experts-bf16-cp2": tiny(Layout(cp=2, dp=2, zero=1), model="tiny-moe", samples=2, dtype="bf16"),
}
"""A table tied over stages whose replicas keep other parts of its two ends, and routers in fp32
besides weights in bf16."""


@sampled("plan", PLANS.values(), ids=PLANS.keys(), on_push=2)
def test_no_bit_differs_and_no_sum_is_in_another_order(plan):
    assert unsupported(plan) == []
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
    assert prove_symbolically(plan, lower(schedule_for(plan))).findings == ()


def recorded_step(transport, plan):
    transport.recorder.enabled = True
    TrainingRank(transport, plan).step(0)
    return transport.recorder.events


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_gradients_and_the_optimizer_step_send_what_the_program_says(plan, mode):
    plan = replace(plan, numerics=replace(plan.numerics, mode=mode))
    for global_rank, events in enumerate(
        run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), recorded_step, plan)
    ):
        here = plan.layout.coordinates(global_rank)
        recorded = defaultdict(Counter)
        for action, operation in events:
            recorded[action][operation] += 1
        for action in lower(schedule_for(plan, plan.microbatches_of(here["dp"]))).row(here["pp"]):
            if action.kind in (Kind.REDUCE_GRAD, Kind.STEP):
                replica = plan.placement.replica_of(action.stage, here["pp"])
                own = operations(
                    plan, action.kind, action.stage, here["tp"], here["dp"], cp_rank=here["cp"], replica=replica
                )
                assert recorded[action] == Counter(own), f"rank {global_rank}, {action}"


def test_where_dualpipes_batch_does_not_divide_data_parallel_ranks_differ_by_two_microbatches():
    plan = PLANS["dualpipe-dp3-uneven"]
    assert plan.microbatch_counts == (6, 4)
    assert [plan.samples_of(dp_rank) for dp_rank in range(3)] == [(0, 6), (6, 10), (10, 14)]
    assert [plan.copy_samples(0, copy) for copy in range(6)] == [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12), (12, 14)]
    with pytest.raises(PlanError, match="got 5"):
        tiny(Layout(pp=2, dp=3), samples=13, schedule="DualPipe")


def test_routers_come_together_in_fp32_with_weights_in_bf16():
    plan = PLANS["experts-bf16-ep2"]
    sizes = {each.layer: each.elements for each in gathered_sizes(plan, 0, 0) if each.layer == ROUTERS}
    assert sizes == {ROUTERS: 2 * plan.model.num_experts * plan.model.hidden_size}
    gathers = [each for each in operations(plan, Kind.STEP, 0) if getattr(each, "layer", "") == ROUTERS]
    assert [each.sent_bytes for each in gathers] == [sizes[ROUTERS] // 2 * 4]


def test_every_test_that_the_page_names_is_there():
    root = ROOT
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (root / "docs" / "data_parallel.md").read_text())
    assert len(named) > 15
    for file, test in named:
        (found,) = (root / "tests").rglob(file)
        assert f"def {test}(" in found.read_text(), f"{file} has no {test}"


class SharedAndUnused(torch.nn.Module):
    """A user's layer of which attention and MLP have one norm, used twice, and which never uses the norm of the MLP."""

    def __init__(self, context, layer):
        super().__init__()
        self.before, self.again = (context.norm(f"layers.{layer}.attention.norm") for _ in range(2))
        self.unused = context.norm(f"layers.{layer}.mlp.norm")
        self.attention, self.mlp = context.attention(layer), context.mlp(layer)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.again(x))


@sampled(
    "plan",
    [
        tiny(Layout(tp=2, dp=3, sequence_parallel=True), samples=6, **BUCKETS),
        tiny(Layout(tp=2, cp=2, sequence_parallel=True, zero=1), samples=2),
        tiny(Layout(pp=2, dp=2, zero=1), samples=6, schedule="ZBH1"),
    ],
    ids=["early buckets tp2 dp3 sp", "zero1 tp2 cp2 sp", "zero1 dp2, split backward"],
    on_push=2,
)
def test_parameters_that_are_shared_or_unused_train_to_the_bits_of_one_device(plan):
    proof = prove(plan, block=SharedAndUnused, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


def finished_gradients(transport, plan):
    rank = TrainingRank(transport, plan, model=SharedAndUnused)
    seen, update = {}, rank.optimizer.step
    rank.optimizer.step = lambda gradients, coefficient, skip: (
        seen.update({one.name: each.clone() for one, each in zip(rank.optimizer.held, gradients, strict=True)}),
        update(gradients, coefficient),
    )
    rank.step(0)
    return seen


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_gradient_of_an_unused_parameter_is_zero_and_that_of_a_shared_one_is_not(mode):
    plan = replace(tiny(Layout(dp=3), samples=3), numerics=Numerics(mode))
    for gradients in run_threads(MemoryWorld(3, timeout_s=60), finished_gradients, plan):
        assert not gradients["layers.1.mlp.norm.weight"].any() and gradients["layers.1.attention.norm.weight"].all()
