"""Routers: against a loop over tokens in fp64, against transformers' routers, and bit for bit over cuts of the tokens.

Bound. Logits are sums of H = 32 products; with the softmax (8 terms), the sum of chosen scores and two divisions, a
weight is off by at most 64 u of its size (u = 2^-24) where logits are below 4; gradients add the backward of the same
chain, and 36 tokens at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from helpers.plans import product_plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.model.router import DROPPED, Router, choose, reduce_counts
from shardproof.backend.numerics import make_numerics
from shardproof.backend.tensor_parallel import LayerContext
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.train import Train

UNIT = 2.0**-24
BOUND = 64 * UNIT
GRADIENT_BOUND = 36 * BOUND

SOFTMAX = ModelSpec("softmax", 1, 32, 48, 6, 6, 6, 256, 64, num_experts=8, experts_per_token=2)
WHOLE = replace(SOFTMAX, normalized_router_weights=False, experts_per_token=3, router_scaling=16.0)
LIMITED = replace(WHOLE, num_router_groups=4, router_groups_per_token=2)
SIGMOID = replace(
    SOFTMAX,
    router_scores="sigmoid",
    experts_per_token=3,
    num_router_groups=4,
    router_groups_per_token=3,
    router_group_scores="top_two",
    expert_bias=True,
    router_scaling=2.5,
)
MODELS = {"softmax": SOFTMAX, "whole": WHOLE, "limited": LIMITED, "sigmoid": SIGMOID}
SAMPLES, SEQUENCE = 2, 18
BIAS = torch.tensor([0.3, -0.2, 0.1, 0.0, -0.4, 0.2, 0.05, -0.1])


@dataclass(frozen=True)
class Problem:
    """One router's inputs: [b, s, h] hidden states, [e, h] weights, and [b, s, K] gradients of its weights."""

    x: Tensor
    weight: Tensor
    gradient: Tensor


def problem(model: ModelSpec) -> Problem:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, SEQUENCE, model.hidden_size, generator=generator)
    weight = torch.randn(model.num_experts, model.hidden_size, generator=generator) * 0.2
    return Problem(x, weight, torch.randn(SAMPLES, SEQUENCE, model.experts_per_token, generator=generator))


def plan_of(model: ModelSpec, mode="exact", micro=SAMPLES, dtype="fp32", layout=None, **train) -> Plan:
    return product_plan(
        layout,
        model=model,
        samples=SAMPLES,
        micro=micro,
        sequence=SEQUENCE,
        dtype=dtype,
        mode=mode,
        gradient_token_block=3,
        reduction_token_block=1,
        train=replace(Train(), **train),
    )


@dataclass(frozen=True)
class Routed:
    """What one rank found, for the tokens `places` of every sequence."""

    places: Tensor
    experts: Tensor
    weights: Tensor
    dx: Tensor
    dweight: Tensor
    loss: float
    counts: Tensor | None


def route_rank(
    transport, plan: Plan, step: int | None = 0, given: Problem | None = None, counted_share: float = 1.0
) -> Routed:
    """Forward and backward of all microbatches on one rank."""
    rank, layout = transport.global_rank, plan.layout
    tp, cp = (
        transport.group(f"{axis}/{layout.group_of(rank, axis)[0]}", axis, layout.group_of(rank, axis))
        for axis in ("tp", "cp")
    )
    numerics = make_numerics(plan)
    context = LayerContext(plan, tp=tp, cp=cp, numerics=numerics, recorder=transport.recorder)
    router, inputs = Router(context, 0), problem(plan.model) if given is None else given
    context.shards["layers.0.mlp.router.weight"].load(inputs.weight)
    if router.expert_bias is not None:
        router.expert_bias.copy_(BIAS)
    places, found = context.own_places(), []
    for index, first in enumerate(range(0, SAMPLES, plan.batch.micro_size)):
        rows = slice(first, first + plan.batch.micro_size)
        x = inputs.x[rows][:, places].to(context.dtype).requires_grad_()
        ids = torch.zeros(x.shape[:2], dtype=torch.int64)
        with context.running(Microbatch(index, first, ids, ids, step, counted_share)):
            routing = router(x)
        routing.weights_BSK.backward(inputs.gradient[rows][:, places])
        found.append((routing.experts_BSK, routing.weights_BSK.detach(), x.grad))
    loss = (
        float(sum(router.take_losses(), numerics.sum(())).over(tp).over(cp)) if plan.layout.sequence_parallel else 0.0
    )
    if not plan.layout.sequence_parallel:
        loss = float(sum(router.take_losses(), numerics.sum(())).over(cp))
    reduce_counts([router] if step is not None else [], [tp, cp] if plan.layout.sequence_parallel else [cp])
    solo = transport.group(f"solo/{rank}", "dp", [rank])
    dweight = (
        context.gradients.reduce(solo, lambda member: (0, SAMPLES), tp)["layers.0.mlp.router.weight"]
        if cp.size == 1
        else None
    )
    experts, weights, dx = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Routed(places, experts, weights, dx, dweight, loss, router.step_counts)


def route(plan: Plan, **choices) -> list[Routed]:
    world = MemoryWorld(plan.layout.world_size, timeout_s=60)
    return run_threads(world, lambda transport, _: route_rank(transport, plan, **choices), None)


# By hand, in fp64


def plain_choice(model: ModelSpec, logits: list[float], bias: list[float]) -> list[int]:
    """The experts of one token, ascending; equal scores go to lower ones."""
    total = sum(map(math.exp, logits))
    scores = [1 / (1 + math.exp(-z)) if model.router_scores == "sigmoid" else math.exp(z) / total for z in logits]
    compared = [score + add for score, add in zip(scores, bias, strict=True)]
    open_to = set(range(model.num_experts))
    if model.num_router_groups:
        size = model.num_experts // model.num_router_groups
        groups = [sorted(compared[g * size : (g + 1) * size], reverse=True) for g in range(model.num_router_groups)]
        of_group = [sum(group[: 2 if model.router_group_scores == "top_two" else 1]) for group in groups]
        chosen = sorted(range(len(groups)), key=lambda g: (-of_group[g], g))[: model.router_groups_per_token]
        open_to = {g * size + i for g in chosen for i in range(size)}
    return sorted(sorted(open_to, key=lambda e: (-compared[e], e))[: model.experts_per_token])


def plain_weights(model: ModelSpec, x: Tensor, weight: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [b, s, K] of the chosen experts, scores [b, s, e] and logits, differentiable, in the format of `x`."""
    logits = x @ weight.T
    scores = logits.sigmoid() if model.router_scores == "sigmoid" else logits.softmax(-1)
    chosen = scores.gather(-1, experts)
    if model.normalized_router_weights:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * model.router_scaling, scores, logits


def plain_losses(model: ModelSpec, scores: Tensor, logits: Tensor, aux: float, z: float) -> Tensor:
    """The sum over the tokens of what a router adds to the loss: per sequence, by loops over experts."""
    total = z * logits.logsumexp(-1).square().sum()
    shares = scores / scores.sum(-1, keepdim=True)
    length = scores.shape[1]
    for scores_SE, shares_SE in zip(scores, shares, strict=True):
        best = scores_SE.topk(model.experts_per_token, -1).indices
        for expert in range(model.num_experts):
            fraction = (best == expert).sum() * model.num_experts / (model.experts_per_token * length)
            total = total + aux * length * fraction * shares_SE[:, expert].mean()
    return total


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_choices_weights_losses_and_gradients_are_those_of_a_loop_over_tokens(model, mode):
    inputs = problem(model)
    (routed,) = route(plan_of(model, mode, micro=1, router_aux_loss=0.3, router_z_loss=0.02))
    x, weight = inputs.x.double().requires_grad_(), inputs.weight.double().requires_grad_()
    bias = (BIAS if model.expert_bias else torch.zeros(model.num_experts)).tolist()
    expected = torch.tensor(
        [[plain_choice(model, token, bias) for token in sample] for sample in (x @ weight.T).tolist()]
    )
    assert torch.equal(routed.experts, expected)
    weights, scores, logits = plain_weights(model, x, weight, expected)
    losses = plain_losses(model, scores, logits, 0.3, 0.02)
    ((weights * inputs.gradient).sum() + losses).backward()
    torch.testing.assert_close(routed.weights.double(), weights.detach(), rtol=BOUND, atol=0)
    assert routed.loss == pytest.approx(losses.item(), rel=BOUND)
    for found, wanted in ((routed.dx, x.grad), (routed.dweight, weight.grad)):
        assert (found.double() - wanted).norm() < GRADIENT_BOUND * wanted.norm()
    if model.expert_bias:
        assert torch.equal(routed.counts, torch.bincount(expected.flatten(), minlength=model.num_experts))


def test_losses_count_by_the_share_of_tokens_that_count_so_that_they_stay_means_over_all():
    plan = plan_of(SOFTMAX, router_aux_loss=0.3, router_z_loss=0.02)
    (none,), (half,), (whole,) = (route(plan, counted_share=share) for share in (0.0, 0.5, 1.0))
    assert none.loss == half.loss == whole.loss
    added = whole.dx - none.dx
    assert (half.dx - none.dx - added / 2).norm() < GRADIENT_BOUND * whole.dx.norm()
    assert added.norm() > 0.001 * whole.dx.norm()


def transformers_router(model: ModelSpec):
    """The router of the transformers family that `model` is like."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    shape = {"hidden_size": model.hidden_size, "num_experts_per_tok": model.experts_per_token}
    groups = {"n_group": model.num_router_groups, "topk_group": model.router_groups_per_token}
    scaled = {**shape, "n_routed_experts": model.num_experts, "routed_scaling_factor": model.router_scaling}
    match model.name:
        case "mixtral":
            return modeling.MixtralTopKRouter(MixtralConfig(**shape, num_local_experts=model.num_experts))
        case "qwen3":
            config = Qwen3MoeConfig(
                **shape, num_experts=model.num_experts, norm_topk_prob=model.normalized_router_weights
            )
            return Qwen3MoeTopKRouter(config)
        case "deepseek-v2":
            method = (
                {"topk_method": "group_limited_greedy", **groups}
                if model.num_router_groups
                else {"topk_method": "greedy"}
            )
            return DeepseekV2TopkRouter(DeepseekV2Config(**scaled, **method))
        case _:
            return deepseek_v3_router(DeepseekV3Config(**scaled, **groups, norm_topk_prob=True))


def deepseek_v3_router(config):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.copy_(BIAS)
    return router


@pytest.mark.parametrize(
    "model",
    [
        replace(SOFTMAX, name="mixtral"),
        replace(SOFTMAX, name="qwen3"),
        replace(SOFTMAX, name="qwen3", normalized_router_weights=False),
        replace(WHOLE, name="deepseek-v2"),
        replace(LIMITED, name="deepseek-v2"),
        replace(SIGMOID, name="deepseek-v3"),
    ],
    ids=["mixtral", "qwen3", "qwen3-whole", "deepseek-v2-greedy", "deepseek-v2-limited", "deepseek-v3"],
)
def test_routing_is_that_of_transformers(model):
    inputs, reference = problem(model), transformers_router(model)
    with torch.no_grad():
        reference.weight.copy_(inputs.weight)
        _, weights, experts = reference(inputs.x)
    order = experts.argsort(-1)
    shape = (SAMPLES, SEQUENCE, model.experts_per_token)
    (routed,) = route(plan_of(model))
    assert torch.equal(routed.experts, experts.gather(-1, order).view(shape))
    torch.testing.assert_close(routed.weights, weights.gather(-1, order).view(shape), rtol=2 * BOUND, atol=0)


def test_the_auxiliary_loss_of_one_sequence_is_that_of_transformers_divided_by_the_experts_of_a_token():
    load_balancing = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    inputs = problem(SOFTMAX)
    theirs = [
        load_balancing((sample @ inputs.weight.T,), SOFTMAX.num_experts, SOFTMAX.experts_per_token)
        for sample in inputs.x
    ]
    (routed,) = route(plan_of(SOFTMAX, router_aux_loss=1.0))
    assert routed.loss == pytest.approx(SEQUENCE * float(sum(theirs)) / SOFTMAX.experts_per_token, rel=1e-6)


# Capacity


def plain_retained(experts: Tensor, weights: Tensor, room: int) -> Tensor:
    """Which choices of one sequence [s, K] stay, expert by expert."""
    retained = torch.zeros_like(experts, dtype=torch.bool)
    for expert in set(experts.flatten().tolist()):
        wanting = [(-float(weights[t, k]), t, k) for t, k in (experts == expert).nonzero().tolist()]
        for _, token, slot in sorted(wanting)[:room]:
            retained[token, slot] = True
    return retained


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID], ids=lambda model: model.name)
def test_an_expert_keeps_the_largest_weights_of_each_sequence_up_to_its_capacity(model, factor):
    (free,), (limited,) = route(plan_of(model)), route(plan_of(replace(model, expert_capacity_factor=factor)))
    room = math.ceil(SEQUENCE * model.experts_per_token / model.num_experts * factor)
    retained = torch.stack([plain_retained(*of, room) for of in zip(free.experts, free.weights, strict=True)])
    assert 0 < int((~retained).sum()) < retained.numel()
    assert torch.equal(limited.experts, torch.where(retained, free.experts, DROPPED))
    assert torch.equal(limited.weights, torch.where(retained, free.weights, 0.0))


def test_of_equal_weights_the_earliest_tokens_stay():
    inputs = problem(SOFTMAX)
    equal = replace(inputs, x=inputs.x[:, :1].expand(-1, SEQUENCE, -1).contiguous())
    (routed,) = route(plan_of(replace(SOFTMAX, expert_capacity_factor=1.0)), given=equal)
    room = math.ceil(SEQUENCE * 2 / 8)
    assert bool((routed.experts[:, :room] != DROPPED).all()) and bool((routed.experts[:, room:] == DROPPED).all())


def test_dropped_choices_get_no_gradient():
    inputs, model = problem(SOFTMAX), replace(SOFTMAX, expert_capacity_factor=0.5)
    (routed,) = route(plan_of(model))
    dropped = (routed.experts == DROPPED).all(-1)
    assert bool(dropped.any())
    assert not bool(routed.dx[dropped].any())
    assert bool(routed.dx[~dropped].any(-1).all())
    assert inputs.gradient[dropped].abs().min() > 0


def test_of_equal_scores_the_lowest_experts_and_groups_are_taken():
    scores = torch.zeros(1, 1, 8)
    assert choose(scores, SOFTMAX, None).tolist() == [[[0, 1]]]
    assert choose(scores, LIMITED, None).tolist() == [[[0, 1, 2]]]
    scores[..., 7] = 1.0
    assert choose(scores, LIMITED, None).tolist() == [[[0, 1, 7]]]


# The bias of experts


def test_an_expert_that_had_less_than_the_mean_gains_the_rate_as_megatron_core_has_it():
    model = replace(SOFTMAX, num_experts=2, experts_per_token=1, expert_bias=True)
    router = solo_router(model)
    router.step_counts = torch.tensor([0, 2])
    router.update_bias(torch.tensor(0.25))
    assert router.expert_bias.tolist() == [0.25, -0.25]  # facts/megatron_facts.json, area expert_bias
    assert router.step_counts is None


def test_an_expert_at_the_mean_keeps_its_bias():
    router = solo_router(SIGMOID)
    router.step_counts = torch.tensor([3, 5, 4, 4, 4, 4, 4, 4])
    router.update_bias(torch.tensor(0.001))
    assert router.expert_bias.tolist() == pytest.approx([0.001, -0.001, 0, 0, 0, 0, 0, 0])


def solo_router(model: ModelSpec) -> Router:
    plan = plan_of(model)

    def make(transport, _) -> Router:
        tp = transport.group("tp", "tp", [0])
        return Router(LayerContext(plan, tp=tp, numerics=make_numerics(plan), recorder=transport.recorder), 0)

    return run_threads(MemoryWorld(1, timeout_s=60), make, None)[0]


# Cuts of the tokens


BUSY = {"router_aux_loss": 0.3, "router_z_loss": 0.02, "router_jitter": 0.1}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "micro"),
    [
        (Layout(), 1),
        (Layout(tp=2), 2),
        (Layout(tp=2, sequence_parallel=True), 1),
        (Layout(tp=3, sequence_parallel=True), 2),
        (Layout(tp=6, sequence_parallel=True), 1),
        (Layout(cp=3), 2),
        (Layout(tp=2, cp=3, sequence_parallel=True), 1),
    ],
    ids=lambda value: value.degrees if isinstance(value, Layout) else "",
)
def test_routing_losses_counts_and_gradients_have_the_same_bits_in_every_layout(layout, micro, dtype):
    model = replace(SIGMOID, expert_capacity_factor=1.0)
    (one,) = route(plan_of(model, dtype=dtype, **BUSY))
    assert bool((one.experts == DROPPED).any())
    for routed in route(plan_of(model, micro=micro, dtype=dtype, layout=layout, **BUSY)):
        for name in ("experts", "weights", "dx"):
            assert torch.equal(getattr(routed, name), getattr(one, name)[:, routed.places]), name
        # gradients over context parallelism need the whole rank: tests/verify/dynamic/test_dynamic_router.py
        if layout.cp == 1:
            assert torch.equal(routed.dweight, one.dweight)
        assert routed.loss == one.loss
        assert torch.equal(routed.counts, one.counts)


def test_jitter_scales_the_input_by_no_more_than_its_share_and_not_when_evaluating():
    (plain,), (off,) = (
        route(plan_of(SOFTMAX)),
        route(plan_of(SOFTMAX, router_jitter=0.1, router_aux_loss=1.0), step=None),
    )
    assert torch.equal(plain.weights, off.weights)
    assert off.loss == 0.0
    (first,), (second,) = (route(plan_of(WHOLE, router_jitter=0.1), step=step) for step in (0, 1))
    (still,) = route(plan_of(WHOLE))
    assert not torch.equal(first.weights, second.weights)
    same = (first.experts == still.experts).all(-1)
    change = (first.weights[same] / still.weights[same]).log().abs()
    inputs = problem(WHOLE)
    largest = 2 * 0.1 * (inputs.x.abs() @ inputs.weight.abs().T).max()  # of a logit, and of log sum exp
    assert 0 < change.max() < largest
