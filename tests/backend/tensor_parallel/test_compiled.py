"""Kernels for the compiler against autograd of torch's own functions, as plain functions and, once, compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardproof.backend.model.compiled_rotary import joined_turned_back, turned_parts
from shardproof.backend.model.rotary import turned
from shardproof.backend.numerics import make_numerics
from shardproof.backend.numerics.compiled import check_compiler
from shardproof.backend.tensor_parallel.compiled_gate import gated_backward, gated_forward
from shardproof.backend.tensor_parallel.compiled_norm import layer_backward, layer_forward, rms_backward, rms_forward
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.plan import Plan
from shardproof.verify.dynamic.proof import prove

EPS = 1e-5
WIDTH = 24


def plain(kernel):
    """The function that is compiled."""
    return kernel.__wrapped__


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_norms_and_their_gradients_are_those_of_autograd() -> None:
    x, dy, weight, bias = drawn(2, 5, WIDTH), drawn(2, 5, WIDTH, seed=1), drawn(WIDTH, seed=2), drawn(WIDTH, seed=3)
    x, weight, bias = (each.requires_grad_() for each in (x + 1, weight, bias))
    y = F.rms_norm(x, (WIDTH,), weight, EPS)
    found, rstd = plain(rms_forward)(x.detach(), weight.detach(), EPS)
    near(found, y.detach())
    for one, other in zip(
        plain(rms_backward)(dy, x.detach(), rstd, weight.detach()), torch.autograd.grad(y, [x, weight], dy), strict=True
    ):
        near(one, other)
    y = F.layer_norm(x, (WIDTH,), weight, bias, EPS)
    found, mean, rstd = plain(layer_forward)(x.detach(), weight.detach(), bias.detach(), EPS)
    near(found, y.detach())
    given = dy, x.detach(), mean, rstd, weight.detach()
    for one, other in zip(plain(layer_backward)(*given), torch.autograd.grad(y, [x, weight, bias], dy), strict=True):
        near(one, other)


@pytest.mark.parametrize(("name", "activate"), [("swiglu", F.silu), ("geglu", F.gelu)])
def test_gated_activations_and_their_gradients_are_those_of_autograd(name, activate) -> None:
    gate, up, dy = (drawn(3, WIDTH, seed=seed).requires_grad_(seed < 2) for seed in range(3))
    y = activate(gate) * up
    near(plain(gated_forward)(gate.detach(), up.detach(), name), y.detach())
    found = plain(gated_backward)(dy, gate.detach(), up.detach(), name)
    for one, other in zip(found, torch.autograd.grad(y, [gate, up], dy), strict=True):
        near(one, other)


def test_turns_are_those_of_the_eager_rotation_and_back() -> None:
    parts = [drawn(1, 5, 2, heads, 8, seed=heads) for heads in (3, 1, 1)]
    angles = drawn(1, 5, 1, 1, 4)
    cos, sin = angles.cos().repeat(1, 1, 1, 1, 2), angles.sin()
    q, k, v = plain(turned_parts)(parts, cos, sin)
    near(q, turned(parts[0], cos, sin))
    near(k, turned(parts[1], cos, sin))
    assert torch.equal(v, parts[2])
    near(plain(joined_turned_back)((q, k, v), cos, sin), torch.cat(parts, 3))


PLAN = """
[model]
preset = "tiny-llama"
[cluster]
preset = "this-host"
num_devices = 2
[layout]
tp = 2
[batch]
global = 2
sequence = 32
[precision]
dtype = "bf16"
[numerics]
mode = "fast"
[runtime]
compile = true
[train]
steps = 2
"""


def test_exact_numerics_are_not_compiled() -> None:
    plan = Plan.from_toml(PLAN)
    assert unsupported(plan) == [] and make_numerics(plan).compiles
    exact = replace(plan, numerics=replace(plan.numerics, mode="exact"))
    assert [each for each in unsupported(exact) if "runtime.compile=true" in each]


def test_a_missing_compiler_is_said_in_a_sentence(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PlanError, match="needs a C\\+\\+ compiler"):
        check_compiler(torch.device("cpu"))


@pytest.mark.full
def test_compiled_steps_are_within_the_bounds_of_fast_numerics() -> None:
    proof = prove(Plan.from_toml(PLAN), transport="shm", steps=2)
    assert proof.ok and proof.report["fast"], proof.findings
