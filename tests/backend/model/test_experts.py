"""Mixture of experts against a loop over tokens in fp64, and what every rank records against `core.program`.

Bound. As in `test_model_oracle`: a product that sums K terms is off by at most K u of its operands' norms (u =
2^-24), and first-order errors add along a chain. A layer with experts has the dense chain and besides it the
router's product and softmax, so 2 * (2 * 11 + 3) = 50 operations of at most 108 terms (six samples of 18 tokens),
relative to a gradient's norm.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from helpers.gates import in_both_modes
from helpers.plans import product_plan
from helpers.program import assert_every_action_records_the_program, recorded_step
from helpers.stage import spread_weights, tokens_of, whole_gradients
from shardproof import lower
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.gradients.gradients import ExpertCopies
from shardproof.backend.model import router
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.tensor_parallel.exchange import ExpertGroups
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.transport.mesh import Mesh
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE, parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Collective, Product
from shardproof.core.program.expert_tokens import expert_nodes
from shardproof.core.schedule.action import Kind

BOUND = 50 * 108 * 2.0**-24
LLAMA = ModelSpec(
    *("llama-moe", 2, 48, 64, 4, 4, 12, 101, 64),
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=24,
    num_shared_experts=1,
    first_dense_layers=1,
)
GPT = ModelSpec(
    *("gpt-moe", 2, 48, 40, 6, 6, 8, 101, 64),
    activation="gelu",
    norm="layernorm",
    position="learned",
    bias=True,
    num_experts=6,
    experts_per_token=3,
    normalized_router_weights=False,
    router_scaling=1.5,
)
CAPPED = replace(LLAMA, name="capped", expert_capacity_factor=0.75)


def plan_of(
    model, mode="exact", *, samples=6, sequence=18, micro=1, dtype="fp32", recompute=None, schedule="1F1B", **degrees
) -> Plan:
    return product_plan(
        model=model,
        samples=samples,
        micro=micro,
        sequence=sequence,
        dtype=dtype,
        recompute=recompute,
        schedule=schedule,
        mode=mode,
        gradient_token_block=8,
        reduction_token_block=4,
        **degrees,
    )


def gradients_rank(transport, plan):
    """Losses, and finished gradients of this rank's slices, of one step from `spread_weights`."""
    mesh = Mesh(transport, plan.layout, lower(schedule_for(plan)), experts=True)
    numerics = make_numerics(plan)
    groups = ExpertGroups(mesh.etp, mesh.ep)
    stage = Stage(plan, plan.stages[0], tp=mesh.tp, numerics=numerics, recorder=transport.recorder, experts=groups)
    stage.load(spread_weights(plan.model))
    tokens, targets = tokens_of(plan)
    lo, hi = plan.samples_of(mesh.coordinates["dp"])
    losses = []
    for index, first in enumerate(range(lo, hi, plan.batch.micro_size)):
        rows = slice(first, first + plan.batch.micro_size)
        output = stage(Microbatch(index, first, tokens[rows], targets[rows]), None)
        torch.autograd.backward(output, torch.ones_like(output))
        losses.append(output.detach())
    group = mesh.expert_copies(0)
    copies = ExpertCopies(group, tuple(expert_nodes(plan, 0, rank) for rank in group.ranks))
    gradients = stage.gradients.reduce(mesh.dp, plan.samples_of, mesh.tp_gradients, copies)
    return torch.cat(losses), gradients, {name: stage.shards[name].slices for name in gradients}


def step_of(plan):
    """Losses [samples, s] and full gradients by name; pieces that several ranks hold are equal to the bit."""
    results = run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), gradients_rank, plan)
    full = whole_gradients(plan.model, [(gradients, slices) for _, gradients, slices in results])
    firsts = [plan.layout.global_rank(dp=dp) for dp in range(plan.layout.dp)]
    return torch.cat([results[rank][0] for rank in firsts]), full


# The oracle: plain torch, one token and one expert at a time


def plain_step(model, weights, tokens, targets):
    leaves = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    x = F.embedding(tokens, leaves[TOKEN_TABLE])
    if model.position == "learned":
        x = x + leaves["embedding.positions.weight"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        name = f"layers.{layer}"
        x = x + plain_attention(
            model, leaves, f"{name}.attention", plain_norm(model, leaves, f"{name}.attention.norm", x)
        )
        normed = plain_norm(model, leaves, f"{name}.mlp.norm", x)
        moe = model.layer_is_moe(layer)
        x = x + (
            plain_moe(model, leaves, f"{name}.mlp", normed) if moe else plain_mlp(model, leaves, f"{name}.mlp", normed)
        )
    logits = plain_norm(model, leaves, "head.norm", x) @ leaves["head.output.weight"].T
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    losses.sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def plain_norm(model, weights, name, x):
    if model.norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], model.norm_eps)
    return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]


def plain_attention(model, weights, name, x):
    b, s, _ = x.shape
    rows = F.linear(x, weights[f"{name}.qkv.weight"], weights.get(f"{name}.qkv.bias")).view(
        b, s, model.num_kv_heads, 3, model.head_dim
    )
    q, k, v = (each.transpose(1, 2) for each in rows.unbind(3))
    if model.position == "rope":
        half = model.head_dim // 2
        angles = torch.outer(torch.arange(s), model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half))
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotated(y):
            z = torch.complex(y[..., :half], y[..., half:]) * turn
            return torch.cat([z.real, z.imag], -1)

        q, k = rotated(q), rotated(k)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return F.linear(mixed, weights[f"{name}.output.weight"], weights.get(f"{name}.output.bias"))


def plain_mlp(model, weights, name, x):
    up = F.linear(x, weights[f"{name}.up.weight"], weights.get(f"{name}.up.bias"))
    hidden = F.silu(up[..., 0::2]) * up[..., 1::2] if model.activation == "swiglu" else F.gelu(up)
    return F.linear(hidden, weights[f"{name}.down.weight"], weights.get(f"{name}.down.bias"))


def plain_moe(model, weights, name, x):
    """Softmax over all experts, the best few; in each sequence an expert takes so many tokens at most,
    those that want it most."""
    room = x.shape[1]
    if model.expert_capacity_factor is not None:
        share = x.shape[1] * model.experts_per_token / model.num_experts
        room = min(room, -int(-share * model.expert_capacity_factor // 1))
    samples = []
    for x_SH in x:
        scores = (x_SH @ weights[f"{name}.router.weight"].T).softmax(-1)
        best = scores.topk(model.experts_per_token, -1)
        chosen = best.values / best.values.sum(-1, keepdim=True) if model.normalized_router_weights else best.values
        chosen = chosen * model.router_scaling
        asking = {expert: [] for expert in range(model.num_experts)}
        for token in range(len(x_SH)):
            for place, expert in enumerate(best.indices[token].tolist()):
                asking[expert].append((-chosen[token, place].item(), token, place))
        served = {(token, place) for wanted in asking.values() for _, token, place in sorted(wanted)[:room]}
        rows = []
        for token, x_H in enumerate(x_SH):
            y_H = torch.zeros_like(x_H)
            for place, expert in enumerate(best.indices[token].tolist()):
                if (token, place) in served:
                    own = {
                        key.removeprefix(f"{name}.experts."): value[expert]
                        for key, value in weights.items()
                        if f"{name}.experts" in key
                    }
                    y_H = y_H + chosen[token, place] * plain_mlp(
                        model, {f"e.{key}": value for key, value in own.items()}, "e", x_H
                    )
            rows.append(y_H)
        samples.append(torch.stack(rows))
    y = torch.stack(samples)
    return y + plain_mlp(model, weights, f"{name}.shared", x) if model.num_shared_experts else y


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def oracle():
    cache = {}

    def of(model):
        if model not in cache:
            cache[model] = plain_step(model, spread_weights(model), *tokens_of(plan_of(model)))
        return cache[model]

    return of


EP = {"dp": 2, "ep": 2, "micro": 3}
SP = {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
NARROW = {"tp": 3, "dp": 2, "ep": 6, "etp": 1}


@pytest.mark.parametrize(
    ("model", "mode", "choices"),
    [
        pytest.param(LLAMA, "exact", {"micro": 2}, id="llama-exact"),
        pytest.param(LLAMA, "fast", {"micro": 2}, id="llama-fast"),
        pytest.param(LLAMA, "fast", EP, id="llama-fast-ep2"),
        pytest.param(LLAMA, "fast", SP, id="llama-fast-etp2-ep2-sp"),
        pytest.param(GPT, "exact", {}, id="gpt-exact"),
        pytest.param(GPT, "fast", NARROW, id="gpt-fast-tp3-ep6"),
        pytest.param(CAPPED, "exact", {"micro": 3}, id="capped-exact"),
        pytest.param(CAPPED, "fast", EP, id="capped-fast-ep2"),
    ],
)
def test_losses_and_gradients_agree_with_a_loop_over_tokens_in_fp64_within_the_bound(oracle, model, mode, choices):
    losses, gradients = step_of(plan_of(model, mode, **choices))
    expected_losses, expected = oracle(model)
    assert relative(losses, expected_losses) < BOUND
    assert gradients.keys() == expected.keys() == {p.name for p in parameters(model)}
    for name, gradient in gradients.items():
        assert relative(gradient, expected[name]) < BOUND, name


def test_capacity_drops_choices_and_an_expert_without_tokens_has_no_gradient(oracle):
    assert not torch.equal(oracle(LLAMA)[0], oracle(CAPPED)[0])
    idle = replace(LLAMA, num_experts=48, expert_ffn_hidden_size=8)
    _, gradients = step_of(plan_of(idle, samples=1, sequence=6, dp=1))
    by_expert = gradients["layers.1.mlp.experts.up.weight"].abs().sum((1, 2))
    assert 0 < (by_expert > 0).sum() <= 12


# What ranks record


def balanced(scores_BSE, model, bias, *, grouped=True):
    """Every four tokens in a row take every one of eight experts once, in pairs."""
    samples, tokens, experts = scores_BSE.shape
    places = torch.arange(tokens * model.experts_per_token).view(tokens, -1) % experts
    return places.sort(-1).values.expand(samples, -1, -1).contiguous()


MODULES = Recompute("selective", modules=("moe", "shared_experts"))
RECORDED = [
    pytest.param({}, id="one-device"),
    pytest.param({"dp": 2, "ep": 2, "micro": 2}, id="ep2-micro2"),
    pytest.param({"dp": 4, "ep": 2}, id="ep2-of-dp4"),
    pytest.param({"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}, id="etp2-ep2-sp"),
    pytest.param({"tp": 2, "dp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}, id="ep4-sp"),
    pytest.param({"tp": 2, "dp": 2, "ep": 2}, id="etp2-ep2"),
    pytest.param({"tp": 2, "ep": 2, "etp": 1}, id="tp2-ep2"),
    pytest.param({"tp": 2, "dp": 2, "sequence_parallel": True}, id="etp2"),
    pytest.param({"pp": 2, "dp": 2, "ep": 2, "schedule": "ZBH1"}, id="split-backward-ep2"),
    pytest.param({"pp": 2, "dp": 2, "schedule": "DualPipe"}, id="dualpipe"),
    pytest.param({"dp": 2, "ep": 2, "recompute": MODULES}, id="moe-recomputed"),
    pytest.param({"dp": 2, "ep": 2, "recompute": Recompute("full")}, id="all-recomputed"),
    pytest.param({"tp": 2, "dp": 2, "ep": 2, "dtype": "bf16", "sequence_parallel": True}, id="bf16"),
    pytest.param({"cp": 2, "ep": 2, "sequence": 32}, id="cp2-ep2"),
    pytest.param({"cp": 2, "dp": 2, "ep": 2, "sequence": 32}, id="cp2-dp2-ep2"),
    pytest.param({"tp": 2, "cp": 2, "ep": 4, "etp": 1, "sequence": 32, "sequence_parallel": True}, id="tp2-cp2-ep4-sp"),
    pytest.param({"cp": 2, "sequence": 32}, id="cp2-sequences-in-two-copies"),
]


@pytest.mark.parametrize(("choices", "mode"), in_both_modes(RECORDED, fast_on_push=4))
def test_every_action_of_a_step_with_balanced_experts_records_the_program(monkeypatch, choices, mode):
    monkeypatch.setattr(router, "choose", balanced)
    model = replace(LLAMA, vocab_size=256)
    assert_every_action_records_the_program(plan_of(model, mode, **{"samples": 8, "sequence": 16, **choices}))


def test_routing_as_it_comes_moves_the_same_bytes_in_all_and_multiplies_as_many_rows():
    """Over all ranks: every copy is multiplied once, and what leaves a rank for others is what
    is not at home already."""
    model = replace(LLAMA, vocab_size=256)
    plan = plan_of(model, "fast", samples=4, sequence=16, dp=4, ep=4)
    rows, sent = 0, 0
    for events in run_threads(MemoryWorld(4, timeout_s=60), recorded_step, plan):
        for action, operation in events:
            forward = action is not None and action.kind is Kind.F
            if forward and isinstance(operation, Product) and operation.layer == "layers.1.mlp.experts.up":
                rows += operation.m * operation.count
            if isinstance(operation, Collective) and operation.layer == "layers.1.mlp.combine":
                sent += operation.sent_bytes
    copies = 4 * 16 * 2
    assert copies <= rows <= copies + 4 * 1  # a mean of two experts is rounded up on each of four ranks
    assert 0 < sent < 2 * copies * 48 * 4 and sent % (48 * 4) == 0
