"""Attention variants and multi-token prediction against the decoder as one writes it from the papers, in
fp64 with torch's autograd.

Bound as in `test_model_oracle.py`: first-order errors of a chain add up, each at most K u of its operands' norms.
The longest chain here is 3 layers (one of them of multi-token prediction) of 8 products each and its norms, forward
and backward: 2 * (3 * 14 + 6) = 96 operations of at most 96 terms (4 samples of 24 tokens), 96 * 96 * 2^-24 =
5.5e-4 of a gradient's norm.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.gradients.gradients import finish_tied
from shardproof.backend.model.attention_core import AttentionCore
from shardproof.backend.model.multi_token import later_targets
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.tensor_parallel import LayerContext
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE, parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision

BOUND = 96 * 96 * 2.0**-24
SAMPLES, SEQUENCE = 4, 24

QWEN = ModelSpec("qwen", 2, 32, 48, 6, 3, 8, 61, 64, qkv_bias=True, qk_norm=True)
LAYERNORMED = ModelSpec(
    "layernormed", 2, 32, 48, 4, 4, 8, 61, 64, qk_norm=True, norm="layernorm", bias=True, position="learned"
)
LLAMA3 = ModelSpec(
    "llama3",
    2,
    32,
    48,
    4,
    2,
    16,
    61,
    64,
    rope_theta=100.0,
    rope_scaling="llama3",
    rope_factor=4.0,
    rope_original_positions=32,
)
LATENT = ModelSpec(
    "latent",
    2,
    32,
    48,
    3,
    3,
    12,
    61,
    64,
    q_lora_rank=10,
    kv_lora_rank=14,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
YARN = replace(
    LATENT,
    name="latent-yarn",
    q_lora_rank=0,
    bias=True,
    norm="layernorm",
    rope_theta=50.0,
    rope_scaling="yarn",
    rope_factor=8.0,
    rope_original_positions=16,
    rope_beta_fast=2.0,
    rope_mscale=0.5,
    rope_mscale_all_dim=1.0,
)
AHEAD = ModelSpec("ahead", 1, 32, 48, 4, 2, 8, 61, 64, num_mtp_layers=2)
TIED = ModelSpec(
    "ahead-tied", 2, 32, 48, 4, 4, 8, 61, 64, num_mtp_layers=1, tied_embeddings=True, position="learned", bias=True
)
WINDOWED = ModelSpec("windowed", 2, 32, 48, 4, 2, 8, 61, 64, sliding_window=5)
LATENT_WINDOWED = replace(LATENT, name="latent-windowed", sliding_window=3)
MODELS = [QWEN, LAYERNORMED, LLAMA3, LATENT, YARN, AHEAD, TIED, WINDOWED, LATENT_WINDOWED]


def plan_of(model, mode):
    return plan(model=model, samples=SAMPLES, micro=2, sequence=SEQUENCE, mode=mode, mtp_loss_weight=0.7)


def inputs(model):
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, model.vocab_size, (SAMPLES, SEQUENCE + 1), generator=generator)
    weights = {
        p.name: torch.randn(p.shape, generator=generator) * (0.15 if len(p.shape) == 2 else 0.3) + (p.constant or 0.0)
        for p in parameters(model)
    }
    return weights, text[:, :-1], text[:, 1:]


def our_step(transport, choice):
    model, mode = choice
    plan = plan_of(model, mode)
    group = transport.group("tp", "tp", [0])
    stage = Stage(plan, plan.stages[0], tp=group, numerics=make_numerics(plan), recorder=transport.recorder)
    weights, tokens, targets = inputs(model)
    stage.load(weights)
    later = later_targets(targets, model.num_mtp_layers, -100)
    losses = []
    for index in range(SAMPLES // 2):
        rows = slice(2 * index, 2 * index + 2)
        output = stage(Microbatch(index, rows.start, tokens[rows], targets[rows], later=later[rows]), None)
        torch.autograd.backward(output, torch.ones_like(output))
        losses.append(output.detach())
    found = stage.gradients.reduce(transport.group("dp", "dp", [0]), plan.samples_of)
    if model.shares_table:
        found[TOKEN_TABLE] = finish_tied(found.pop(f"{TOKEN_TABLE}@embedding"), found.pop(f"{TOKEN_TABLE}@output"))
    return torch.cat(losses), found


def plain_step(model, weights, tokens, targets):
    """Losses [samples, s] of the next token, and gradients of their sum with 0.7 / modules
    times those further ahead."""
    w = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    x = w[TOKEN_TABLE][tokens]
    if model.position == "learned":
        x = x + w["embedding.positions.weight"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        x = plain_layer(model, w, layer, x)
    table = w[TOKEN_TABLE if model.tied_embeddings else "head.output.weight"]
    x = plain_norm(model, w, "head.norm", x)
    losses = plain_losses(x @ table.T, targets)
    total = losses.sum()
    for depth in range(model.num_mtp_layers):
        name, seen = f"mtp.{depth}", tokens.shape[1] - depth - 1  # only tokens that have something to predict
        x = x[:, :seen] if depth == 0 else x[:, :-1]
        embedded = w[TOKEN_TABLE][targets[:, depth : depth + seen]]
        joined = torch.cat(
            [plain_norm(model, w, f"{name}.embedding_norm", embedded), plain_norm(model, w, f"{name}.hidden_norm", x)],
            -1,
        )
        x = plain_layer(model, w, model.num_layers + depth, joined @ w[f"{name}.projection.weight"].T)
        x = plain_norm(model, w, f"{name}.norm", x)
        ahead = plain_losses(x @ table.T, targets[:, depth + 1 :])
        total = total + 0.7 / model.num_mtp_layers * ahead.sum()
    total.backward()
    return losses.detach(), {name: weight.grad for name, weight in w.items()}


def plain_losses(logits, targets):
    return torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def plain_layer(model, w, layer, x):
    name = f"layers.{layer}"
    attention = plain_latent if model.is_mla else plain_grouped
    x = x + attention(model, w, f"{name}.attention", plain_norm(model, w, f"{name}.attention.norm", x))
    up = plain_linear(w, f"{name}.mlp.up", plain_norm(model, w, f"{name}.mlp.norm", x))
    return x + plain_linear(w, f"{name}.mlp.down", F.silu(up[..., 0::2]) * up[..., 1::2])


def plain_linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def plain_norm(model, w, name, x):
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
        return (
            x / (x.var(-1, unbiased=False, keepdim=True) + model.norm_eps).sqrt() * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )
    return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * w[f"{name}.weight"]


def plain_grouped(model, w, name, x):
    """Query heads 0..r-1 of a group, then its key and its value head."""
    d, r = model.head_dim, model.query_heads_per_group
    heads = plain_linear(w, f"{name}.qkv", x).view(*x.shape[:2], model.num_kv_heads, r + 2, d)
    q, k, v = heads[..., :r, :], heads[..., r : r + 1, :], heads[..., r + 1 :, :]
    if model.qk_norm:
        q, k = plain_norm(model, w, f"{name}.query_norm", q), plain_norm(model, w, f"{name}.key_norm", k)
    if model.position == "rope":
        q, k = plain_turned(model, q), plain_turned(model, k)
    q, k, v = q.flatten(2, 3), k.expand_as(q).flatten(2, 3), v.expand_as(q).flatten(2, 3)
    return plain_linear(w, f"{name}.output", plain_core(model, q, k, v, 1 / math.sqrt(d)))


def plain_latent(model, w, name, x):
    """DeepSeek-V2, equations 37-47."""
    shape, nope = (*x.shape[:2], model.num_heads), model.qk_nope_head_dim
    if model.q_lora_rank:
        low = plain_norm(model, w, f"{name}.q_norm", plain_linear(w, f"{name}.q_down", x))
        q = plain_linear(w, f"{name}.q_up", low).view(*shape, -1)
    else:
        q = plain_linear(w, f"{name}.q", x).view(*shape, -1)
    down = plain_linear(w, f"{name}.kv_down", x)
    latent, shared = down[..., : model.kv_lora_rank], down[..., model.kv_lora_rank :]
    pairs = plain_linear(w, f"{name}.kv_up", plain_norm(model, w, f"{name}.kv_norm", latent)).view(*shape, -1)
    shared = plain_turned(model, shared.unsqueeze(2)).expand(*shape, -1)
    q = torch.cat([q[..., :nope], plain_turned(model, q[..., nope:])], -1)
    k = torch.cat([pairs[..., :nope], shared], -1)
    growth = 0.1 * model.rope_mscale_all_dim * math.log(model.rope_factor) + 1 if model.rope_scaling == "yarn" else 1.0
    return plain_linear(
        w, f"{name}.output", plain_core(model, q, k, pairs[..., nope:], growth**2 / math.sqrt(model.head_dim))
    )


def plain_core(model, q, k, v, scale):
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = (behind >= 0) & (behind < (model.sliding_window or 999))
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)


def plain_turned(model, x):
    """Halves of the last dimension as real and imaginary parts, turned by position times frequency; see the two
    papers for scaled ones."""
    half, theta = x.shape[-1] // 2, model.rope_theta
    turns = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    growth = 1.0
    if model.rope_scaling == "llama3":
        waves = model.rope_original_positions * turns / (2 * math.pi)
        smooth = ((waves - 1) / (4 - 1)).clamp(0, 1)
        turns = turns * smooth + turns / model.rope_factor * (1 - smooth)
    # wavelengths of 16 tokens over 2 turns and over 1: pairs 0.59 and 0.94, so the ramp is from 0 to 1
    elif model.rope_scaling == "yarn":
        keep = torch.tensor([1.0 if i == 0 else 0.0 for i in range(half)], dtype=torch.float64)
        turns = turns * keep + turns / model.rope_factor * (1 - keep)
        growth = (0.1 * model.rope_mscale * math.log(8) + 1) / (0.1 * model.rope_mscale_all_dim * math.log(8) + 1)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), turns)[None, :, None]
    while angles.dim() < x.dim():
        angles = angles.unsqueeze(2)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles) * growth
    return torch.cat([turned.real, turned.imag], -1)


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_losses_and_all_gradients_agree_with_plain_torch_in_fp64(model, mode):
    losses, gradients = run_threads(MemoryWorld(1, timeout_s=60), our_step, (model, mode))[0]
    wanted, expected = plain_step(model, *inputs(model))
    assert relative(losses, wanted) < BOUND
    assert gradients.keys() == expected.keys() == {p.name for p in parameters(model)}
    for name, gradient in expected.items():
        if gradient.norm() < 1e-12:  # a bias of all keys adds the same to all scores of a query
            assert name.endswith("key_norm.bias") and gradients[name].norm() < BOUND
            continue
        assert relative(gradients[name], gradient) < BOUND, name


@pytest.mark.parametrize("window", [1, 16, 700])
def test_a_window_far_behind_the_first_keys_has_no_empty_softmax(window):
    """The library's kernel takes 512 keys at a time; the first of them are all hidden from late queries."""
    model = ModelSpec("long", 1, 8, 8, 1, 1, 8, 61, 2048, sliding_window=window)
    plan = Plan(
        model,
        cluster_preset("this-host", 1),
        Layout(),
        Batch(1, 1, 1200),
        precision=Precision("fp32"),
        numerics=Numerics("exact"),
    )
    q, k, v = (
        torch.randn(1, 1, 1200, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3)
    )

    def run(transport, _):
        group = transport.group("tp", "tp", [0])
        context = LayerContext(plan, tp=group, numerics=make_numerics(plan), recorder=transport.recorder)
        with context.running(
            Microbatch(0, 0, torch.zeros(1, 1200, dtype=torch.int64), torch.zeros(1, 1200, dtype=torch.int64))
        ):
            return AttentionCore(context, "core", 0)(q, k, v)

    y = run_threads(MemoryWorld(1, timeout_s=60), run, None)[0]
    found = torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = plain_core(model, *wide, 1 / math.sqrt(8))
    assert relative(y.transpose(1, 2).flatten(2), expected.detach()) < BOUND
    for ours, theirs in zip(found, torch.autograd.grad(expected, wide, torch.ones_like(expected)), strict=True):
        assert (ours.double().transpose(1, 2) - theirs).abs().max() < BOUND


def test_nothing_is_predicted_behind_the_end_of_a_sequence_or_of_a_document():
    targets = torch.tensor([[5, 6, 7, 8]])
    begins = torch.tensor([[0, 0, 2, 2]])
    assert later_targets(targets, 2, -1)[0].T.tolist() == [[6, 7, 8, -1], [7, 8, -1, -1]]
    assert later_targets(targets, 2, -1, begins)[0].T.tolist() == [[6, -1, 8, -1], [-1, -1, -1, -1]]
