"""`Stage` for its users: deferred weight gradients, initial weights, a user's own block, what an observer sees."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import UnknownNameError
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters

MODEL = ModelSpec(
    "gpt", 2, 48, 96, 6, 6, 8, 101, 32, activation="gelu", norm="layernorm", position="learned", bias=True
)


plan_of = partial(plan, model=MODEL, samples=2, sequence=12, reduction_token_block=None)


def stage_of(plan, transport=None, **choices) -> Stage:
    transport = transport or MemoryWorld(1).transport(0)
    tp = transport.group("tp", "tp", range(plan.layout.tp))
    return Stage(plan, plan.stages[0], tp=tp, numerics=make_numerics(plan), recorder=transport.recorder, **choices)


def microbatches(plan):
    text = torch.randint(0, 101, (plan.batch.global_size, 13), generator=torch.Generator().manual_seed(2))
    size = plan.batch.micro_size
    return [Microbatch(i, first, text[first : first + size, :-1], text[first : first + size, 1:])
            for i, first in enumerate(range(0, plan.batch.global_size, size))]  # fmt: skip


def backward(output):
    torch.autograd.backward(output, torch.ones_like(output))


def reduced(stage, plan):
    return stage.gradients.reduce(MemoryWorld(1).transport(0).group("dp", "dp", [0]), plan.samples_of)


def test_weight_gradients_computed_late_and_in_another_order_have_the_same_bits():
    plan = plan_of(samples=4)
    at_once, late = stage_of(plan), stage_of(plan)
    for microbatch in microbatches(plan):
        backward(at_once(microbatch, None))
        with late.weight_work.defer(microbatch.index):
            backward(late(microbatch, None))
    assert late.gradients.num_bytes == 0
    for index in (2, 0, 3, 1):
        late.weight_work.run(index)
    expected = reduced(at_once, plan)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in reduced(late, plan).items())


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_of_a_step_do_not_leak_into_the_next(mode):
    plan = plan_of(mode=mode)
    stage, results = stage_of(plan), []
    for _ in range(2):
        for microbatch in microbatches(plan):
            backward(stage(microbatch, None))
        results.append(reduced(stage, plan))
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_step_without_a_backward_has_no_gradients(mode):
    with pytest.raises(ValueError, match=r"unfinished|no microbatch"):
        reduced(stage_of(plan_of(mode=mode)), plan_of(mode=mode))


def shards_of(transport, plan):
    return {name: (shard.slices, shard.tensor) for name, shard in stage_of(plan, transport).shards.items()}


@pytest.mark.parametrize("tp", [2, 3, 6])
def test_initial_weights_of_any_cut_are_slices_of_the_whole(tp):
    whole = stage_of(plan_of()).shards
    assert whole.keys() == {parameter.name for parameter in parameters(MODEL)}
    seen = dict.fromkeys(whole, 0)
    for shards in run_threads(MemoryWorld(tp), shards_of, plan_of(tp=tp)):
        for name, (slices, tensor) in shards.items():
            assert torch.equal(tensor, whole[name].tensor[slices])
            seen[name] += tensor.numel()
    for parameter in parameters(MODEL):
        assert seen[parameter.name] == parameter.num_elements * (1 if parameter.cut else tp)


class ParallelBlock(nn.Module):
    """Attention and MLP side by side on one norm, with another activation (GPT-J's arrangement)."""

    def __init__(self, context, layer):
        super().__init__()
        self.context = context
        self.norm = context.norm(f"layers.{layer}.attention.norm")
        self.attention = context.attention(layer)
        self.up = context.column_linear(f"layers.{layer}.mlp.up")
        self.down = context.row_linear(f"layers.{layer}.mlp.down")

    def forward(self, x):
        normed = self.norm(x)
        return x + self.attention(normed) + self.down(self.context.elementwise(torch.sigmoid, self.up(normed)))


def parallel_block_gradients(transport, plan):
    stage = stage_of(plan, transport, block=ParallelBlock)
    for microbatch in microbatches(plan):
        backward(stage(microbatch, None))
    gradients = reduced(stage, plan)
    return {name: (stage.shards[name].slices, gradient) for name, gradient in gradients.items()}


def test_a_users_own_block_has_the_same_bits_on_one_and_on_three_ranks():
    (one,) = run_threads(MemoryWorld(1), parallel_block_gradients, plan_of())
    assert "layers.0.mlp.norm.weight" not in one and "layers.0.mlp.up.bias" in one
    for many in run_threads(MemoryWorld(3), parallel_block_gradients, plan_of(tp=3, micro=2)):
        assert many.keys() == one.keys()
        assert all(torch.equal(gradient, one[name][1][slices]) for name, (slices, gradient) in many.items())


def test_a_block_that_names_an_unknown_parameter_learns_the_closest_one():
    with pytest.raises(
        UnknownNameError, match=r"unknown parameter 'layers.0.mlp.upp.weight'; did you mean 'layers.0.mlp.up.weight'"
    ):
        stage_of(plan_of(), block=lambda context, layer: context.column_linear(f"layers.{layer}.mlp.upp"))


class Names:
    """An observer that keeps names and shapes."""

    def __init__(self):
        self.seen = []

    def activation(self, name, microbatch, tokens, tensor):
        assert tensor.requires_grad  # in the graph, so that an observer may ask for its gradient
        self.seen.append((name, microbatch.first_sample, tuple(tensor.shape)))


def test_an_observer_sees_every_hidden_state_in_dataflow_order():
    plan, observer = plan_of(), Names()
    stage = stage_of(plan, observer=observer)
    stage(microbatches(plan)[1], None)
    hidden = (1, 12, 48)
    parts = ("attention.norm", "attention", "mlp.norm", "mlp", "output")
    layers = [(f"layers.{layer}.{part}", 1, hidden) for layer in (0, 1) for part in parts]
    assert observer.seen == [("embedding.output", 1, hidden), *layers, ("head.losses", 1, (1, 12))]
