"""Tensor-parallel collectives during products: the same bits, the same operations, and really at the same time."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch

from helpers.gates import sampled
from helpers.plans import product_plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.base.recorder import Recorder
from shardproof.backend.numerics import make_numerics
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.tensor_parallel import ColumnParallelLinear, LayerContext
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.transport.overlap import CommunicationLane
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import operations
from shardproof.core.schedule import lower
from shardproof.verify.dynamic.proof import prove

LATENT = ModelSpec(
    "latent",
    2,
    32,
    50,
    6,
    6,
    6,
    256,
    32,
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
)


def tiny(
    layout: Layout, *, model="tiny-gpt", micro=1, schedule="1F1B", mode="exact", dtype="fp32", recompute="none"
) -> Plan:
    return product_plan(
        layout,
        model=model,
        samples=6,
        micro=micro,
        tp_comm_overlap=True,
        dtype=dtype,
        recompute=Recompute(recompute, **{"modules": ("norm", "mlp")} if recompute == "selective" else {}),
        schedule=schedule,
        mode=mode,
        **{"gradient_token_block": 8, "reduction_token_block": 4} if mode == "exact" else {},
        clip_grad_norm=0.1,
        steps=2,
        learning_rate=0.01,
    )


SP = {"sequence_parallel": True}


@sampled(
    "plan",
    [
        pytest.param(tiny(Layout(tp=3, dp=2, **SP), model="tiny-gpt-6h", micro=3), id="tp3-dp2-sp-micro3"),
        pytest.param(
            tiny(Layout(tp=4, **SP), model="tiny-llama", recompute="selective"), id="llama-tp4-sp-norms-again"
        ),
        pytest.param(
            tiny(Layout(tp=2, pp=2, vpp=2, **SP), schedule="ZBVZeroBubble", micro=2), id="tp2-sp-split-backward"
        ),
        pytest.param(tiny(Layout(tp=3, **SP), model=LATENT, micro=2), id="latent-tp3-sp"),
        pytest.param(tiny(Layout(tp=2, pp=2), dtype="bf16", recompute="full"), id="tp2-pp2-bf16-without-sp"),
    ],
    on_push=2,
)
def test_no_bit_differs_with_collectives_during_products(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=2)
    assert proof.changes == () and proof.findings == () and proof.report["bits_different"] == 0


def test_no_bit_differs_over_gloo_where_two_threads_use_one_group_in_turns() -> None:
    proof = prove(tiny(Layout(tp=2, **SP)), steps=1)
    assert proof.ok and proof.changes == ()


def recorded_step(transport, plan):
    transport.recorder.enabled = True
    TrainingRank(transport, plan).step(0)
    return transport.recorder.events


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_every_action_records_what_it_would_without_overlap(mode: str) -> None:
    plan = tiny(Layout(tp=2, pp=2, **SP), mode=mode)
    row_of = lower(schedule_for(plan)).row
    for global_rank, events in enumerate(run_threads(MemoryWorld(4, timeout_s=60), recorded_step, plan)):
        here = plan.layout.coordinates(global_rank)
        for action in row_of(here["pp"]):
            recorded = Counter(operation for at, operation in events if at == action)
            assert recorded == Counter(operations(plan, action.kind, action.stage, here["tp"], here["dp"])), action


def backward_of_one_layer(transport, plan):
    """Each product of the backward waits for the collective that is to overlap with it."""
    tp = transport.group("tp", "tp", range(2))
    context = LayerContext(plan, tp=tp, numerics=make_numerics(plan), recorder=transport.recorder)
    layer = ColumnParallelLinear(context, "layers.0.mlp.up")
    gathered, summed = threading.Event(), threading.Event()
    gather, finish, product, gradient = (
        layer.gather,
        layer.finish_contract,
        layer.partial_contract,
        layer.weight_gradient,
    )

    def after(work, event):
        def run(*arguments):
            result = work(*arguments)
            event.set()
            return result

        return run

    def meanwhile(work, event):
        def run(*arguments):
            assert event.wait(10), "nothing overlaps with this product"
            return work(*arguments)

        return run

    tokens = torch.zeros(1, plan.batch.sequence, dtype=torch.int64)
    x = torch.ones(1, plan.batch.sequence // 2, plan.model.hidden_size, requires_grad=True)
    with context.running(Microbatch(0, 0, tokens, tokens)):
        y = layer(x)
    layer.gather, layer.finish_contract = after(gather, gathered), after(finish, summed)
    layer.partial_contract, layer.weight_gradient = meanwhile(product, gathered), meanwhile(gradient, summed)
    torch.autograd.backward(y, torch.ones_like(y))
    return gathered.is_set() and summed.is_set()


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_input_and_input_gradient_are_exchanged_during_the_two_products(mode: str) -> None:
    assert run_threads(MemoryWorld(2, timeout_s=60), backward_of_one_layer, tiny(Layout(tp=2, **SP), mode=mode)) == [
        True,
        True,
    ]


def test_work_on_the_lane_runs_while_the_caller_goes_on_and_belongs_to_its_layer() -> None:
    recorder = Recorder(enabled=True)
    lane, go = CommunicationLane(torch.device("cpu"), recorder), threading.Event()

    def wait() -> torch.Tensor:
        assert go.wait(10)
        recorder.collective("all_gather", "tp", 2, 8)
        return torch.ones(2)

    with recorder.layer("layers.0.mlp.up"):
        finish = lane.start(wait)
        recorder.product(1, 2, 3)
    go.set()
    assert finish().tolist() == [1.0, 1.0]
    assert [(type(operation).__name__, operation.layer) for _, operation in recorder.events] == [
        ("Product", "layers.0.mlp.up"),
        ("Collective", "layers.0.mlp.up"),
    ]


def test_what_fails_on_the_lane_fails_where_its_result_is_asked_for() -> None:
    lane = CommunicationLane(torch.device("cpu"), Recorder())
    finish = lane.start(lambda: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        finish()
    assert lane.start(lambda: torch.zeros(1))().tolist() == [0.0], "and the lane goes on"


def test_a_lane_nobody_has_any_more_ends_its_thread() -> None:
    before = threading.active_count()
    lane = CommunicationLane(torch.device("cpu"), Recorder())
    lane.start(lambda: torch.zeros(1))()
    assert threading.active_count() == before + 1
    del lane
    for _ in range(3000):  # at once, or on a busy machine a little later
        if threading.active_count() == before:
            return
        time.sleep(0.02)
    raise AssertionError("the thread of a lane outlives it")
