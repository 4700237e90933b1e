"""The attention core under context parallelism, with packed documents, grouped heads and dropout: against plain
attention in fp64, and bit for bit against one device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.model.attention_core import AttentionCore
from shardproof.backend.numerics import make_numerics
from shardproof.backend.numerics.dropout import dropout_mask
from shardproof.backend.tensor_parallel import LayerContext, context_part, context_whole
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Precision

SAMPLES, HEADS, HEAD_DIM = 2, 6, 8
FIRST_SAMPLE = 4


def plan_of(
    cp: int = 1, mode: str = "exact", *, sequence: int = 24, block: int = 2, dropout: float = 0.0, ring: bool = False
) -> Plan:
    return plan(
        model=model_preset("tiny-gpt-6h"),
        attention_dropout=dropout,
        max_positions=sequence,
        samples=8,
        micro=SAMPLES,
        sequence=sequence,
        context_parallel="ring" if ring else None,
        mode=mode,
        gradient_token_block=block,
        reduction_token_block=1,
        cp=cp,
    )


def inputs(sequence: int, groups: int = HEADS, width: int = HEAD_DIM) -> list[torch.Tensor]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(sequence + groups + width)
    shapes = [(HEADS, HEAD_DIM), (groups, HEAD_DIM), (groups, width), (HEADS, width)]
    return [torch.randn(SAMPLES, heads, sequence, dim, generator=generator) for heads, dim in shapes]


def beginnings(sequence: int) -> torch.Tensor:
    """Documents that begin inside of blocks and chunks: three in the first sample, two in the second."""
    places = torch.arange(sequence)
    first = torch.where(places < 5, 0, torch.where(places < 17, 5, 17))
    return torch.stack([first, torch.where(places < 10, 0, 10)])


def attend(transport, job) -> list[torch.Tensor]:
    """This rank's part of the result and of the gradients of q, k and v."""
    plan, tensors, documents, scale = job
    solo, cp = (
        transport.group(axis, axis, ranks)
        for axis, ranks in (("tp", [transport.global_rank]), ("cp", range(plan.layout.cp)))
    )
    numerics = make_numerics(plan, global_rank=transport.global_rank)
    context = LayerContext(plan, tp=solo, cp=cp, numerics=numerics, recorder=transport.recorder)
    q, k, v, dy = (context_part(each, cp.size, cp.rank, dim=2) for each in tensors)
    ids = torch.zeros(SAMPLES, q.shape[2], dtype=torch.int64)
    own = None if documents is None else context_part(documents, cp.size, cp.rank)
    given = [each.clone().requires_grad_() for each in (q, k, v)]
    with context.running(Microbatch(0, FIRST_SAMPLE, ids, ids, 7, documents=own)):
        y = AttentionCore(context, "core", 0, scale=scale)(*given)
        y.backward(dy)
    return [y.detach(), *(each.grad for each in given)]


def run(plan: Plan, tensors, documents=None, scale=None) -> list[torch.Tensor]:
    """The whole result and gradients, put together from all ranks."""
    parts = run_threads(MemoryWorld(plan.layout.cp, timeout_s=60), attend, (plan, tensors, documents, scale))
    return [context_whole(each, dim=2) for each in zip(*parts, strict=True)]


def plain(tensors, documents=None, *, scale=None, dropped=None) -> list[torch.Tensor]:
    """softmax(q k^T) v in fp64 by autograd: no fused kernel, no blocks, one mask over the whole square."""
    q, k, v = (each.double().requires_grad_() for each in tensors[:3])
    times, sequence = HEADS // k.shape[1], q.shape[2]
    keys, values = (each.repeat_interleave(times, dim=1) for each in (k, v))
    places = torch.arange(sequence)
    hidden = places > places.unsqueeze(1)
    if documents is not None:
        hidden = hidden | (places < documents.unsqueeze(-1)).unsqueeze(1)
    scores = q @ keys.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    y = (probabilities if dropped is None else probabilities * dropped) @ values
    y.backward(tensors[3].double())
    return [y.detach(), q.grad, k.grad, v.grad]


def largest_error(found, right) -> float:
    """Relative to the largest element of each tensor."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(
    ("cp", "choices", "groups", "width", "packed", "scale"),
    [
        pytest.param(1, {"block": 24}, 6, 8, False, None, id="one-call"),
        pytest.param(1, {"block": 7}, 6, 8, False, None, id="uneven-blocks"),
        pytest.param(1, {"block": 5}, 2, 8, True, 0.3, id="packed"),
        pytest.param(2, {"block": 3}, 3, 8, True, None, id="cp2-packed-grouped"),
        pytest.param(3, {"block": 2, "ring": True}, 2, 8, False, None, id="cp3-ring"),
        pytest.param(2, {"block": 6}, 6, 4, True, 0.2, id="cp2-narrow-values"),
        pytest.param(5, {"block": 1, "sequence": 20}, 1, 8, False, None, id="cp5-one-group"),
        pytest.param(6, {"block": 2}, 6, 8, False, None, id="cp6"),
    ],
)
def test_results_and_gradients_are_those_of_plain_attention(mode, cp, choices, groups, width, packed, scale):
    """Sums over at most 24 keys of fp32 numbers of order one: errors of a few units in the last place, 2^-24 each."""
    sequence = choices.get("sequence", 24)
    tensors, documents = inputs(sequence, groups, width), beginnings(sequence) if packed else None
    found = run(plan_of(cp, mode, **choices), tensors, documents, scale)
    assert largest_error(found, plain(tensors, documents, scale=scale)) < 24 * 2**-24


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("cp", "block", "sequence"), [(2, 2, 24), (3, 1, 24), (3, 3, 36), (4, 3, 24), (5, 2, 20), (6, 2, 24)]
)
def test_no_bit_depends_on_how_the_sequence_is_cut(cp, block, sequence, packed, ring):
    tensors, documents = inputs(sequence, groups=3), beginnings(sequence) if packed else None
    one = run(plan_of(1, sequence=sequence, block=block), tensors, documents)
    many = run(plan_of(cp, sequence=sequence, block=block, ring=ring), tensors, documents)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@pytest.mark.parametrize("sample", [0, 1])
def test_no_bit_depends_on_the_samples_and_heads_next_to_it(sample):
    plan, tensors, documents = plan_of(2, block=3), inputs(24), beginnings(24)
    whole = run(plan, tensors, documents)
    twice = [each[sample : sample + 1].expand(2, -1, -1, -1).contiguous() for each in tensors]
    alone = run(plan, [each[:, :3].contiguous() for each in twice], documents[sample : sample + 1].expand(2, -1))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[sample, :3], b[0])


def test_packed_documents_are_attended_to_as_if_they_were_alone():
    tensors = inputs(24)
    y = run(plan_of(2, block=3), tensors, beginnings(24))[0]
    for lo, hi in ((0, 5), (5, 17), (17, 24)):
        alone = plain([each[:1, :, lo:hi] for each in tensors])[0]
        assert largest_error([y[:1, :, lo:hi]], [alone]) < 24 * 2**-24


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_document_that_begins_behind_whole_tiles_of_the_librarys_kernel_is_no_nan(mode):
    """The kernel takes 512 keys at a time; here the first of them are all hidden from the last queries."""
    tensors, places = inputs(1280), torch.arange(1280)
    documents = torch.where(places < 1100, 0, 1100).expand(SAMPLES, -1)
    found = run(plan_of(2, mode, sequence=1280, block=160), tensors, documents)
    assert largest_error(found, plain(tensors, documents)) < 1280 * 2**-24


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_dropout_takes_the_same_elements_whatever_the_cut(cp):
    tensors, plan = inputs(24), plan_of(cp, dropout=0.25)
    first = FIRST_SAMPLE * HEADS * 24 * 24
    index = torch.arange(first, first + SAMPLES * HEADS * 24 * 24).view(SAMPLES, HEADS, 24, 24)
    right = plain(tensors, dropped=dropout_mask(plan.train.seed, "core", 7, index, 0.25).double())
    found = run(plan, tensors)
    assert largest_error(found, right) < 24 * 2**-24
    assert all(torch.equal(a, b) for a, b in zip(found, run(plan_of(1, dropout=0.25), tensors), strict=True))


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_bf16_rounds_once_where_numerics_are_exact(mode):
    """Exact: one rounding to 8 bits. Fast: the library rounds probabilities too, and partial sums over
    ranks are sent in bf16."""
    tensors = [each.bfloat16() for each in inputs(24, groups=3)]
    plan = replace(plan_of(2, mode, block=3), precision=Precision("bf16"))
    error = largest_error(run(plan, tensors), plain(tensors))
    assert error < (2**-8 if mode == "exact" else 2**-5)
