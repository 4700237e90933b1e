"""The one-device run is ordinary: it agrees with a plain torch model (torch autograd,
`F.cross_entropy`) in fp64 and fp32.

Bound. A product that sums K terms is off by at most K u of its operands' norms (u = 2^-24), and first-order errors add
along a chain. The longest chain of this model is forward and backward through 2 layers of 5 products, the head and the
final sum over tokens, the longest sum has K = 108 terms (6 samples of 18 tokens; hidden, ffn and vocabulary are
shorter). With norms, softmax and activations counted as products of the same length, 2 * (2 * 8 + 3) = 38 operations of
108 u each give 2.5e-4, relative to a gradient's norm.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE, parameters

BOUND = 38 * 108 * 2.0**-24

GPT = ModelSpec(
    "gpt",
    2,
    48,
    96,
    6,
    6,
    8,
    101,
    64,
    activation="gelu",
    norm="layernorm",
    position="learned",
    tied_embeddings=True,
    bias=True,
)
LLAMA = ModelSpec("llama-gqa", 2, 48, 100, 12, 6, 8, 101, 64)
MIXED = ModelSpec("mixed", 2, 48, 60, 6, 2, 8, 64, 64, activation="gelu_tanh", norm="layernorm", bias=True)
SQUARED = ModelSpec(
    "squared", 2, 48, 52, 4, 4, 10, 37, 64, activation="relu_squared", position="learned", tied_embeddings=True
)
GEGLU = ModelSpec("geglu", 2, 48, 60, 6, 2, 8, 64, 64, activation="geglu")
MODELS = [GPT, LLAMA, MIXED, SQUARED, GEGLU]


def plain_logits(model, weights, tokens):
    """The decoder as one would write it from the papers, with materialised attention."""
    x = F.embedding(tokens, weights[TOKEN_TABLE])
    if model.position == "learned":
        x = x + weights["embedding.positions.weight"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        for half, name in ((plain_attention, f"layers.{layer}.attention"), (plain_mlp, f"layers.{layer}.mlp")):
            x = x + half(model, weights, name, plain_norm(model, weights, f"{name}.norm", x))
    x = plain_norm(model, weights, "head.norm", x)
    return x @ weights[TOKEN_TABLE if model.tied_embeddings else "head.output.weight"].T


def plain_norm(model, weights, name, x):
    if model.norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], model.norm_eps)
    return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]


def plain_attention(model, weights, name, x):
    b, s, _ = x.shape
    r, d = model.query_heads_per_group, model.head_dim
    rows = F.linear(x, weights[f"{name}.qkv.weight"], weights.get(f"{name}.qkv.bias")).view(
        b, s, model.num_kv_heads, r + 2, d
    )
    q, k, v = rows[:, :, :, :r], rows[:, :, :, r : r + 1], rows[:, :, :, r + 1 :]
    if model.position == "rope":
        q, k = plain_rope(model, q), plain_rope(model, k)
    scores = torch.einsum("bigrd,bjgtd->bgrij", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("bgrij,bjgtd->bigrd", scores.softmax(-1), v).reshape(b, s, -1)
    return F.linear(mixed, weights[f"{name}.output.weight"], weights.get(f"{name}.output.bias"))


def plain_rope(model, x):
    """Pairs (i, i + d/2) as complex numbers times e^(i position theta^(-2i/d))."""
    half = model.head_dim // 2
    angles = torch.outer(
        torch.arange(x.shape[1]), model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    )
    factors = torch.polar(torch.ones_like(angles), angles)[:, None, None].to(x.dtype.to_complex())
    turned = torch.complex(x[..., :half], x[..., half:]) * factors
    return torch.cat([turned.real, turned.imag], -1)


def plain_mlp(model, weights, name, x):
    up = F.linear(x, weights[f"{name}.up.weight"], weights.get(f"{name}.up.bias"))
    match model.activation:
        case "swiglu":
            up = F.silu(up[..., 0::2]) * up[..., 1::2]
        case "geglu":
            up = F.gelu(up[..., 0::2]) * up[..., 1::2]
        case "relu_squared":
            up = F.relu(up) ** 2
        case activation:
            up = F.gelu(up, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.linear(up, weights[f"{name}.down.weight"], weights.get(f"{name}.down.bias"))


def plain_step(model, weights, tokens, targets, dtype):
    """Loss per token and gradients of their sum, by torch's autograd."""
    leaves = {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}
    logits = plain_logits(model, leaves, tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    losses.sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_losses_and_gradients_agree_with_plain_torch_within_the_bound(run_stage, step_inputs, model, mode, dtype):
    run = run_stage(model, mode=mode, micro=2)
    losses, gradients = plain_step(model, *step_inputs(model, micro=2), dtype)
    assert relative(run.losses, losses) < BOUND
    assert run.gradients.keys() == gradients.keys() == {p.name for p in parameters(model)}
    for name, gradient in gradients.items():
        assert relative(run.gradients[name], gradient) < BOUND, name


@pytest.mark.parametrize(("tp", "dp", "micro"), [(1, 1, 2), (2, 1, 1), (2, 3, 1), (1, 2, 3)])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_fast_numerics_stay_within_twice_the_bound_of_exact_ones(run_stage, model, tp, dp, micro):
    exact, fast = run_stage(model), run_stage(model, mode="fast", tp=tp, dp=dp, micro=micro)
    assert abs(fast.loss / exact.loss - 1) < 2 * BOUND
    for name, gradient in exact.gradients.items():
        assert relative(fast.gradients[name], gradient) < 2 * BOUND, name
