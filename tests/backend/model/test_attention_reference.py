"""The core of attention against the library's flash kernel, one document at a time: causal and
packed, in blocks and whole.

Bound. Scores sum d terms, the softmax and the mixed values up to s, forward and, with the gradients, four products
more: at most 8 sums of s = 50 terms one after the other on either side, each off by at most K u of its operands' norms,
u = 2^-24 (Higham 2002, section 3.1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.model.attention_core import AttentionCore
from shardproof.backend.numerics import make_numerics
from shardproof.backend.tensor_parallel import LayerContext
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.core.model.model import ModelSpec

SAMPLES, SEQUENCE = 2, 50
BOUND = 2 * 8 * SEQUENCE * 2.0**-24
WHOLE = [[SEQUENCE], [SEQUENCE]]
PACKED = [[13, 1, 20, 16], [33, 17]]
"""Lengths of the documents in each sample; some end inside a block of queries."""


def core_of(
    mode: str, block: int, heads: int, groups: int, width: int, **fields: Any
) -> tuple[AttentionCore, LayerContext]:
    model = ModelSpec("core", 1, heads * width, 60, heads, groups, width, 259, 64, **fields)
    blocks = {"gradient_token_block": block, "reduction_token_block": min(block, 5)}
    chosen = plan(model=model, samples=SAMPLES, micro=SAMPLES, sequence=SEQUENCE, mode=mode, **blocks)
    transport = MemoryWorld(1).transport(0)
    context = LayerContext(
        chosen, tp=transport.group("tp", "tp", [0]), numerics=make_numerics(chosen), recorder=transport.recorder
    )
    return AttentionCore(context, "core", 0), context


def documents_of(lengths: list[list[int]]) -> Tensor:
    """For every token the place where its document begins."""
    return torch.stack([torch.cat([torch.full((n,), sum(row[:i])) for i, n in enumerate(row)]) for row in lengths])


def flash(q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]]) -> Tensor:
    """Every document of every sample by the library's flash kernel, with nothing but itself to see."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        rows = []
        for sample, row in enumerate(lengths):
            parts = zip(*(x[sample : sample + 1].split(row, 2) for x in (q, k, v)), strict=True)
            rows.append(torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2))
    return torch.cat(rows)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize(("mode", "block"), [("exact", 50), ("exact", 16), ("exact", 7), ("fast", 16)])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (6, 2), (4, 1)])
def test_attention_is_that_of_the_flash_kernel(mode, block, heads, groups, lengths):
    width = 8
    core, context = core_of(mode, block, heads, groups, width)
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": heads, "k": groups, "v": groups, "dy": heads}
    q, k, v, dy = (torch.randn(SAMPLES, n, SEQUENCE, width, generator=generator) for n in shapes.values())
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    tokens = torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    with context.running(
        Microbatch(0, 0, tokens, tokens, documents=None if lengths is WHOLE else documents_of(lengths))
    ):
        y = core(*ours)
    expected = flash(*theirs, lengths)
    assert relative(y.detach(), expected.detach()) < BOUND
    y.backward(dy)
    expected.backward(dy)
    for name, own, other in zip("qkv", ours, theirs, strict=True):
        assert relative(own.grad, other.grad) < BOUND, name


@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize(("mode", "block"), [("exact", 50), ("exact", 16), ("fast", 16)])
@pytest.mark.parametrize("window", [1, 11, 49])
def test_a_window_is_that_of_a_mask_written_out(mode, block, window, lengths):
    core, context = core_of(mode, block, 6, 2, 8, sliding_window=window)
    generator = torch.Generator().manual_seed(7)
    q, k, v, dy = (torch.randn(SAMPLES, n, SEQUENCE, 8, generator=generator) for n in (6, 2, 2, 6))
    documents = documents_of(lengths)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    tokens = torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    with context.running(Microbatch(0, 0, tokens, tokens, documents=None if lengths is WHOLE else documents)):
        y = core(*ours)
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    seen = torch.zeros(SAMPLES, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    for sample in range(SAMPLES):
        for i in range(SEQUENCE):
            seen[sample, 0, i, max(i - window + 1, int(documents[sample, i])) : i + 1] = True
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*theirs, attn_mask=seen, enable_gqa=True)
    assert relative(y.detach(), expected.detach()) < BOUND
    y.backward(dy)
    expected.backward(dy.double())
    for name, own, other in zip("qkv", ours, theirs, strict=True):
        # a window of one token has no gradient of q and k
        assert (own.grad - other.grad).norm() < BOUND * (1 + other.grad.norm()), name


SLOPES = {6: (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3), 8: tuple(2.0**-n for n in range(1, 9))}
"""Press et al. 2022, section 3, by number of heads; of six those of four, then two of eight."""


@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize(("mode", "block"), [("exact", 50), ("exact", 16), ("fast", 16)])
@pytest.mark.parametrize(("heads", "more"), [(6, {}), (8, {"sliding_window": 11, "alibi_multiplier": 0.5})])
def test_alibi_is_that_of_a_mask_written_out(mode, block, heads, more, lengths):
    core, context = core_of(mode, block, heads, 2, 8, position="alibi", **more)
    generator = torch.Generator().manual_seed(7)
    q, k, v, dy = (torch.randn(SAMPLES, n, SEQUENCE, 8, generator=generator) for n in (heads, 2, 2, heads))
    documents = documents_of(lengths)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    tokens = torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    with context.running(Microbatch(0, 0, tokens, tokens, documents=None if lengths is WHOLE else documents)):
        y = core(*ours)
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    bias = torch.full((SAMPLES, heads, SEQUENCE, SEQUENCE), -torch.inf, dtype=torch.float64)
    for sample in range(SAMPLES):
        for i in range(SEQUENCE):
            for j in range(max(int(documents[sample, i]), i - more.get("sliding_window", SEQUENCE) + 1), i + 1):
                slopes = torch.tensor(SLOPES[heads], dtype=torch.float64)
                bias[sample, :, i, j] = more.get("alibi_multiplier", 1.0) * slopes * (j - i)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*theirs, attn_mask=bias, enable_gqa=True)
    assert relative(y.detach(), expected.detach()) < BOUND
    y.backward(dy)
    expected.backward(dy.double())
    for name, own, other in zip("qkv", ours, theirs, strict=True):
        assert relative(own.grad, other.grad) < BOUND, name


def test_a_token_that_saw_another_document_would_be_noticed():
    core, context = core_of("exact", 16, 3, 3, 8)
    q, k, v = torch.randn(3, SAMPLES, 3, SEQUENCE, 8, generator=torch.Generator().manual_seed(7)).unbind(0)
    shifted = [[12, 2, 20, 16], [33, 17]]
    tokens = torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    with context.running(Microbatch(0, 0, tokens, tokens, documents=documents_of(shifted))):
        assert relative(core(q, k, v), flash(q, k, v, PACKED)) > BOUND
