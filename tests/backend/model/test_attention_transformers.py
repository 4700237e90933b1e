"""Capped scores and sinks are what `transformers` makes of them in Gemma 2 and in gpt-oss, forward and backward.

Bound: fp32 next to fp64, of some hundred roundings of 6e-8 each.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.model.attention_core import AttentionCore
from shardproof.backend.numerics import make_numerics
from shardproof.backend.tensor_parallel import LayerContext
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec

pytest.importorskip("transformers")
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

BOUND = 1e-5
TOKENS, HEADS, GROUPS, WIDTH = 21, 6, 3, 8
WINDOWS = {"sliding_window": 5, "window_layers": (1, 0)}
CAPPED = ModelSpec("capped", 2, 32, 48, HEADS, GROUPS, WIDTH, 61, 64, attention_softcap=1.5, **WINDOWS)
SINKS = ModelSpec("sinks", 2, 32, 48, HEADS, GROUPS, WIDTH, 61, 64, attention_sinks=True, **WINDOWS)


def operands() -> list[torch.Tensor]:
    """Queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(5)
    shapes = (2, HEADS, TOKENS, WIDTH), (2, GROUPS, TOKENS, WIDTH), (2, GROUPS, TOKENS, WIDTH), (HEADS,)
    return [2 * torch.randn(shape, generator=generator) for shape in shapes]


def ours(model: ModelSpec, layer: int, mode: str) -> list[torch.Tensor]:
    """The result and the gradients of what goes in."""
    chosen = plan(Layout(), model=model, sequence=TOKENS, samples=2, micro=2, mode=mode)
    tensors = [each.requires_grad_() for each in operands()]

    def run(transport, _):
        context = LayerContext(
            chosen,
            tp=transport.group("tp", "tp", [0]),
            numerics=make_numerics(chosen),
            recorder=transport.recorder,
        )
        q, k, v, sinks = tensors
        if model.attention_sinks:
            q = torch.cat([q, sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
        tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
        with context.running(Microbatch(0, 0, tokens, tokens)):
            return AttentionCore(context, "core", layer)(q, k, v)

    y = run_threads(MemoryWorld(1, timeout_s=60), run, None)[0]
    return with_gradients(y, tensors)


def theirs(model: ModelSpec, layer: int) -> list[torch.Tensor]:
    """The same by the functions of `transformers`, in fp64."""
    tensors = [each.double().requires_grad_() for each in operands()]
    q, k, v, sinks = tensors
    behind = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    seen = (behind >= 0) & (behind < (5 if layer == 0 else TOKENS))
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None, None]
    module = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, training=False, sinks=sinks, head_dim=WIDTH)
    choices = {"scaling": 1 / math.sqrt(WIDTH), "dropout": 0.0}
    if model.attention_softcap:
        y, _ = gemma2.eager_attention_forward(module, q, k, v, mask, softcap=model.attention_softcap, **choices)
    else:
        y, _ = gpt_oss.eager_attention_forward(module, q, k, v, mask, **choices)
    return with_gradients(y.transpose(1, 2), tensors)


def with_gradients(y: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).sin()
    gradients = torch.autograd.grad((y * weights).sum(), tensors, allow_unused=True)
    return [y.detach(), *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("layer", [0, 1], ids=["with a window", "with all tokens"])
@pytest.mark.parametrize("model", [CAPPED, SINKS], ids=lambda model: model.name)
def test_scores_are_capped_and_share_with_sinks_as_in_transformers(model, layer, mode):
    found, expected = ours(model, layer, mode), theirs(model, layer)
    assert len(found) == len(expected) == (5 if model.attention_sinks else 4)
    for one, other in zip(found, expected, strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < BOUND
