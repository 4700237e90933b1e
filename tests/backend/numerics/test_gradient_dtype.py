"""precision.gradient_dtype = "bf16": gradients are kept and sent in two bytes, and added up over ranks in
fp32 with one rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.gates import sampled
from helpers.plans import product_plan
from shardproof.backend.base.recorder import Recorder
from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.numerics.fast import FastAccumulator, FastNumerics
from shardproof.backend.numerics.token_product import TokenProduct
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Collective, operations
from shardproof.core.schedule.action import Kind
from shardproof.verify.dynamic.proof import prove


def tiny(layout, *, mode="exact", dtype="bf16", gradient_dtype="bf16", global_size=4, model=None) -> Plan:
    return product_plan(
        layout,
        model=model
        or replace(
            model_preset("tiny-gpt"), num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, ffn_hidden_size=32
        ),
        samples=global_size,
        sequence=16,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        mode=mode,
        **{"gradient_token_block": 4, "reduction_token_block": 4} if mode == "exact" else {},
        steps=3,
        learning_rate=0.01,
    )


def summed(transport, op):
    """A wide sum of what every rank drew, besides what each drew."""
    group = transport.group("dp", "dp", range(transport.world_size))
    recorder = transport.recorder
    recorder.enabled = True
    own = torch.randn(
        transport.world_size, 13, generator=torch.Generator().manual_seed(transport.global_rank)
    ).bfloat16()
    total = (
        group.all_reduce(own, "sum", wide=True) if op == "all_reduce" else group.reduce_scatter(list(own), wide=True)
    )
    return own, total, [(event.op, event.sent_bytes) for _, event in recorder.events]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_wide_sum_is_the_fp32_sum_in_member_order_rounded_once(size):
    for op in ("all_reduce", "reduce_scatter"):
        results = run_threads(MemoryWorld(size), summed, op)
        expected = results[0][0].float()
        for own, _, _ in results[1:]:
            expected = expected + own.float()
        expected = expected.bfloat16()
        for rank, (_, total, events) in enumerate(results):
            assert torch.equal(total, expected if op == "all_reduce" else expected[rank])
            ring = -(-(2 if op == "all_reduce" else 1) * (size - 1) * size * 13 * 2 // size)
            assert events == [(op, ring)]


def test_a_wide_sum_is_nearer_than_one_that_rounds_after_every_rank():
    """Eight ones and a small number: bf16 holds 8 bits, so 1 + 2^-8 rounds to 1 each time, and in
    fp32 eight of them count."""
    small = torch.tensor([2.0**-8]).bfloat16()

    def job(transport, _):
        group = transport.group("dp", "dp", range(9))
        own = torch.ones(1).bfloat16() if transport.global_rank == 0 else small
        return group.all_reduce(own, "sum", wide=True).item(), group.all_reduce(own, "sum").item()

    assert run_threads(MemoryWorld(9), job, None)[0] == (1.0 + 2.0**-5, 1.0)


def test_an_accumulator_keeps_two_bytes_and_rounds_after_every_microbatch():
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(9, 6, generator=generator), torch.randn(9, 5, generator=generator)) for _ in range(4)]
    accumulator, expected = FastAccumulator(torch.bfloat16), torch.zeros(6, 5)
    for x, y in parts:
        accumulator.add(0, TokenProduct(x, y))
        expected = (expected + x.t() @ y).bfloat16().float()
    assert accumulator.total.dtype == torch.bfloat16 and torch.equal(accumulator.total.float(), expected)


def test_gradients_of_fast_numerics_reach_the_optimizer_in_fp32():
    accumulator = FastAccumulator(torch.bfloat16)
    accumulator.add(0, torch.ones(3))
    numerics = FastNumerics(torch.device("cpu"), torch.bfloat16)
    with MemoryWorld(1).transport(0, Recorder()) as transport:
        reduced = numerics.reduce_gradients({"a": accumulator}, transport.group("dp", "dp", [0]), lambda _: (0, 1))
    assert reduced["a"].dtype == torch.float32


EXPERTS = replace(
    model_preset("tiny-llama"),
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=16,
    first_dense_layers=0,
)


@sampled(
    "plan",
    [
        tiny(Layout(dp=3), global_size=5),
        tiny(Layout(tp=2, pp=2, sequence_parallel=True)),
        tiny(Layout(dp=2, cp=2), dtype="fp32"),
        tiny(Layout(tp=2, ep=2, etp=1), model=EXPERTS),
    ],
    ids=["dp3, uneven samples", "sp2 pp2", "dp2 cp2, fp32", "experts"],
    on_push=2,
)
def test_in_exact_numerics_no_bit_depends_on_the_layout(plan):
    proof = prove(plan, transport="memory")
    assert proof.report["bits_different"] == 0 and proof.ok, proof.text()


def test_rounding_gradients_changes_bits_or_nothing_would_be_shown():
    rounded, plain = (prove(tiny(Layout(), gradient_dtype=each), transport="memory") for each in ("bf16", None))
    assert rounded.report["fingerprint"] != plain.report["fingerprint"]


def reductions(transport, plan):
    """The collectives of REDUCE_GRAD that this rank recorded, the bytes of its gradients, and the loss of two steps."""
    rank = TrainingRank(transport, plan)
    transport.recorder.enabled = True
    losses = [rank.step(step)[0].loss for step in range(2)]
    events = [
        event for action, event in transport.recorder.events if action is not None and action.kind.name == "REDUCE_GRAD"
    ]
    return [event for event in events if isinstance(event, Collective)], losses


def test_fast_reductions_send_two_bytes_an_element_as_the_program_lists_them():
    plan = tiny(Layout(dp=2), mode="fast")
    plans = plan, tiny(Layout(dp=2), mode="fast", gradient_dtype=None)
    half, whole = (run_ranks(reductions, each, world_size=2, transport="memory") for each in plans)
    listed = [each for each in operations(plan, Kind.REDUCE_GRAD, 0) if isinstance(each, Collective)]
    assert half[0][0] == listed * 2
    assert [each.sent_bytes * 2 for each in half[0][0]] == [each.sent_bytes for each in whole[0][0]]
    assert half[0][1] == half[1][1] and half[0][1] == pytest.approx(whole[0][1], rel=1e-2) and half[0][1] != whole[0][1]
