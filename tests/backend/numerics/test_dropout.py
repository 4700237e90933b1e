"""Dropout masks against a second implementation in Python's integers, their statistics, and attention with
dropout against torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import torch

from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.base.recorder import Recorder
from shardproof.backend.model.attention_core import AttentionCore
from shardproof.backend.numerics import make_numerics
from shardproof.backend.numerics.dropout import dropout_mask
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.tensor_parallel import LayerContext, hidden_dropout
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.train import Train


def mask_in_python(seed: int, operation: str, step: int, index: int, probability: float) -> bool:
    mask = 2**64 - 1
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{operation}:{step}".encode(), digest_size=8).digest(), "little")
    z = (index * 0x9E3779B97F4A7C15 + key) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 40 >= round(probability * 2**24)


@pytest.mark.parametrize("first", [0, 12_345_678_901, 2**62])
def test_masks_are_splitmix64_of_the_index(first):
    index = torch.arange(first, first + 200)
    mask = dropout_mask(7, "layers.0.mlp", 3, index, 0.3)
    assert mask.dtype == torch.float32 and set(mask.tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert (mask > 0).tolist() == [mask_in_python(7, "layers.0.mlp", 3, i, 0.3) for i in index.tolist()]


def test_the_share_that_is_dropped_and_the_independence_of_names_and_steps():
    index, p = torch.arange(200_000), 0.25
    masks = [dropout_mask(*key, index, p) > 0 for key in ((1, "a", 0), (1, "a", 1), (1, "b", 0), (2, "a", 0))]
    for mask in masks:
        assert abs(mask.float().mean().item() - 0.75) < 5 * math.sqrt(p * (1 - p) / 200_000)
    agree = p * p + (1 - p) ** 2
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs((one == other).float().mean().item() - agree) < 5 * math.sqrt(agree * (1 - agree) / 200_000)
    neighbours = (masks[0][1:] == masks[0][:-1]).float().mean().item()
    assert abs(neighbours - agree) < 5 * math.sqrt(agree * (1 - agree) / 200_000)


def plan_of(tp: int = 1) -> Plan:
    return plan(
        model=model_preset("tiny-gpt-6h"),
        hidden_dropout=0.2,
        attention_dropout=0.3,
        samples=4,
        micro=2,
        tp=tp,
        sequence_parallel=tp > 1,
    )


def context_of(transport, plan: Plan) -> LayerContext:
    tp = transport.group("tp", "tp", range(transport.world_size))
    return LayerContext(plan, tp=tp, numerics=make_numerics(plan), recorder=Recorder())


def microbatch(first_sample: int, step: int | None = 5) -> Microbatch:
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    return Microbatch(0, first_sample, tokens, tokens, step)


def dropped_ones(transport, plan: Plan) -> torch.Tensor:
    context = context_of(transport, plan)
    lo, hi = plan.tokens_of(transport.global_rank)
    with context.running(microbatch(2)):
        return hidden_dropout(context, "layers.1.mlp", torch.ones(2, hi - lo, plan.model.hidden_size))


def test_every_rank_drops_the_elements_of_its_own_tokens_and_nothing_outside_of_training():
    (whole,) = run_threads(MemoryWorld(1, timeout_s=60), dropped_ones, plan_of())
    parts = run_threads(MemoryWorld(3, timeout_s=60), dropped_ones, plan_of(3))
    assert torch.equal(torch.cat(parts, 1), whole) and 0 < (whole == 0).float().mean() < 0.4
    assert not torch.equal(whole[0], whole[1])
    context = context_of(MemoryWorld(1, timeout_s=60).transport(0), plan_of())
    with context.running(microbatch(2, None)):
        x = torch.ones(2, 24, 4)
        assert hidden_dropout(context, "layers.1.mlp", x) is x


def losses(transport, plan: Plan) -> list[float]:
    """Of two training steps that leave the weights nearly alone, then the held-out one."""
    rank = TrainingRank(transport, plan)
    return [*(rank.step(step)[0].loss for step in (0, 0, 1)), rank.evaluate()]


def test_dropout_is_repeated_for_a_step_changes_from_step_to_step_and_spares_held_out_losses():
    plan = replace(plan_of(), train=Train(learning_rate=1e-12), optimizer=Optimizer(weight_decay=0.0))
    retained = replace(plan, model=replace(plan.model, hidden_dropout=0.0, attention_dropout=0.0))
    ((first, again, second, held_out), (first_mask, *_, held_out_mask)) = (
        run_threads(MemoryWorld(1, timeout_s=60), losses, each)[0] for each in (plan, retained)
    )
    assert again == pytest.approx(first, rel=1e-6) and held_out == pytest.approx(held_out_mask, rel=1e-6)
    assert abs(second - first) > 1e-4 and abs(first_mask - first) > 1e-4


def test_attention_with_dropout_is_torchs_with_the_same_mask():
    """Against autograd in fp64: 24 keys and 8 features a head, so errors of fp32 stay below
    1e-5 of the largest value."""
    plan = plan_of()
    context = context_of(MemoryWorld(1, timeout_s=60).transport(0), plan)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = (torch.randn(2, 6, 24, 8, generator=generator) for _ in range(4))
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    with context.running(microbatch(2)):
        y = AttentionCore(context, "core", 0)(*ours)
        y.backward(dy)
    index = torch.arange(2 * 6 * 24 * 24, 4 * 6 * 24 * 24).view(2, 6, 24, 24)
    mask = dropout_mask(plan.train.seed, "core", 5, index, 0.3).double()
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    scores = (theirs[0] @ theirs[1].mT / math.sqrt(8)).masked_fill(
        torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf
    )
    expected = (scores.softmax(-1) * mask) @ theirs[2]
    expected.backward(dy.double())
    for own, other in [(y, expected), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]:
        assert (own.double() - other).abs().max() < 1e-5 * other.abs().max()
